"""The search: settings of one method or of several, with the least damage at a cost.

Optuna's tree of Parzen estimators proposes one setting after the other. Each meets the limit by construction, so every
forward is spent on its damage. Settings race (`vitrim.tuning.halving`), so most see few images. Methods race by the
same rule, and settings are proposed for the method of the best one so far.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import nn

from vitrim.checked import checked
from vitrim.core.method import MethodConfig
from vitrim.engines.copies import shared_copy
from vitrim.engines.engine import engines_named, listed
from vitrim.errors import VitrimError
from vitrim.measure.identity import identity, made_for
from vitrim.measure.records import Processes
from vitrim.measure.store import Store
from vitrim.measure.timing import check_engines
from vitrim.tasks import Task
from vitrim.tuning.cost import Cost, Fit, LatencyCost, MacsCost, Timer, latency_fit, timer_on, within
from vitrim.tuning.halving import Difference, Evaluator, difference, halve, means
from vitrim.tuning.proxy import PARTS, DatasetImages, ModelScorer, Proxy, Scores
from vitrim.tuning.result import TOLERANCE, Raced, Result, Target, Trial
from vitrim.tuning.space import Point, Space, normal

EVALUATIONS = 60
"""Default number of settings to try."""

COUNTED, COUNTED_BATCHES = 32, 2
"""Fewest images, and batches, to count and time an adaptive method on."""

KEPT = 4
"""Best starts that are scored on all images."""

FURTHER = 0.03
"""Standard deviation added whenever the proposal is a known setting."""

FINALISTS = 8
"""Trials compared on the selection images."""

TIMED = 4
"""Finalists that are timed if the search only predicts latency."""

TRIES = 120
"""Draws per proposal; if all fail, the space is nearly exhausted."""

HALVINGS = 5
"""Bisection steps to the lowest cost with enough agreement."""

Methods = MethodConfig | str | Sequence[MethodConfig | str]


# ---- one cost --------------------------------------------------------------------------------------------------------


class Search:
    """A search for the least damage at the cost of a target.

    Args:
        methods: the space of every method, and its cost.
        stops: called with a name of the moment before a setting is proposed; True ends the search.

    Attributes:
        trials: trials of the last exploration, in order; the first is a constant setting.
    """

    def __init__(
        self,
        methods: Sequence[tuple[Space, Cost]],
        evaluator: Evaluator,
        target: Target,
        *,
        seed: int = 0,
        stops: Callable[[str], bool] = lambda moment: False,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self.methods = {space.base.describe(): (space, cost) for space, cost in methods}
        self.evaluator, self.target, self.seed = evaluator, target, seed
        self.stops, self.on_trial = stops, on_trial
        self.proxy = evaluator.proxy
        self.trials: list[Trial] = []
        self._seen: list[Scores] = []  # the scores of the trials

    def run(self, evaluations: int) -> Result:
        """Search for the target with at most this number of trials; for ``agree``, split over the costs of a bisection.

        Raises:
            VitrimError: the target is out of reach, or the model has no such score.
        """
        if self.target.kind != "agree":
            result = self.check(*self.explore(self.target.limit, evaluations))
            return replace(result, race=self.outcomes()) if len(self.methods) > 1 else result
        trials: list[Trial] = []
        least, found = self._cheapest(0.0, 1.0, max(evaluations // HALVINGS, 1), 1, trials)
        if found is None:
            name = next(iter(self.methods))
            raise VitrimError(
                f"{name} does not agree with the dense model in {self.target.value:.1%} of the selection images at "
                f"{least:.0%} of its MACs: ask for less"
            )
        result = self.check(*found, trials)
        if result.better or self.agreement(result.constant) >= self.target.value:
            return result
        # a constant setting that agrees enough costs more than the searched one, so the latter is compared with it
        _, cheaper = self._cheapest(least, 1.0, 1, 0, [])
        constant, _ = cheaper or self.explore(1.0, 1)
        return replace(self.check(constant, result.searched, trials), better=False)

    def _cheapest(
        self, low: float, high: float, evaluations: int, which: int, trials: list[Trial]
    ) -> tuple[float, tuple[Trial, Trial] | None]:
        """The least cost between two at which the constant (0) or the chosen (1) trial agrees with the dense model, and
        the pair there; None if there is none. ``trials`` gets those of every exploration."""
        best = None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.reaches(middle):
                pair = self.explore(middle, evaluations)
                trials += self.trials
                if self.agreement(pair[which]) >= self.target.value:
                    best, high = pair, middle
                    continue
            low = middle
        return low if best is None else high, best

    def explore(self, limit: float, evaluations: int) -> tuple[Trial, Trial]:
        """Search at a cost of at most ``limit``, a share of the dense model's, and choose on the selection images;
        return the constant trial and the chosen one, which may be the same.

        Trials of methods that the race left behind do not count as ``evaluations``.
        """
        self.trials, self._seen = [], []
        seen: set[str] = set()
        constants, starts = self.starts(limit, evaluations - 1, seen)
        self._race([*constants, *starts], len(constants))
        left = {trial.method for trial in self.trials if self._full(trial)}
        spare = evaluations - sum(trial.method in left for trial in self.trials)
        while spare > 0 and not self.stops(f"{self.target} at {limit:.6g} after {len(self.trials)} settings"):
            proposal = self._proposal(limit, seen)
            if proposal is None:
                break
            self._race([proposal])
            spare -= 1
        ranked = sorted(filter(self._full, self.trials), key=self._score)
        others = [trial for trial in ranked if trial.source != "constant"][: FINALISTS - 1]
        finalists = [*(trial for trial in ranked if trial.source == "constant"), *others]
        if len(finalists) > 1:
            scores = self.evaluator.whole([trial.config for trial in finalists], "selection")
            order = np.argsort([self.evaluator.mean(one) for one in scores], kind="stable")
            finalists = [finalists[place] for place in order]
        constant = next(trial for trial in finalists if trial.source == "constant")
        numbers = constant.number, self._first_within(finalists, constant, limit).number
        return self.trials[numbers[0]], self.trials[numbers[1]]

    def reaches(self, limit: float) -> bool:
        """True if a constant setting meets the limit."""
        return any(within(space, None, cost, limit) is not None for space, cost in self.methods.values())

    def agreement(self, trial: Trial) -> float:
        """The agreement with the dense model on the selection images; `VitrimError` if it is undefined per image."""
        scores = self.evaluator.whole([trial.config], "selection")[0]
        if "agree" not in scores:
            raise VitrimError("this model's predictions do not agree or disagree image by image: give another target")
        return 1.0 - float(scores["agree"].mean(dtype=np.float64))

    def check(self, constant: Trial, searched: Trial, trials: Sequence[Trial] | None = None) -> Result:
        """Compare the chosen trial with the constant one on images that neither was chosen by.

        Args:
            constant, searched: from `explore`.
            trials: trials of the result; by default those of the last `explore`.
        """
        found: dict[str, Difference] = {}
        levels: dict[str, dict[str, float]] = {}
        if searched is not constant:
            one, other = self.evaluator.whole([searched.config, constant.config], "check")
            found = {name: difference(one[name], other[name]) for name in sorted(set(one) & set(other))}
            levels = {"constant": means(other), "searched": means(one)}
        better = bool(found) and found[self.proxy].better
        if better and "kl" in found:  # a gain in the feature may not matter to the head
            better = found["kl"].mean <= 0.0
        every = tuple(self.trials if trials is None else trials)
        cost = self.methods[searched.method][1]
        return Result(constant, searched, found, better, every, levels, self.proxy, self.target, cost)

    def outcomes(self) -> tuple[Raced, ...]:
        """A row per method of the last exploration, best first: its best trial, and how far that is behind the best of
        all on the images that both saw."""
        best = min(filter(self._full, self.trials), key=self._score)
        rows = []
        for method in self.methods:
            own = [trial for trial in self.trials if trial.method == method]
            if not own:
                rows.append(Raced(method, "out of reach", note=self._out_of_reach(method, self.target.limit)))
                continue
            trial = min(own, key=lambda one: (-one.images, self._score(one)))
            scores, leader = (self._seen[one.number][self.proxy] for one in (trial, best))
            behind = None if trial is best else difference(scores, leader[: trial.images])
            facts = trial.config, trial.share, trial.images, self._score(trial), behind
            rows.append(Raced(method, "searched" if self._full(trial) else "dropped", *facts))
        return tuple(sorted(rows, key=lambda row: (-row.images, row.score or 0.0)))

    # ---- candidates --------------------------------------------------------------------------------------------------

    def starts(self, limit: float, each: int, seen: set[str]) -> tuple[list[Trial], list[Trial]]:
        """The constant setting of every method within reach, and up to ``each`` other starts of everyone;
        `VitrimError` if the limit is out of reach for all."""
        constants, others = list[Trial](), list[Trial]()
        for method, (space, cost) in self.methods.items():
            config = within(space, None, cost, limit)
            if config is None:
                continue
            seen.add(f"{method} {space.key(config)}")
            constants.append(self._trial(method, config, space.point(config), "constant"))
            own = (self._candidate(method, point, limit, "start", seen) for point in space.starts())
            others += islice(filter(None, own), each)
        if not constants:
            raise VitrimError("; ".join(self._out_of_reach(method, limit) for method in self.methods))
        return constants, others

    def _out_of_reach(self, method: str, limit: float) -> str:
        space, cost = self.methods[method]
        asked = limit - TOLERANCE if cost.unit == "macs" else limit
        return (
            f"{space.base.name} cannot go below {cost.share(space.constant(1.0)):.1%} of the dense model's {cost.unit} "
            f"here, and {asked:.1%} are asked for"
        )

    def _proposal(self, limit: float, seen: set[str]) -> Trial | None:
        """A new setting of the method of the best trial: that of the sampler, or else of a point at growing distance
        from it, because nearby points are often the same setting. None if all were tried before.

        It depends only on the seed and the trials, so a resumed search makes the same one.
        """
        best = min(filter(self._full, self.trials), key=self._score)
        sampled = np.array(self._sampled(best))
        random = np.random.default_rng((self.seed, len(self.trials)))
        for number in range(TRIES):
            point = normal((sampled + random.normal(0.0, FURTHER * number, len(sampled))).clip(0.0, 1.0).tolist())
            trial = self._candidate(best.method, point, limit, "tpe", seen)
            if trial is not None:
                return trial
        return None

    def _sampled(self, best: Trial) -> list[float]:
        """Weights that optuna's sampler proposes after the trials of one method, from their points and scores.

        The sampler is made for every proposal, because optuna's storages do not keep its state. The score of a dropped
        trial is that of the best, and their difference on the images that both saw.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        whole = self._seen[best.number][self.proxy]
        ranges: dict[str, Any] = {
            f"w{place:03d}": optuna.distributions.FloatDistribution(0.0, 1.0) for place in range(len(best.point))
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optuna warns about experimental features
            seed = (self.seed + len(self.trials)) % 2**32
            study = optuna.create_study(
                sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, multivariate=True)
            )
            for trial in self.trials:
                if trial.method == best.method:
                    own = self._seen[trial.number][self.proxy]
                    value = float(whole.mean(dtype=np.float64) + (own - whole[: len(own)]).mean(dtype=np.float64))
                    params = dict(zip(ranges, trial.point, strict=True))
                    study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, value=value))
            asked = study.ask(ranges).params
        return [asked[name] for name in ranges]

    def _candidate(self, method: str, point: Point, limit: float, source: str, seen: set[str]) -> Trial | None:
        """The setting of a point within the limit; None if there is none or it was tried before."""
        space, cost = self.methods[method]
        config = within(space, point, cost, limit)
        if config is None or (key := f"{method} {space.key(config)}") in seen:
            return None
        seen.add(key)
        return self._trial(method, config, point, source)

    def _trial(self, method: str, config: MethodConfig, point: Point, source: str) -> Trial:
        return Trial(-1, method, config, point, self.methods[method][1].share(config), source)

    # ---- scores ------------------------------------------------------------------------------------------------------

    def _race(self, candidates: Sequence[Trial], constants: int = 0) -> None:
        """Score candidates, in a race with the best trial so far, and add them to the trials."""
        best = min(filter(self._full, self.trials), key=self._score, default=None)
        rival, least = (None, KEPT) if best is None else (self._seen[best.number], 0)
        configs = [candidate.config for candidate in candidates]
        every = halve(configs, self.evaluator, rival, least=least, constants=constants)
        for candidate, scores in zip(candidates, every, strict=True):
            number, images = len(self.trials), len(scores[self.proxy])
            trial = replace(candidate, number=number, images=images, scores=means(scores))
            self.trials.append(trial)
            self._seen.append(scores)
            if self.on_trial is not None:
                self.on_trial(trial)

    def _first_within(self, ranked: Sequence[Trial], constant: Trial, limit: float) -> Trial:
        """The first of ``ranked`` whose measured cost is within the limit, up to the prediction error, or else the
        cheapest. Only the first few and the constant trial are measured."""
        first = ranked[:TIMED]
        timed = first if constant in first else [*first, constant]
        cost = self.methods[constant.method][1]
        shares = cost.measure([trial.config for trial in timed])
        if shares is None:
            return ranked[0]
        for trial, share in zip(timed, shares, strict=True):
            self.trials[trial.number] = replace(trial, measured=share)
        real = {trial.number: share for trial, share in zip(first, shares, strict=False)}
        near = (trial for trial in first if real[trial.number] <= limit * (1.0 + self.methods[trial.method][1].error))
        return next(near, min(first, key=lambda trial: real[trial.number]))

    def _full(self, trial: Trial) -> bool:
        return trial.images == self.evaluator.images("search")

    def _score(self, trial: Trial) -> float:
        return trial.scores[self.proxy]


