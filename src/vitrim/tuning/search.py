"""`search` and `front`: from a model, methods, images and targets to settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
from pydantic import BaseModel, Field
from torch import Tensor, nn

from vitrim.core.checks import described
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of
from vitrim.errors import VitrimError
from vitrim.files import check_file
from vitrim.measure.evaluation import num_classes
from vitrim.measure.latency import Budget, shared_copy
from vitrim.measure.records import Processes
from vitrim.measure.run import weights_fingerprint
from vitrim.speed.bench import check_engines
from vitrim.speed.engines import engines_named
from vitrim.tasks import make_task
from vitrim.tasks.base import Task
from vitrim.tuning.cost import Cost, Fit, LatencyCost, MacsCost, Timer, quiet
from vitrim.tuning.finder import Finder, Outcome, Trial
from vitrim.tuning.front import Front
from vitrim.tuning.measured import Measured
from vitrim.tuning.proxy import PARTS, BatchImages, Images, ModelScorer, check_proxy
from vitrim.tuning.race import Raced, race
from vitrim.tuning.result import Result, Target
from vitrim.tuning.shapes import check_shape
from vitrim.tuning.space import Space
from vitrim.tuning.strategies import Strategy, make_strategy
from vitrim.tuning.study import Study
from vitrim.tuning.timers import timer_on

HALVINGS = 5
"""Searches at other costs until the cheapest one that agrees enough is known well enough."""

COUNTED_BATCHES = 2
"""Batches that the MACs of a method which adapts to the images are counted on."""

Methods = MethodConfig | str | Sequence[MethodConfig | str]
Pictures = Images | Sequence[Tensor | tuple[Tensor, Any]]


_Positive = Annotated[float, Field(gt=0)]


class _Latency(BaseModel):
    """The part of a `LatencyCost` that a study keeps."""

    fit: Annotated[list[float], Field(min_length=5, max_length=5)]
    error: float
    worst: float
    dense_ms: _Positive


class Options(TypedDict, total=False):
    """Options of `search` and `front`.

    Attributes:
        task: of the model; default classification.
        proxy: the damage that is minimised: feature (default), kl, cosine or agree.
        evaluations: most settings to try for a target, default 60; the race of several methods comes on top.
        strategy: where candidates come from: evolution (default), random, or optuna's gp or tpe.
        shape: how freely blocks may differ: free (default), slope or curve (`vitrim.tuning.shapes`), for methods with
            stages over those of their own.
        seconds: end the search when they are over, and choose among what was tried; for several targets each has its
            share. The limit is of this run, a study that was resumed ends where it did.
        seed: of the settings that are drawn, and of methods that draw at random.
        study: file that keeps what was measured.
        resume: go on from that file; the result is that of a search that was never stopped.
        about: more entries for study and result, e.g. what the images are.
        budget: time to spend on every timed setting, for ``speedup``.
        engine: names of `vitrim.speed.engines.engines`, for ``speedup``: of several that which is the fastest for the
            dense model; default eager.
        timer: in place of ``engine``, a function that times settings (`vitrim.tuning.cost.Timer`).
        processes: this process and its like. All get the same result, the first one writes.
        on_trial: called with every finished trial.
    """

    task: Task | None
    proxy: str
    evaluations: int
    strategy: str
    shape: str
    seconds: float | None
    seed: int
    study: Path | None
    resume: bool
    about: Mapping[str, Any]
    budget: Budget | None
    engine: Sequence[str]
    timer: Timer | None
    processes: Processes | None
    on_trial: Callable[[Trial], None] | None


def search(
    model: nn.Module, method: Methods, images: Pictures, *, target: Target | str, **options: Unpack[Options]
) -> Result:
    """Search the setting of a method, or of the best of several, that damages a model least at a target.

    Candidates are searched on a third of the images and one is selected on the next third. It is returned if it beats
    the constant setting, one value for all blocks, on the last third by 2 standard errors of the paired differences;
    otherwise the constant setting is. Several methods race on the first third (`vitrim.tuning.race`), and the winner
    must beat the best constant setting of all of them.

    Args:
        model: the dense model, on the device to search on; left as it was.
        method: config or text, or several; options other than the amount stay as they are.
        images: in three parts, or batches in memory (`vitrim.tuning.proxy.BatchImages`).
        target: ``Target`` or text such as ``"macs=0.5"``.
        options: see `Options`.

    Raises:
        VitrimError: a method has nothing to move, the target is out of reach, or the study is of another search.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=3, num_classes=3).eval()
        >>> batches = torch.randn(6, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> result = search(model, "tome", list(batches), target="macs=0.7", evaluations=8)
        >>> result.best.share <= 0.705, result.best in (result.outcome.constant, result.outcome.searched)
        (True, True)
    """
    with quiet():
        return _Session.open(model, method, images, [target], options).reach_all()[0]


def front(
    model: nn.Module,
    method: Methods,
    images: Pictures,
    *,
    targets: Sequence[Target | str],
    **options: Unpack[Options],
) -> Front:
    """Search at several targets, one after the other, and compare what is found on the check images.

    Args:
        model, method, images, options: as of `search`; the number of evaluations is for every target.
        targets: of one kind, ``macs`` or ``speedup``.

    Raises:
        VitrimError: as `search`; targets of several kinds, or ``agree``.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=3, num_classes=3).eval()
        >>> batches = torch.randn(6, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> found = front(model, "tome", list(batches), targets=["macs=0.8", "macs=0.6"], evaluations=3)
        >>> [str(result.target) for result in found.results]
        ['macs=0.8', 'macs=0.6']
    """
    wanted = [Target.parse(one) if isinstance(one, str) else one for one in targets]
    if len({one.kind for one in wanted}) != 1 or wanted[0].kind == "agree":
        raise VitrimError(f"a front is over targets of one kind, macs or speedup, got {', '.join(map(str, wanted))}")
    with quiet():
        session = _Session.open(model, method, images, wanted, options)
        return Front.of(session.reach_all(), session.measured)


@dataclass
class _Session:
    """A model, its images and what was measured: what the searches for several targets share."""

    model: nn.Module
    spaces: Sequence[Space]
    images: Images
    targets: Sequence[Target]
    measured: Measured
    strategy: Strategy
    known: dict[str, Any]
    options: Options
    costs: dict[int, Cost] = field(default_factory=dict)

    @classmethod
    def open(
        cls, model: nn.Module, method: Methods, images: Pictures, targets: Sequence[Target | str], options: Options
    ) -> _Session:
        """Check everything, and open the study."""
        wanted = [Target.parse(one) if isinstance(one, str) else one for one in targets]
        proxy, evaluations = check_proxy(options.get("proxy", "feature")), options.get("evaluations", 60)
        if evaluations < 1:
            raise VitrimError(f"a search needs at least 1 evaluation, got {evaluations}")
        name = options.get("strategy", "evolution")
        strategy, shape = make_strategy(name), check_shape(options.get("shape", "free"), name)
        seconds = options.get("seconds")
        if seconds is not None and not seconds > 0.0:
            raise VitrimError(f"a search needs some time, got seconds={seconds:g}")
        engine = _engine(model, options, wanted)
        methods = [method] if isinstance(method, str | MethodConfig) else list(method)
        spaces = [Space.of(model, one, placed=shape != "free") for one in methods]
        if len(spaces) > 1 and wanted[0].kind == "agree":
            raise VitrimError("several methods race at one cost: give macs or speedup, or one method for agree")
        if not hasattr(images, "batches"):
            images = BatchImages(images)
        assert not isinstance(images, Sequence)
        task = options.get("task") or make_task("classification", num_classes(model))
        seed, processes, file = options.get("seed", 0), options.get("processes"), options.get("study")
        known = {
            "vitrim": version("vitrim"),
            "made_for": {**described(host_of(model), model), "parameters": weights_fingerprint(model)},
            "base": ", ".join(space.base.describe() for space in spaces),
            "target": ", ".join(map(str, wanted)),
            "proxy": proxy,
            **({} if name == "evolution" else {"strategy": name}),
            **({} if shape == "free" else {"shape": shape}),
            **({} if engine == ["eager"] else {"engine": ", ".join(engine)}),
            "seed": seed,
            "evaluations": evaluations,
            "images": {part: images.count(part) for part in PARTS},
            "batch_size": images.batch_size,
            **options.get("about", {}),
        }
        if file is not None:
            check_file(file)
        study = Study(file, known, resume=options.get("resume", False), processes=processes)
        scorer = ModelScorer(model, task, images, seed=seed, processes=processes)
        return cls(model, spaces, images, wanted, Measured(scorer, study, proxy), strategy, known, options)

    def reach_all(self) -> list[Result]:
        """A search for every target."""
        start, seconds = time.monotonic(), self.options.get("seconds")
        if seconds is None:
            return [self.reach(target) for target in self.targets]
        ends = [start + seconds * number / len(self.targets) for number in range(1, len(self.targets) + 1)]
        return [self.reach(target, end) for target, end in zip(self.targets, ends, strict=True)]

    def reach(self, target: Target, end: float | None = None) -> Result:
        """A search for one target, until an ``end`` by the monotonic clock."""
        evaluations, rows = self.options.get("evaluations", 60), tuple[Raced, ...]()
        finders = [self.finder(place, target, end) for place in range(len(self.spaces))]
        if len(finders) > 1:
            outcome, rows, cost = race(finders, self.measured, target.limit, evaluations)
        else:
            outcome, cost = reach(finders[0], target, evaluations), finders[0].cost
        self.measured.study.note(
            returned="searched" if outcome.better else "constant", method=outcome.best.config.describe()
        )
        return Result(target, self.measured.proxy, outcome, cost, {**self.known, "target": str(target)}, rows)

    def finder(self, place: int, target: Target, end: float | None = None) -> Finder:
        """The search of one method."""

        def stops() -> bool:
            return self.measured.study.ended(lambda: end is not None and time.monotonic() >= end)

        if place not in self.costs:
            self.costs[place] = self._cost(self.spaces[place], target)
        return Finder(
            self.spaces[place],
            self.costs[place],
            self.measured,
            strategy=self.strategy,
            seed=self.options.get("seed", 0),
            shape=self.known.get("shape", "free"),
            stops=stops,
            on_trial=self.options.get("on_trial"),
        )

    def _cost(self, space: Space, target: Target) -> Cost:
        """The cost that the target is about; latency is measured once in a study."""
        like, seed = next(self.model.parameters()), self.options.get("seed", 0)
        stop = min(COUNTED_BATCHES * self.images.batch_size, self.images.count("search"))
        few = [one.images.to(like.device, like.dtype) for one in self.images.batches("search", 0, stop)]
        if target.kind != "speedup":
            return MacsCost(self.model, space, few, seed=seed)

        timer = self.options.get("timer") or timer_on(self.options.get("engine", ["eager"]))
        study, budget, model = self.measured.study, self.options.get("budget"), shared_copy(self.model).eval()

        def measure() -> dict[str, Any]:
            cost = LatencyCost.of(model, space, few[0], budget=budget, seed=seed, timer=timer)
            fit = cost.fit
            return {"fit": fit.coefficients.tolist(), "error": fit.error, "worst": fit.worst, "dense_ms": cost.dense_ms}

        def again(configs: Sequence[MethodConfig]) -> list[float]:
            texts = ", ".join(config.describe() for config in configs)
            ratios: list[float] = study.value(
                f"once more: {texts}",
                lambda: timer(model, configs, few[0], budget)[0].tolist(),
                kind=Annotated[list[_Positive], Field(min_length=len(configs), max_length=len(configs))],
            )
            return ratios

        name = "latency" if len(self.spaces) == 1 else f"latency of {space.base.describe()}"
        found = study.value(name, measure, kind=_Latency)
        fit = Fit(np.array(found["fit"]), found["error"], found["worst"])
        return LatencyCost(space, fit, found["dense_ms"], again)


def _engine(model: nn.Module, options: Options, targets: Sequence[Target]) -> list[str]:
    """The names of the engines that settings are timed on.

    Raises:
        VitrimError: an engine that is unknown or cannot run here, or nothing to time.
    """
    names = list(options.get("engine", ["eager"]))
    engines, like = engines_named(names), next(model.parameters())
    if names != ["eager"]:
        if options.get("timer") is not None:
            raise VitrimError("give an engine or a timer, not both")
        if any(target.kind != "speedup" for target in targets):
            raise VitrimError(f"an engine is for speedup targets: {targets[0]} does not depend on it")
        check_engines(engines, {}, model, like.device, like.dtype)
    return names


def reach(finder: Finder, target: Target, evaluations: int) -> Outcome:
    """Run a search for a target; for ``agree`` one at every cost of a bisection, with its share of the evaluations.

    Raises:
        VitrimError: the target is out of reach.
    """
    if target.kind != "agree":
        return finder.run(target.limit, evaluations)
    low, high, best = 0.0, 1.0, None
    trials: list[Trial] = []
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if finder.reaches(middle):
            pair = finder.explore(middle, max(evaluations // HALVINGS, 1))
            trials += finder.trials
            if finder.agreement(pair[1]) >= target.value:
                best, high = pair, middle
                continue
        low = middle
    if best is None:
        raise VitrimError(
            f"{finder.space.base.name} does not agree with the dense model in {target.value:.1%} of the selection "
            f"images at {low:.0%} of its MACs: ask for less"
        )
    outcome = finder.check(*best, trials)
    if outcome.better or finder.agreement(outcome.constant) >= target.value:
        return outcome
    # it costs something else than what was searched, so it is the answer whatever their difference
    return replace(finder.check(_cheapest_constant(finder, target.value, high), outcome.searched, trials), better=False)


def _cheapest_constant(finder: Finder, agreement: float, low: float) -> Trial:
    """The constant setting that agrees enough, at a cost between ``low`` and that of the dense model."""
    high = 1.0
    best, _ = finder.explore(high, 1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        trial, _ = finder.explore(middle, 1)
        if finder.agreement(trial) >= agreement:
            best, high = trial, middle
        else:
            low = middle
    return best
