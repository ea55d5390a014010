"""Searches: one method, as a race of candidates under a cost limit on paired differences; several methods, as a race on
few images and a search of the survivors; several targets, one after the other.

Candidates meet the limit by construction, so every forward is spent on their damage. They are scored on more and more
images, and dropped when they are significantly worse than the best one. Methods race by the best starting point of
their searches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch import Tensor, nn

from vitrim.checked import checked
from vitrim.core.checks import described
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of
from vitrim.engines.copies import shared_copy
from vitrim.engines.engine import engines_named, listed
from vitrim.errors import VitrimError
from vitrim.measure.bench import check_engines
from vitrim.measure.identity import identity, weights_fingerprint
from vitrim.measure.latency import Budget
from vitrim.measure.records import Processes
from vitrim.measure.task_data import num_classes
from vitrim.tasks import Task, make_task
from vitrim.tuning.cost import Cost, Fit, LatencyCost, MacsCost, Timer, latency_fit, timer_on, within
from vitrim.tuning.proxy import PARTS, BatchImages, ImageParts, ModelScorer, Proxy, Scores
from vitrim.tuning.result import TOLERANCE, Difference, ParetoFront, Raced, Result, Target, Trial, difference
from vitrim.tuning.space import Point, Space, quiet
from vitrim.tuning.strategy import Evolution, Observation, Strategy, make_strategy
from vitrim.tuning.study import Evaluator, Study, joined, means

EVALUATIONS = 60
"""Default number of settings to try."""

COUNTED, COUNTED_BATCHES = 32, 2
"""Fewest images, and batches, to count and time an adaptive method on."""

FINALISTS = 8
"""Trials compared on the selection images."""

TIMED = 4
"""Finalists that are timed if the search only predicts latency."""

TRIES = 30
"""Draws per new child; if all fail, the space is nearly exhausted."""

HALVINGS = 5
"""Bisection steps to the lowest cost with enough agreement."""

ERRORS = 3.0
"""Standard errors behind the leader at which a method is out: among many methods, one is often 2 behind by chance."""

SURVIVORS = 3
"""Most methods that are searched after a race."""

Methods = MethodConfig | str | Sequence[MethodConfig | str]

_Positive = Annotated[float, Field(gt=0)]


# ---- one method ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposal:
    """A setting to score, with its source and point."""

    config: MethodConfig
    point: Point
    source: str


class Search:
    """A search for the least damage of one method at the cost of a target.

    Args:
        strategy: proposes candidates; default evolution.
        stops: called before new candidates are proposed; True ends the search.

    Attributes:
        trials: trials of the last exploration, in order; the first is the constant setting.
    """

    def __init__(
        self,
        space: Space,
        cost: Cost,
        evaluator: Evaluator,
        target: Target,
        *,
        strategy: Strategy | None = None,
        seed: int = 0,
        stops: Callable[[], bool] = bool,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self.space, self.cost, self.evaluator, self.target = space, cost, evaluator, target
        self.strategy, self.seed, self.stops, self.on_trial = strategy or Evolution(), seed, stops, on_trial
        self.proxy = evaluator.proxy
        self.trials: list[Trial] = []
        self._seen: list[NDArray[np.float32]] = []  # the scores of the trials

    # ---- the search --------------------------------------------------------------------------------------------------

    def run(self, evaluations: int) -> Result:
        """Search for the target with at most this number of trials; for ``agree``, split over the costs of a bisection.

        Raises:
            VitrimError: the target is out of reach, or the model has no such score.
        """
        if self.target.kind != "agree":
            return self.check(*self.explore(self.target.limit, evaluations))
        low, high, best = 0.0, 1.0, None
        trials: list[Trial] = []
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.reaches(middle):
                pair = self.explore(middle, max(evaluations // HALVINGS, 1))
                trials += self.trials
                if self.agreement(pair[1]) >= self.target.value:
                    best, high = pair, middle
                    continue
            low = middle
        if best is None:
            raise VitrimError(
                f"{self.space.base.name} does not agree with the dense model in {self.target.value:.1%} of the "
                f"selection images at {low:.0%} of its MACs: ask for less"
            )
        result = self.check(*best, trials)
        if result.better or self.agreement(result.constant) >= self.target.value:
            return result
        # a constant setting that agrees enough costs more than the searched one, so the latter is compared with it
        low, high = high, 1.0
        constant, _ = self.explore(high, 1)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            trial, _ = self.explore(middle, 1)
            if self.agreement(trial) >= self.target.value:
                constant, high = trial, middle
            else:
                low = middle
        return replace(self.check(constant, result.searched, trials), better=False)

    def explore(self, limit: float, evaluations: int) -> tuple[Trial, Trial]:
        """Search at a cost of at most ``limit``, a share of the dense model's, and choose on the selection images;
        return the constant trial and the chosen one, which may be the same.
        """
        self.trials, self._seen = [], []
        starts = self.starts(limit)[:evaluations]
        seen = {self.space.key(start.config) for start in starts}
        best = self._race(starts, None)
        while len(self.trials) < evaluations and not self.stops():
            children = self._children(limit, min(self.strategy.children, evaluations - len(self.trials)), seen)
            if not children:
                break
            best = self._race(children, best)
        ranked = sorted((trial for trial in self.trials[1:] if self._full(trial)), key=self._score)
        finalists = [self.trials[0], *ranked[: FINALISTS - 1]]
        if len(finalists) > 1:
            scores = self.evaluator.whole([trial.config for trial in finalists], "selection")
            order = np.argsort([self.evaluator.mean(one) for one in scores], kind="stable")
            finalists = [finalists[place] for place in order]
        chosen = self._first_within(finalists, limit)
        return self.trials[0], chosen

    def starts(self, limit: float) -> list[Proposal]:
        """The initial candidates, the constant setting first; `VitrimError` if the limit is out of reach."""
        constant = within(self.space, None, self.cost, limit)
        if constant is None:
            raise VitrimError(self.out_of_reach(limit))
        seen = {self.space.key(constant)}
        others = [self._candidate(point, limit, "start", seen) for point in self.strategy.starts(self.space)]
        first = Proposal(constant, self.space.point(constant), "constant")
        return [first, *(one for one in others if one is not None)]

    def out_of_reach(self, limit: float) -> str:
        least = self.cost.share(self.space.constant(1.0))
        asked = limit - TOLERANCE if self.cost.unit == "macs" else limit
        return (
            f"{self.space.base.name} cannot go below {least:.1%} of the dense model's {self.cost.unit} here, and "
            f"{asked:.1%} are asked for"
        )

    def reaches(self, limit: float) -> bool:
        """True if a constant setting meets the limit."""
        return within(self.space, None, self.cost, limit) is not None

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
        return Result(constant, searched, found, better, every, levels, self.proxy, self.target, self.cost)

    # ---- candidates --------------------------------------------------------------------------------------------------

    def _children(self, limit: float, number: int, seen: set[str]) -> list[Proposal]:
        """New candidates; they depend only on the seed and the trials."""
        if self.space.size < 2:
            return []
        proposals = islice(self.strategy.propose(self.space, self._observations(), self.seed), TRIES * number)
        candidates = (self._candidate(point, limit, source, seen) for source, point in proposals)
        return list(islice((one for one in candidates if one is not None), number))

    def _observations(self) -> list[Observation]:
        """The trials as observations. The score of a dropped trial is extrapolated from its difference to the best
        trial on the images that both saw."""
        best = min((trial for trial in self.trials if self._full(trial)), key=self._score)
        whole = self._seen[best.number]
        mean = float(whole.mean(dtype=np.float64))
        found = []
        for trial, own in zip(self.trials, self._seen, strict=True):
            full = self._full(trial)
            gap = float((own - whole[: len(own)]).mean(dtype=np.float64))
            found.append(Observation(trial.point, trial.config, self._score(trial) if full else mean + gap, full))
        return found

    def _candidate(self, point: Point, limit: float, source: str, seen: set[str]) -> Proposal | None:
        """The setting of a point within the limit; None if there is none or it was tried before."""
        config = within(self.space, point, self.cost, limit)
        if config is None or self.space.key(config) in seen:
            return None
        seen.add(self.space.key(config))
        return Proposal(config, point, source)

    # ---- scores ------------------------------------------------------------------------------------------------------

    def _race(self, candidates: Sequence[Proposal], best: Trial | None) -> Trial:
        """Score candidates on more and more images, drop those significantly worse than the best, and return the
        best."""
        alive = list(range(len(candidates)))
        scores: list[Scores] = [{} for _ in candidates]
        for start, stop in pairwise([0, *self.evaluator.rounds()]):
            new = self.evaluator.piece([candidates[place].config for place in alive], "search", start, stop)
            for place, found in zip(alive, new, strict=True):
                scores[place] = joined(scores[place], found)
            alive = self._survivors(alive, scores, best)
        for candidate, own in zip(candidates, scores, strict=True):
            trial = self._finish(candidate, own)
            if best is None or (self._full(trial) and self._score(trial) < self._score(best)):
                best = trial
        assert best is not None
        return best

    def _survivors(self, alive: list[int], scores: Sequence[Scores], best: Trial | None) -> list[int]:
        """The candidates that may still win. Without a best trial, they are compared with the first candidate."""
        first = scores[0][self.proxy] if best is None else self._seen[best.number]
        kept = []
        for place in alive:
            own = scores[place][self.proxy]
            if (best is None and place == 0) or not difference(own, first[: len(own)]).worse:
                kept.append(place)
        return kept

    def _finish(self, candidate: Proposal, scores: Scores) -> Trial:
        share, images, number = self.cost.share(candidate.config), len(scores[self.proxy]), len(self.trials)
        trial = Trial(number, candidate.config, candidate.point, share, candidate.source, images, means(scores))
        self.trials.append(trial)
        self._seen.append(scores[self.proxy])
        self.evaluator.study.note(
            trial=number, method=trial.config.describe(), share=share, source=trial.source, images=images,
            scores=dict(trial.scores),
        )  # fmt: skip
        if self.on_trial is not None:
            self.on_trial(trial)
        return trial

    def _first_within(self, ranked: Sequence[Trial], limit: float) -> Trial:
        """The first of ``ranked`` whose measured cost is within the limit, up to the prediction error, or else the
        cheapest. Only the first few and the constant trial are measured."""
        first = [trial.number for trial in ranked[:TIMED]]
        timed = first if 0 in first else [*first, 0]
        shares = self.cost.measure([self.trials[number].config for number in timed])
        if shares is None:
            return ranked[0]
        real = dict(zip(timed, shares, strict=True))
        for number, share in real.items():
            self.trials[number] = replace(self.trials[number], measured=share)
        near = limit * (1.0 + self.cost.error)
        cheapest_first = sorted(first, key=real.__getitem__)
        return self.trials[next((number for number in first if real[number] <= near), cheapest_first[0])]

    def _full(self, trial: Trial) -> bool:
        return trial.images == self.evaluator.images("search")

    def _score(self, trial: Trial) -> float:
        return trial.scores[self.proxy]


# ---- several methods -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Runner:
    """A method in the race, with its search and its best starting point.

    Attributes:
        best: the best start on the first images.
        behind: difference to the leader of the last round; None for the leader.
    """

    search: Search
    best: Proposal
    scores: Scores
    behind: Difference | None = None

    def row(self, state: Literal["searched", "dropped"], config: MethodConfig, score: float) -> Raced:
        """The row of the method for a setting and its score."""
        share, images = self.search.cost.share(config), len(self.scores[self.search.proxy])
        return Raced(self.search.space.base.describe(), state, config, share, images, score, self.behind)


def race(searches: Sequence[Search], evaluations: int) -> Result:
    """Race methods, search the best of them, and compare the winner with the best constant setting.

    Args:
        searches: one per method, with the same target and evaluator.
        evaluations: most settings tried by all searches together.

    Returns:
        The result, whose constant trial is the best constant setting of all searched methods, with a row per method,
        best first.

    Raises:
        VitrimError: no method reaches the target.
    """
    evaluator, limit = searches[0].evaluator, searches[0].target.limit
    able = [search for search in searches if search.reaches(limit)]
    far = [
        Raced(search.space.base.describe(), "out of reach", note=search.out_of_reach(limit))
        for search in searches
        if search not in able
    ]
    if not able:
        raise VitrimError("; ".join(row.note for row in far))
    survivors, dropped = survivors_of(able, evaluator, limit)
    for row in dropped:
        evaluator.study.note(dropped=row.method, images=row.images, score=row.score)
    pairs = [one.search.explore(limit, max(evaluations // len(survivors), 1)) for one in survivors]

    def best(trials: Sequence[Trial]) -> int:
        scores = evaluator.whole([trial.config for trial in trials], "selection")
        return int(np.argmin([evaluator.mean(one) for one in scores]))

    chosen, constant = best([pair[1] for pair in pairs]), best([pair[0] for pair in pairs])
    every = [trial for one in survivors for trial in one.search.trials]
    trials = [replace(trial, number=number) for number, trial in enumerate(every)]
    result = survivors[chosen].search.check(pairs[constant][0], pairs[chosen][1], trials)
    searched = []
    for one, (_, trial) in zip(survivors, pairs, strict=True):
        score = evaluator.mean(evaluator.whole([trial.config], "selection")[0])
        searched.append(one.row("searched", trial.config, score))
    searched.sort(key=lambda row: row.score or 0.0)
    return replace(result, race=(*searched, *dropped, *far))


def survivors_of(searches: Sequence[Search], evaluator: Evaluator, limit: float) -> tuple[list[Runner], list[Raced]]:
    """The methods left after all rounds, best first, and rows of the dropped ones, last dropped first."""
    runners: list[Runner] = []
    dropped: list[Raced] = []

    def rows(out: Sequence[Runner]) -> list[Raced]:
        return [one.row("dropped", one.best.config, evaluator.mean(one.scores)) for one in out]

    for start, stop in pairwise([0, *evaluator.rounds()]):
        if start == 0:
            for search in searches:
                starts = search.starts(limit)
                scores = evaluator.piece([one.config for one in starts], "search", 0, stop)
                best = int(np.argmin([evaluator.mean(one) for one in scores]))
                runners.append(Runner(search, starts[best], scores[best]))
        else:
            for one in runners:
                new = evaluator.piece([one.best.config], "search", start, stop)[0]
                one.scores = joined(one.scores, new)
        runners.sort(key=lambda one: evaluator.mean(one.scores))
        leader = runners[0].scores[evaluator.proxy]
        runners[0].behind = None
        for one in runners[1:]:
            one.behind = difference(one.scores[evaluator.proxy], leader)
        out = [one for one in runners if one.behind and one.behind.mean > _bar(stop) * one.behind.error]
        dropped = [*rows(out), *dropped]
        runners = [one for one in runners if one not in out]
    return runners[:SURVIVORS], [*rows(runners[SURVIVORS:]), *dropped]


def _bar(images: int) -> float:
    """Standard errors behind the leader at which a method is out, as unlikely on few images as `ERRORS` on many.

    Student's quantile with ``images - 1`` degrees of freedom, expanded at the normal one (Abramowitz and Stegun,
    26.7.5): on 8 images, a method as good as the leader is 3 errors behind in 1 of 100 cases, not in 1 of 700.

    Example:
        >>> [round(_bar(images), 1) for images in (8, 32, 256, 2048)]
        [4.5, 3.3, 3.0, 3.0]
    """
    z, degrees = ERRORS, images - 1
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


# ---- several targets -------------------------------------------------------------------------------------------------


def of_one_kind(targets: Sequence[Target]) -> list[Target]:
    """The targets of a front; `VitrimError` for several kinds, or for agreement."""
    if len({one.kind for one in targets}) != 1 or targets[0].kind == "agree":
        raise VitrimError(f"a front is over targets of one kind, macs or speedup, got {', '.join(map(str, targets))}")
    return list(targets)


@checked
class SearchSpec:
    """The strategy of a search, its objective, and when it ends.

    Attributes:
        strategy: evolution, random, or optuna's gp or tpe.
        shape: amounts over the depth: slope (9 settings), curve (2 numbers), free (a number per block).
        proxy: the damage to minimise: feature, kl, cosine or agree (1 - agreement).
        minutes: time limit.
        engine: for speedup: engine to be fast on, see ``vitrim bench``; among several (a list or comma-separated), the
            fastest for the dense model; None for eager.
        precision: for speedup: fp32, bf16, fp16 or int8, one or several; the fastest pair of engine and precision for
            the dense model; None for fp32. Damage is measured in fp32.

    Raises:
        VitrimError: an unknown proxy, strategy or shape, or no time.
    """

    strategy: str = "evolution"
    shape: str = "free"
    proxy: Proxy = "feature"
    minutes: Annotated[float, Field(gt=0)] | None = None
    engine: str | Sequence[str] | None = None
    precision: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        make_strategy(self.strategy, self.shape)

    @property
    def where(self) -> tuple[list[str], list[str]]:
        return listed(self.engine) or ["eager"], listed(self.precision) or ["fp32"]


class SearchOptions(TypedDict, total=False):
    """Options of `search` and `front`.

    Attributes:
        task: task of the model; default classification.
        spec: strategy, objective and time limit. The time is that of this run, split evenly over several targets; a
            resumed study ends where it did.
        evaluations: most settings to try per target, default 60; a race of several methods adds to them.
        seed: seed of drawn settings, and of methods that draw at random.
        study: file that stores all measurements.
        resume: continue from that file; the result is that of an uninterrupted search.
        about: more entries for study and result, e.g. the source of the images.
        budget: time for every timed setting, for ``speedup``.
        timer: instead of an engine, a function that times settings (`vitrim.tuning.cost.Timer`).
        processes: this process and its peers. All get the same result, the first one writes.
        on_trial: called with every finished trial.
    """

    task: Task | None
    spec: SearchSpec
    evaluations: int
    seed: int
    study: Path | None
    resume: bool
    about: Mapping[str, Any]
    budget: Budget | None
    timer: Timer | None
    processes: Processes | None
    on_trial: Callable[[Trial], None] | None


Pictures = ImageParts | Sequence[Tensor | tuple[Tensor, Any]]


def search(
    model: nn.Module, method: Methods, images: Pictures, *, target: Target | str, **options: Unpack[SearchOptions]
) -> Result:
    """Search the setting of a method, or of the best of several, with the least damage at a target.

    A third of the images is for searching, the next for selecting a candidate. The candidate is returned if it beats
    the constant setting, one value for all blocks, on the last third by 2 standard errors of the paired differences;
    otherwise the constant setting is returned. Several methods race on the first third (`race`), and the winner must
    beat the best constant setting of all of them.

    Args:
        model: the dense model, on the device to search on; not changed.
        method: one or several, configs or text; options other than the amount are kept.
        images: in three parts, or batches in memory (`vitrim.tuning.proxy.BatchImages`).
        target: ``Target`` or text such as ``"macs=0.5"``.

    Raises:
        VitrimError: a method without a tunable amount, a target out of reach, or a study of another search.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
        >>> batches = torch.randn(6, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> result = search(model, "tome", list(batches), target="macs=0.8", evaluations=3)
        >>> result.best.share <= 0.8, result.best in (result.constant, result.searched)
        (True, True)
    """
    with quiet():
        return Searches(model, method, images, [target], options).run()[0]


def front(
    model: nn.Module,
    method: Methods,
    images: Pictures,
    *,
    targets: Sequence[Target | str],
    **options: Unpack[SearchOptions],
) -> ParetoFront:
    """Search for several targets, one after the other, and compare the results on the check images.

    Args:
        model, method, images, options: see `search`; the number of evaluations is per target.
        targets: of one kind, ``macs`` or ``speedup``.

    Raises:
        VitrimError: see `search`; or targets of several kinds, or ``agree``.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=2, num_classes=3).eval()
        >>> batches = torch.randn(6, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> found = front(model, "tome", list(batches), targets=["macs=0.9", "macs=0.8"], evaluations=2)
        >>> [str(result.target) for result in found.results]
        ['macs=0.9', 'macs=0.8']
    """
    wanted = of_one_kind([Target.parse(one) for one in targets])
    with quiet():
        searches = Searches(model, method, images, wanted, options)
        return ParetoFront.of(searches.run(), searches.evaluator)


class _Latency(BaseModel):
    """The stored part of a `LatencyCost`."""

    fit: Annotated[list[float], Field(min_length=5, max_length=5)]
    error: float
    worst: float
    dense_ms: _Positive


class Searches:
    """Searches for several targets, which share a model, its images and measurements.

    Args:
        model, method, images, options: see `search`.
        targets: of one kind.

    Raises:
        VitrimError: see `search`; nothing is written.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Methods,
        images: Pictures,
        targets: Sequence[Target | str],
        options: SearchOptions,
    ) -> None:
        self.targets = [Target.parse(one) for one in targets]
        self.model, self.options = model, options
        spec = options.get("spec", SearchSpec())
        self.evaluations, self.seed = options.get("evaluations", EVALUATIONS), options.get("seed", 0)
        if self.evaluations < 1:
            raise VitrimError(f"a search needs at least 1 evaluation, got {self.evaluations}")
        self.strategy: Strategy = make_strategy(spec.strategy, spec.shape)
        self.seconds = None if spec.minutes is None else 60.0 * spec.minutes
        self.timer = self._timer(spec)
        methods = [method] if isinstance(method, str | MethodConfig) else list(method)
        self.spaces = [Space.of(model, one, placed=spec.shape != "free") for one in methods]
        if len(self.spaces) > 1 and self.targets[0].kind == "agree":
            raise VitrimError("several methods race at one cost: give macs or speedup, or one method for agree")
        self.images: ImageParts = images if isinstance(images, ImageParts) else BatchImages(images)
        task = options.get("task") or make_task("classification", num_classes(model))
        processes = options.get("processes")
        self.about = self._about(spec)
        file = options.get("study")
        content = {} if file is None else {"content": identity(model, task, self.images.dataset)}
        settings = {**self.about, **content}
        self.study = Study(file, settings, resume=options.get("resume", False), processes=processes)
        scorer = ModelScorer(model, task, self.images, seed=self.seed, processes=processes)
        self.evaluator = Evaluator(scorer, self.study, spec.proxy)
        self._costs: list[Cost] = []

    def _timer(self, spec: SearchSpec) -> Timer:
        """The timer of the options or the engines; `VitrimError` for both, or for engines that no target needs."""
        engine, precision = spec.where
        engines, _ = engines_named(engine, precision, next(self.model.parameters()).device)
        timer = self.options.get("timer")
        if engine != ["eager"] or precision != ["fp32"]:
            if timer is not None:
                raise VitrimError("give an engine or a timer, not both")
            if any(target.kind != "speedup" for target in self.targets):
                raise VitrimError(f"an engine is for speedup targets: {self.targets[0]} does not depend on it")
            check_engines(engines, {}, self.model, 1)
        return timer or timer_on(engine, precision)

    def _about(self, spec: SearchSpec) -> dict[str, Any]:
        """Everything that the search follows from, for its study and its results."""
        engine, precision = spec.where
        return {
            "vitrim": version("vitrim"),
            "made_for": {**described(host_of(self.model), self.model), "parameters": weights_fingerprint(self.model)},
            "base": ", ".join(space.base.describe() for space in self.spaces),
            "target": ", ".join(map(str, self.targets)),
            "proxy": spec.proxy,
            **({} if spec.strategy == "evolution" else {"strategy": spec.strategy}),
            **({} if spec.shape == "free" else {"shape": spec.shape}),
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

            def stops(end: float | None = end) -> bool:
                return self.study.ended(lambda: end is not None and time.monotonic() >= end)

            self._costs = self._costs or [self._cost(space, target) for space in self.spaces]
            methods = [
                Search(
                    *(space, cost, self.evaluator, target), strategy=self.strategy, seed=self.seed, stops=stops,
                    on_trial=self.options.get("on_trial"),
                )
                for space, cost in zip(self.spaces, self._costs, strict=True)
            ]  # fmt: skip
            result = race(methods, self.evaluations) if len(methods) > 1 else methods[0].run(self.evaluations)
            best = "searched" if result.better else "constant"
            self.study.note(returned=best, method=result.config.describe())
            found.append(replace(result, about={**self.about, "target": str(target)}))
        return found

    def _cost(self, space: Space, target: Target) -> Cost:
        """The cost for the target; latency is measured once per study."""
        like = next(self.model.parameters())
        least = COUNTED if space.adaptive else 0
        stop = min(max(COUNTED_BATCHES * self.images.batch_size, least), self.images.count("search"))
        few = [one.images.to(like.device, like.dtype) for one in self.images.sample("search", stop)]
        if target.kind != "speedup":
            return MacsCost(self.model, space, few, seed=self.seed)
        budget, model = self.options.get("budget"), shared_copy(self.model).eval()
        counted = MacsCost(self.model, space, few) if space.adaptive else None
        whole = [batch for batch in few if len(batch) == len(few[0])]
        timed = whole if space.adaptive else whole[:1]

        def clock(configs: Sequence[MethodConfig]) -> tuple[NDArray[np.float64], float]:
            return self.timer(model, configs, timed, budget)

        def measure() -> dict[str, Any]:
            fit, dense_ms = latency_fit(space, clock, seed=self.seed, counted=counted)
            return {"fit": fit.coefficients.tolist(), "error": fit.error, "worst": fit.worst, "dense_ms": dense_ms}

        def again(configs: Sequence[MethodConfig]) -> list[float]:
            texts = ", ".join(config.describe() for config in configs)
            kind = Annotated[list[_Positive], Field(min_length=len(configs), max_length=len(configs))]
            return self.study.value(f"once more: {texts}", lambda: clock(configs)[0].tolist(), kind=kind)

        name = "latency" if len(self.spaces) == 1 else f"latency of {space.base.describe()}"
        found = self.study.value(name, measure, kind=_Latency)
        fit = Fit(np.array(found["fit"]), found["error"], found["worst"])
        return LatencyCost(space, fit, again, counted)