# ---- a model and its images ------------------------------------------------------------------------------------------


@checked
class SearchSpec:
    """The objective of a search, and when it ends.

    Attributes:
        proxy: the damage to minimise: feature, kl, cosine or agree (1 - agreement).
        minutes: time limit.
        engine: for speedup: engine to be fast on, see ``vitrim bench``; among several (a list or comma-separated), the
            fastest for the dense model; None for eager.
        precision: for speedup: fp32, bf16, fp16 or int8, one or several; the fastest pair of engine and precision for
            the dense model; None for fp32. Damage is measured in fp32.

    Raises:
        VitrimError: an unknown proxy, or no time.
    """

    proxy: Proxy = "feature"
    minutes: Annotated[float, Field(gt=0)] | None = None
    engine: str | Sequence[str] | None = None
    precision: str | Sequence[str] | None = None

    @property
    def where(self) -> tuple[list[str], list[str]]:
        return listed(self.engine) or ["eager"], listed(self.precision) or ["fp32"]


class SearchOptions(TypedDict, total=False):
    """Options of `Searches`.

    Attributes:
        spec: objective and time limit. The time is that of this run, split evenly over several targets; a resumed
            search ends where it did.
        evaluations: most settings to try per target, default 60; methods that a race leaves behind add to them.
        seed: seed of drawn settings, and of methods that draw at random.
        store: file that stores all measurements.
        resume: continue from that file; the result is that of an uninterrupted search.
        about: more entries for the store and the result, e.g. the source of the images.
        timer: instead of an engine, a function that times settings (`vitrim.tuning.cost.Timer`).
        processes: this process and its peers. All get the same result, the first one writes.
        on_trial: called with every finished trial.
    """

    spec: SearchSpec
    evaluations: int
    seed: int
    store: Path | None
    resume: bool
    about: Mapping[str, Any]
    timer: Timer | None
    processes: Processes | None
    on_trial: Callable[[Trial], None] | None


class Searches:
    """Searches for several targets, which share a model, its images and measurements.

    A third of the images is for searching, the next for selecting a candidate. The candidate is returned if it beats
    the constant setting, one value for all blocks, on the last third by 2 standard errors of the paired differences;
    otherwise the constant setting is returned.

    Args:
        model: the dense model, on the device to search on; not changed.
        methods: options other than the amount are kept.
        targets: of one kind.

    Raises:
        VitrimError: a method without a tunable amount, a target out of reach, or a store of another search; nothing is
            written.
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[MethodConfig],
        task: Task,
        images: DatasetImages,
        targets: Sequence[Target],
        options: SearchOptions,
    ) -> None:
        self.model, self.images, self.targets, self.options = model, images, targets, options
        spec = options.get("spec", SearchSpec())
        self.evaluations, self.seed = options.get("evaluations", EVALUATIONS), options.get("seed", 0)
        self.seconds = None if spec.minutes is None else 60.0 * spec.minutes
        self.timer = self._timer(spec)
        self.spaces = [Space.of(model, one) for one in methods]
        if len(self.spaces) > 1 and targets[0].kind == "agree":
            raise VitrimError("several methods race at one cost: give macs or speedup, or one method for agree")
        self.about = self._about(spec)
        file, processes = options.get("store"), options.get("processes")
        content = {} if file is None else {"content": identity(model, task, images.dataset)}
        self.store = Store(file, {**self.about, **content}, resume=options.get("resume", False), processes=processes)
        scorer = ModelScorer(model, task, images, seed=self.seed, processes=processes)
        self.evaluator = Evaluator(scorer, self.store, spec.proxy)
        self._costs: list[Cost] = []

    def _timer(self, spec: SearchSpec) -> Timer:
        """The timer of the options or the engines; `VitrimError` for engines that no target needs."""
        engine, precision = spec.where
        engines, _ = engines_named(engine, precision, next(self.model.parameters()).device)
        if engine != ["eager"] or precision != ["fp32"]:
            if any(target.kind != "speedup" for target in self.targets):
                raise VitrimError(f"an engine is for speedup targets: {self.targets[0]} does not depend on it")
            check_engines(engines, {}, self.model, 1)
        return self.options.get("timer") or timer_on(engine, precision)

    def _about(self, spec: SearchSpec) -> dict[str, Any]:
        """Everything that the search follows from, for its store and its results."""
        engine, precision = spec.where
        return {
            "vitrim": version("vitrim"),
            "optuna": version("optuna"),
            "made_for": made_for(self.model),
            "base": ", ".join(space.base.describe() for space in self.spaces),
            "target": ", ".join(map(str, self.targets)),
            "proxy": spec.proxy,
            **({} if engine == ["eager"] else {"engine": ", ".join(engine)}),
            **({} if precision == ["fp32"] else {"precision": ", ".join(precision)}),
            "seed": self.seed,
            "evaluations": self.evaluations,
            "images": {part: self.images.count(part) for part in PARTS},
            "batch_size": self.images.batch_size,
            **self.options.get("about", {}),
        }

    def run(self) -> list[Result]:
        """Search for every target, each with its share of the time."""
        start, found = time.monotonic(), list[Result]()
        for number, target in enumerate(self.targets, 1):
            end = None if self.seconds is None else start + self.seconds * number / len(self.targets)

            def stops(moment: str, end: float | None = end) -> bool:
                return self.store.ended(f"time is over: {moment}", lambda: end is not None and time.monotonic() >= end)

            self._costs = self._costs or [self._cost(space, target) for space in self.spaces]
            methods = list(zip(self.spaces, self._costs, strict=True))
            on_trial = self.options.get("on_trial")
            search = Search(methods, self.evaluator, target, seed=self.seed, stops=stops, on_trial=on_trial)
            result = replace(search.run(self.evaluations), about={**self.about, "target": str(target)})
            self._note(target, result.trials)
            found.append(result)
        return found

    def _note(self, target: Target, trials: Sequence[Trial]) -> None:
        """Store the trials, for readers of the file."""
        names = [f"trial {trial.number} of {target}" for trial in trials]
        self.store.values(names, lambda places: [trials[place].facts for place in places])

    def _cost(self, space: Space, target: Target) -> Cost:
        """The cost for the target; latency is measured once per store."""
        like = next(self.model.parameters())
        least = COUNTED if space.adaptive else 0
        stop = min(max(COUNTED_BATCHES * self.images.batch_size, least), self.images.count("search"))
        few = [one.images.to(like.device, like.dtype) for one in self.images.sample("search", stop)]
        if target.kind != "speedup":
            return MacsCost(self.model, space, few, seed=self.seed)
        model = shared_copy(self.model).eval()
        counted = MacsCost(self.model, space, few) if space.adaptive else None
        whole = [batch for batch in few if len(batch) == len(few[0])]
        timed = whole if space.adaptive else whole[:1]

        def clock(configs: Sequence[MethodConfig]) -> tuple[NDArray[np.float64], float]:
            return self.timer(model, configs, timed)

        def measure() -> dict[str, Any]:
            fit, dense_ms = latency_fit(space, clock, seed=self.seed, counted=counted)
            return {"fit": fit.coefficients.tolist(), "error": fit.error, "worst": fit.worst, "dense_ms": dense_ms}

        def again(configs: Sequence[MethodConfig]) -> list[float]:
            texts = ", ".join(config.describe() for config in configs)
            return self.store.value(f"once more: {texts}", lambda: clock(configs)[0].tolist())

        found = self.store.value(f"latency of {space.base.describe()}", measure)
        fit = Fit(np.array(found["fit"]), found["error"], found["worst"])
        return LatencyCost(space, fit, again, counted)
