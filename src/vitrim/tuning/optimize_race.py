"""The race of `vitrim.optimize`: which methods, schedules and image sizes are measured, how, and which file wins.

`Race.check_dense`, `score`, `dense`, `score_sizes`, `reduced` and `check` run in this order. Below them are the
measurements, whose numbers a store keeps, and the files.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vitrim.core.method import MethodConfig
from vitrim.core.registry import input_size_of
from vitrim.data import eval_transform, spread
from vitrim.data.dataset import CALIBRATED
from vitrim.engines.copies import reduced_copy, shared_copy
from vitrim.engines.engine import Eager, Engine, FileEngine
from vitrim.engines.macs import profile_of
from vitrim.engines.runnable import Runnable
from vitrim.engines.static import can_freeze, frozen, levelled
from vitrim.engines.writing import FileSpec
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.evaluation_report import at_chance
from vitrim.measure.export import export
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved
from vitrim.measure.neighbours import NeighbourLoss
from vitrim.measure.probes import PairedLoss, TaskMetrics
from vitrim.measure.records import read
from vitrim.measure.run import Measurement
from vitrim.measure.store import Store
from vitrim.report import DENSE, Pace, at_px
from vitrim.tasks import Task
from vitrim.tuning.cost import MacsCost, within
from vitrim.tuning.halving import Evaluator, halve
from vitrim.tuning.proxy import DatasetImages, ModelScorer, Third
from vitrim.tuning.space import Point, Space, normal, training_free

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the dense MACs to try a schedule at, mildest first."""

RACED_AT = 0.65
"""Share at which methods and schedules race."""

KEPT = 8
"""Methods with a schedule that are tried at all shares."""

SEARCHED_AT = 32
"""Images per batch of the race, which runs in PyTorch."""

AGAIN = 3
"""Methods with a schedule that are tried at other image sizes."""

SIZES = 2
"""Smaller image sizes, of those within the bound, at which methods are tried; and the next larger one."""

PLAIN = "smaller images"
"""The schedule that removes nothing: dense models at smaller sizes."""

TIMED = 12
"""Most settings timed on the engine."""

FINALISTS = 4
"""Most files scored on the second third."""

STEPS = 7
"""Steps in progress messages: race methods, race schedules, time and score dense files, score other image sizes, time
reduced files, score the fastest of these, check the chosen file."""

COUNTED = 16
"""Images to freeze adaptive methods on."""

MILD = 0.3
"""Divergence from the dense model in nats up to which the loss is roughly proportional to it."""

FEW = {
    "six blocks": (0.0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6),
    "three blocks": (0.25, 0.5, 0.75),
    "two blocks": (0.25, 0.5),
    "two early blocks": (0.17, 0.42),
}
"""Schedules with few stages, by relative depth: every reducing block has the overhead of small operations."""


# ---- what races ------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """The content of a file: a method, or none, at an image size.

    Attributes:
        config: None for the dense model.
        size: side of the images in pixels; None for the model's own.
    """

    config: MethodConfig | None = None
    size: int | None = None

    @property
    def name(self) -> str:
        """The method, or "dense", and the size if it is another."""
        return at_px(DENSE if self.config is None else self.config.describe(), self.size)


@dataclass(frozen=True)
class RacedSchedule:
    """A method with a schedule: where it acts, and with which relative strength per block.

    Attributes:
        point: weights of the blocks; None for one value for all.
        size: see `Setting`.
    """

    space: Space
    cost: MacsCost
    point: Point | None
    schedule: str
    size: int | None = None

    @property
    def name(self) -> str:
        """The method and its schedule."""
        return at_px(f"{self.space.base.describe()}, {self.schedule}", self.size)

    def at(self, share: float) -> MethodConfig | None:
        """The static setting with at most this share of the dense MACs at its size; None if there is none."""
        config = within(self.space, self.point, self.cost, share)
        return None if config is None else self.cost.settled(config)


class ScoredSetting(NamedTuple):
    """A setting of a schedule, its share of the MACs of the dense model at its own size, and its ``loss, loss_error,
    kl`` on the first third."""

    share: float
    setting: Setting
    score: Mapping[str, float]


@dataclass(frozen=True)
class Candidate:
    """One file: a setting on an engine.

    Attributes:
        row: its row of the report, updated when it is scored on other images.
    """

    setting: Setting
    engine: Engine
    row: dict[str, Any]

    @property
    def name(self) -> str:
        return self.setting.name


# ---- the race --------------------------------------------------------------------------------------------------------


@dataclass
class Race:
    """The race of one model. Everything is measured once: the store keeps the numbers, a folder the files.

    Attributes:
        others: the model at other image sizes, by their sides.
        images_at: the same images, also at other sizes.
        rows: of everything that was timed; the first is PyTorch.
        known: by schedule, the scored settings, mildest first.
        raced: by name, the schedules of these.
        slope: loss of top-1 per nat of divergence, fitted over these.
        plain: the fastest file without a method at a smaller size, which methods are compared with in words.
        plain_fits: False if no smaller size was within a bound on the first third: ``plain`` cannot win then.
    """

    model: nn.Module
    task: Task
    loss: PairedLoss | NeighbourLoss
    images: DatasetImages
    engines: Sequence[Engine]
    batch_size: int
    store: Store
    folder: Path
    tell: Callable[[str], None]
    others: Mapping[int, nn.Module] = field(default_factory=dict)
    images_at: Callable[[Sequence[int]], DatasetImages] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, list[ScoredSetting]] = field(default_factory=dict)
    raced: dict[str, RacedSchedule] = field(default_factory=dict)
    slope: float = 1.0
    plain: Candidate | None = None
    plain_fits: bool = True
    step: int = 0
    _ready: dict[tuple[str, str], Runnable] = field(default_factory=dict)
    _calibration: dict[int | None, Tensor] = field(default_factory=dict)
    _macs: dict[int | None, int] = field(default_factory=dict)

    # ---- on the first third: methods and schedules -------------------------------------------------------------------

    def check_dense(self) -> None:
        """Refuse a dense model that guesses: every setting would lose nothing against it."""
        if not getattr(self.loss, "labels", False) or self.task.selects_by != "top1":
            return
        count = self.images.count("search")

        def scored() -> float:
            measurement = Measurement(
                [Contestant(shared_copy(self.model).eval(), self.task)], [TaskMetrics(self.task)], self.task
            )
            measurement.follow(self.images.batches("search", 0, count))
            return float(measurement.rows()[0]["top1"])

        chance = at_chance(self.store.value("top-1 of the dense model", scored), count, self.task.num_classes)
        if chance is not None:
            raise VitrimError(
                f"{chance}. Every setting would lose nothing against it: give labels of its classes, or compare with "
                "the dense model alone (--no-labels, labels=False)"
            )

    def score(self, wanted: Sequence[MethodConfig] | None) -> None:
        """Race methods and schedules at one share of the MACs, and measure the losses of the best at all shares.

        ``wanted`` None means all methods that need no training.
        """
        configs = wanted
        if configs is None:
            configs = training_free(self.model)
            engine, batch = self.engines[0], self.batch_size
            configs = [one for one in configs if can_freeze(one) or engine.obstacle(one, batch) is None]
            configs = [one for one in configs if can_freeze(one) or not one.is_adaptive()]
        self.step = 1
        kept = self._best_of(self.schedules(configs))
        self.raced = {one.name: one for one in kept}
        settings = self._within(kept, SHARES)
        # rounding may make settings of two shares equal
        settings = list({(one.name, config.describe()): (one, config) for one, config in settings}.values())
        shares = [one.cost.share(config) for one, config in settings]
        self.step = 2
        scores = self.losses([Setting(config) for _, config in settings])
        for (one, config), share, score in zip(settings, shares, scores, strict=True):
            self.known.setdefault(one.name, []).append(ScoredSetting(share, Setting(config), score))
        self._fit_slope(scores)

    def schedules(self, configs: Sequence[MethodConfig]) -> list[RacedSchedule]:
        """Every method with every schedule that it supports: its default blocks, and few blocks.

        Counts are levelled (`vitrim.engines.static.levelled`). Adaptive methods race frozen on images of the first
        third.
        """
        found: list[RacedSchedule] = []
        for number, config in enumerate(configs, 1):
            self.say(f"counting MACs of {config.describe()}, {number} of {len(configs)} methods")
            space, cost = self._space(config, None)
            found.append(RacedSchedule(space, cost, None, "every block" if space.placing is None else "its own stages"))
            if space.size > 3:
                for words, depths in FEW.items():
                    wanted = [round(depth * space.num_layers) for depth in depths]
                    point = normal([float(block in wanted) for block in space.blocks])
                    found.append(RacedSchedule(space, cost, point, words))
        return found

    def _best_of(self, schedules: Sequence[RacedSchedule]) -> list[RacedSchedule]:
        """The schedules that diverge least from the dense model at one share; and the best one that prunes."""
        raced = {one.name: (one, config) for one, config in self._within(schedules, [RACED_AT])}
        running = list({config.describe(): (one, config) for one, config in raced.values()}.values())
        raced_scores = halve([config for _, config in running], self.evaluator, least=KEPT)
        scores = [one[self.evaluator.proxy] for one in raced_scores]
        order = sorted(range(len(scores)), key=lambda place: (-len(scores[place]), scores[place].mean()))
        best_first = [running[place][0] for place in order]
        kept = best_first[:KEPT]
        cheap = [one for one in best_first if one.space.base.kind == "prune"]
        return kept + [one for one in cheap[:1] if one not in kept]  # pruning may be faster at the same MACs

    def _within(
        self, schedules: Sequence[RacedSchedule], shares: Sequence[float]
    ) -> list[tuple[RacedSchedule, MethodConfig]]:
        """The settings of ``schedules`` at ``shares`` of the dense MACs, where there are any."""
        found = []
        for number, one in enumerate(schedules, 1):
            self.say(f"finding amounts for {one.name}, {number} of {len(schedules)} schedules")
            found += [(one, config) for share in shares if (config := one.at(share)) is not None]
        return found

    def _space(self, config: MethodConfig, size: int | None) -> tuple[Space, MacsCost]:
        """The space of a method at an image size, and its cost, of the static settings that run."""
        model = self.at(size)
        patches = Space.of(model, config).patches
        space = Space.of(model, levelled(config, patches))

        def settle(setting: MethodConfig) -> MethodConfig:
            return levelled(frozen(model, setting, [self._some(COUNTED, size)]), patches)

        few = [self._some(COUNTED if space.adaptive else 1, size)]
        return space, MacsCost(model, space, few, settle=settle if can_freeze(config) else None)

    def _fit_slope(self, scores: Sequence[Mapping[str, float]]) -> None:
        mild = [score for score in scores if 0.0 < score["kl"] <= MILD]
        if mild:
            fitted = sum(one["kl"] * one["loss"] for one in mild) / sum(one["kl"] ** 2 for one in mild)
            # in case no image changed: assume one had, at the largest divergence
            least = 1.0 / (self.images.count("search") * max(one["kl"] for one in mild))
            self.slope = max(fitted, least)

    # ---- on the first third: image sizes -----------------------------------------------------------------------------

    def score_sizes(self, dense: Candidate, bound: float, speedup: float | None) -> None:
        """Measure the losses of the dense model at other image sizes, and of the best schedules at those that survive.

        A smaller size survives if its own loss leaves room for a method: the smallest within the bound do, and the next
        larger one, at which a method removes more. A schedule is not tried further once it loses too much.

        Args:
            dense, bound, speedup: as of `reduced`.
        """
        if not self.others:
            return
        self.step = 4
        room = self.room(dense, bound)
        found = [Setting(None, size) for size in sorted(self.others, reverse=True)]
        scored = [
            ScoredSetting(self.macs(one.size) / self.macs(None), one, score)
            for one, score in zip(found, self.losses(found), strict=True)
        ]
        smaller = [one for one in scored if one.share < 1.0]
        able = smaller if speedup is not None else self._fitting(smaller, room)
        if smaller:
            self.known[PLAIN] = smaller
        larger = [one for one in scored if one.share > 1.0 and self.fits(one.score, room, one.setting.size)]
        sizes = [one.setting.size for one in [*(able[:SIZES] if speedup else able[-SIZES:]), *larger[-1:]]]
        running, spaces = list[RacedSchedule](), dict[tuple[str, int | None], tuple[Space, MacsCost]]()
        for name in sorted(self.raced, key=partial(self._strength, room=room, speedup=speedup))[:AGAIN]:
            one = self.raced[name]
            for size in sizes:
                key = (one.space.base.describe(), size)
                spaces[key] = spaces.get(key) or self._space(one.space.base, size)
                space, cost = spaces[key]
                running.append(RacedSchedule(space, cost, one.point, one.schedule, size))
        for share in SHARES:
            settings = [(one, Setting(config, one.size)) for one in running if (config := one.at(share)) is not None]
            settings = [(one, own) for one, own in settings if own not in self._settings(one.name)]
            scores = self.losses([own for _, own in settings])
            for (one, own), score in zip(settings, scores, strict=True):
                assert own.config is not None
                relative = one.cost.share(own.config) * self.macs(own.size) / self.macs(None)
                self.known.setdefault(one.name, []).append(ScoredSetting(relative, own, score))
                if speedup is None and not self.fits(score, room, own.size):
                    running.remove(one)

    def room(self, dense: Candidate, bound: float) -> float:
        """The part of a ``bound`` that the precision of the dense file leaves."""
        return max(bound - max(self.expected(dense.row), 0.0), 0.0)

    def _settings(self, name: str) -> list[Setting]:
        """The scored settings of a schedule."""
        return [one.setting for one in self.known.get(name, ())]

    def _strength(self, name: str, room: float, speedup: float | None) -> float:
        """The share of the MACs that a schedule leaves within the bound, or its loss at the speed: less is better."""
        scored = self.known.get(name, [])
        if speedup is None:
            return min((one.share for one in self._fitting(scored, room)), default=1.0)
        return min((one.score["kl"] for one in scored if 1.0 / one.share >= speedup), default=float("inf"))

    def _fitting(self, scored: Sequence[ScoredSetting], room: float) -> list[ScoredSetting]:
        """The settings of one schedule, mildest first, up to the first that loses too much."""
        return list(takewhile(lambda one: self.fits(one.score, room, one.setting.size), scored))

    def macs(self, size: int | None) -> int:
        """Multiply-accumulates of the dense model at an image size."""
        if size not in self._macs:
            model = copy.deepcopy(self.at(size)).to("meta").eval()
            like = next(model.parameters())
            images = torch.zeros(1, *input_size_of(model), dtype=like.dtype, device="meta")
            self._macs[size] = profile_of(model, None, images).macs.total
        return self._macs[size]

    def at(self, size: int | None) -> nn.Module:
        """The dense model at an image size."""
        return self.model if size is None else self.others[size]

    # ---- on the second third: files ----------------------------------------------------------------------------------

    def dense(self, bound: float) -> Candidate:
        """The fastest dense file whose own loss is within ``bound``, a share; `VitrimError` if there is none."""
        self.step = 3
        pairs = [(Setting(), one) for one in (Eager(), *self.engines)]
        found = [
            Candidate(one, engine, {"method": one.name, "engine": engine.label, "precision": engine.precision, **row})
            for (one, engine), row in zip(pairs, self.times(pairs, "dense"), strict=True)
        ]
        lower = [one for one in found if one.engine.precision != "fp32"]
        scores = self.file_losses(lower, "selection") if lower else []
        exact = {"loss": 0.0, "loss_error": 0.0, "kl": 0.0, "images": self.images.count("selection")}
        for one in found:
            own = scores[lower.index(one)] if one in lower else exact
            one.row.update(saved=0.0, scored_on="selection", **own)
            self.rows.append(one.row)
        within_bound = [one for one in found[1:] if self.fits(one.row, bound)]
        if not within_bound:
            raise VitrimError("no file of these engines is within the bound: allow more loss, or add fp32")
        return min(within_bound, key=lambda one: one.row["p50_ms"])

    def reduced(self, dense: Candidate, bound: float, speedup: float | None) -> Candidate | None:
        """The best reduced file on the engine of ``dense``; None if none is better.

        Args:
            bound: allowed loss, a share, if there is no ``speedup``.
            speedup: over ``dense``, to reach with the least loss.
        """
        room = self.room(dense, bound)
        promising = [setting for scored in self.known.values() for setting in self._promising(scored, room, speedup)]
        sizes = self.known.get(PLAIN, [])
        self.plain_fits = speedup is not None or any(one in promising for one in sizes)
        # the largest smaller image in any case: whoever reads the result asks what it would have given
        timed = self._timed(promising if self.plain_fits else [*promising, *sizes[:1]], dense, "reduced")
        if speedup is not None and all(one.row["speedup"] < speedup for one in timed):
            # an engine gains less than MACs promise: only the strongest settings tell what can be reached
            done = {one.name for one in timed}
            strongest = [scored[-1] for scored in self.known.values() if scored[-1].setting.name not in done]
            timed += self._timed(strongest, dense, "strongest")
        # score the fastest, or those with the least loss at the requested speed, as files on other images
        faster = [one for one in timed if one.row["speedup_q1"] > 1.0]
        if speedup is None:
            may_win = [one for one in faster if self.plain_fits or one.setting.config is not None]
            finalists = sorted(may_win, key=lambda one: one.row["p50_ms"])[:FINALISTS]
        else:
            able = [one for one in faster if one.row["speedup"] >= speedup]
            finalists = sorted(able, key=lambda one: one.row["loss"])[:FINALISTS]
        smaller = [one for one in faster if one.setting.config is None]
        self.plain = min(smaller, key=lambda one: one.row["p50_ms"], default=None)
        if not finalists:
            return None
        if self.plain is not None and self.plain not in finalists:
            finalists.append(self.plain)
        self.step = 6
        for one, own in zip(finalists, self.file_losses(finalists, "selection"), strict=True):
            one.row.update(own, scored_on="selection")
        if speedup is not None:
            able = [one for one in finalists if one.row["speedup"] >= speedup]
            return min(able, key=lambda one: one.row["loss"], default=None)
        good = [one for one in finalists if one in may_win and self.fits(one.row, bound, one.setting.size)]
        return min(good, key=lambda one: one.row["p50_ms"], default=None)

    def _promising(
        self, scored: Sequence[ScoredSetting], room: float, speedup: float | None
    ) -> Sequence[ScoredSetting]:
        """The settings of one schedule that are worth timing.

        Without a speed-up, the two strongest that fit: on the engine, or on other images, the strongest may fail. With
        one, the two mildest whose MACs promise it; if none has it, the strongest of all are timed, too.
        """
        if speedup is not None:
            return [one for one in scored if 1.0 / one.share >= speedup][:2]
        return self._fitting(scored, room)[-2:]

    @property
    def fastest(self) -> Mapping[str, Any] | None:
        """The row of the fastest setting over its dense file; None if none was timed."""
        rows = (row for row in self.rows if row["method"] != DENSE)
        return max(rows, key=lambda row: row["speedup"], default=None)

    def _timed(self, scored: Sequence[ScoredSetting], dense: Candidate, what: str) -> list[Candidate]:
        """Time the settings with the fewest MACs, all without a method, and the dense file, in one run."""
        if not scored:
            return []
        scored = sorted(scored, key=lambda one: (one.setting.config is not None, one.share))[:TIMED]
        scored = sorted(scored, key=lambda one: one.share)
        self.step, engine = 5, dense.engine
        pairs = [(Setting(), engine), *((one.setting, engine) for one in scored)]
        found = []
        for (share, setting, score), row in zip(scored, self.times(pairs, what)[1:], strict=True):
            facts: dict[str, Any] = {"method": setting.name, "engine": engine.label, "precision": engine.precision}
            facts |= {} if setting.size is None else {"img_size": setting.size}
            own = {"loss": score["loss"], "loss_error": score["loss_error"], "images": self.images.count("search")}
            # a machine may be faster in one run than in another: only ratios within a run are comparable
            own |= {"p50_ms": dense.row["p50_ms"] / row["speedup"], "own_p50_ms": row["p50_ms"]}
            found.append(
                Candidate(setting, engine, {**facts, **row, **own, "saved": 1.0 - share, "scored_on": "search"})
            )
        self.rows += [one.row for one in found]
        return found

    def expected(self, score: Mapping[str, Any], size: int | None = None) -> float:
        """The expected loss of a model, a share.

        Top-1 of a few hundred images is too noisy to detect a loss of one point. So the expected loss is the divergence
        from the dense model, which is measured far more precisely, times the loss per nat over all scored settings.
        Disagreement itself is precise enough. At another image size, only divergence beyond that of the dense model at
        the next larger size counts (`free`), on the same images.
        """
        if not self.loss.labels:
            return float(score["loss"])
        free = 0.0 if size is None else self.free(score.get("scored_on", "search"))
        return float(self.slope * max(score["kl"] - free, 0.0))

    def free(self, part: Third) -> float:
        """The divergence that a change of the image size costs by itself, in nats.

        Other pixels change doubtful predictions both ways: ViT-Ti diverges from itself at 224 px by 0.12 nats at 240 px
        and by 0.16 at 208 px, and loses nothing (docs/results/engines.md). So it is that of the next larger size, which
        loses nothing, or, if there is none, of the next smaller one.
        """
        sides = {size: self.macs(size) > self.macs(None) for size in self.others}
        larger = [size for size, more in sides.items() if more]
        return self.losses([Setting(None, min(larger) if larger else max(sides))], part)[0]["kl"]

    def fits(self, score: Mapping[str, Any], bound: float, size: int | None = None) -> bool:
        """True if the expected loss of a model is within a ``bound``, a share, and its measured loss compatible.

        At another image size a part of the divergence is free, so it says less there: the measured loss itself has to
        be within the bound. At 208 px, ViT-Ti and DeiT-T diverge alike and lose 0.0 and 1.5 points.
        """
        doubt = score["loss_error"] if size is None else 0.0
        return self.expected(score, size) <= bound and bool(score["loss"] - doubt <= bound)

    # ---- on the last third: the chosen file --------------------------------------------------------------------------

    def check(self, dense: Candidate, chosen: Candidate | None) -> dict[str, float]:
        """``loss, loss_error, kl, images`` of the chosen file, or of the dense one, on images nothing was chosen by."""
        self.step = STEPS
        return self.file_losses([dense] if chosen is None else [dense, chosen], "check")[-1]

    # ---- measurements ------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.tell(f"step {self.step} of {STEPS}, {text}")

    @cached_property
    def evaluator(self) -> Evaluator:
        """The divergence of settings from the dense model, image by image; of towers the distance of the embedding."""
        proxy = "cosine" if isinstance(self.loss, NeighbourLoss) else "kl"
        return Evaluator(ModelScorer(self.model, self.task, self.images), self.store, proxy, self.say)

    def losses(self, settings: Sequence[Setting], part: Third = "search") -> list[dict[str, float]]:
        """``loss, loss_error, kl`` of models in PyTorch, on a part of the images."""
        pace, count = Pace(), self.images.count(part)

        def scored(places: Sequence[int]) -> list[dict[str, float]]:
            some = [settings[place] for place in places]
            measurement = Measurement(self._contestants(some), [self.loss], self.task)

            def seen(images: int) -> None:
                left = pace.left(places[0] * count + images * len(places), len(settings) * count, time.monotonic())
                self.say(f"{places[0]} of {len(settings)} settings scored on {count} images{left}")

            measurement.follow(self._images(some).batches(part, 0, count), seen)
            return [{key: row[key] for key in ("loss", "loss_error", "kl")} for row in measurement.rows()[1:]]

        on = "" if part == "search" else f" on {part}"
        return self.store.values([f"loss of {one.name}{on}" for one in settings], scored)

    def _contestants(self, settings: Sequence[Setting]) -> list[Contestant]:
        """The dense model at its own size, and the settings, in PyTorch."""
        found: dict[str, Contestant] = {}
        for size in dict.fromkeys([None, *(one.size for one in settings)]):
            configs = [one.config for one in settings if one.size == size and one.config is not None]
            every = contestants(self.at(size), configs, self.task, img_size=size)
            found |= zip([Setting(config, size).name for config in (None, *configs)], every, strict=True)
        return [found[DENSE], *(found[one.name] for one in settings)]

    def _images(self, settings: Sequence[Setting]) -> DatasetImages:
        """The images, at all sizes of the settings."""
        sizes = list(dict.fromkeys(one.size for one in settings if one.size is not None))
        return self.images if self.images_at is None or not sizes else self.images_at(sizes)

    def times(self, pairs: Sequence[tuple[Setting, Engine]], what: str) -> list[dict[str, Any]]:
        """``p50_ms`` of files, and ``speedup, speedup_q1, speedup_q3`` over the first of them, timed in turn."""

        def timed() -> list[dict[str, Any]]:
            with torch.inference_mode():
                calls: dict[str, Callable[[], object]] = {}
                for place, (setting, engine) in enumerate(pairs):
                    self.say(f"making {setting.name} ready on {engine}, {place + 1} of {len(pairs)}")
                    ready = self.ready(setting, engine)
                    calls[str(place)] = partial(ready.run, ready.given(self.batch(setting.size)))
                self.say(f"timing {len(calls)} files")
                times = time_interleaved(calls, budget=Budget(15, 1.0))
            return [{"p50_ms": summarise(own).p50_ms, **paired_speedup(times["0"], own).row} for own in times.values()]

        return self.store.value(what, timed)

    def file_losses(self, candidates: Sequence[Candidate], part: Third) -> list[dict[str, float]]:
        """``loss, loss_error, kl, images`` of files on all images of a part, against the dense model in PyTorch."""

        def scored() -> list[dict[str, float]]:
            models = [Contestant(shared_copy(self.model).eval(), self.task)]
            for one in candidates:
                file = self.ready(one.setting, one.engine)
                models.append(Contestant(file, self.task, name=one.name, img_size=one.setting.size))
            measurement = Measurement(models, [self.loss], self.task)
            pace, count = Pace(), self.images.count(part)

            def seen(images: int) -> None:
                left = pace.left(images, count, time.monotonic())
                self.say(f"{len(candidates)} files scored on {images} of {count} images{left}")

            images = self._images([one.setting for one in candidates])
            some = Subset(images.dataset, images.places[part])
            measurement.follow(read(some, self.batch_size, collate=self.task.collate), seen)
            return [{key: row[key] for key in ("loss", "loss_error", "kl", "images")} for row in measurement.rows()[1:]]

        texts = "; ".join(f"{one.name} on {one.engine}" for one in candidates)
        return self.store.value(f"{part}: {texts}", scored)

    # ---- files -------------------------------------------------------------------------------------------------------

    def ready(self, setting: Setting, engine: Engine) -> Runnable:
        """The file of a setting on an engine."""
        key = (setting.name, str(engine))
        if key not in self._ready:
            dense, size = self.at(setting.size), setting.size
            model = shared_copy(dense) if setting.config is None else reduced_copy(dense, setting.config)
            self._ready[key] = engine.prepare(model, self.batch(size), self._place(setting), self.calibration(size))
        return self._ready[key]

    def take_bytes(self, one: Candidate, dataset: Any) -> None:
        """Export a candidate with its preprocessing in the graph, and use this file from now on; the first third of
        ``dataset``, with the transform of its size, calibrates int8."""
        self.step = STEPS
        self.say("making the file that takes images as they are read")
        assert isinstance(one.engine, FileEngine)
        kind, model = one.engine.kind, self.at(one.setting.size)
        wanted = FileSpec(kind.name, self.batch_size, precision=one.engine.precision, preprocess=True)
        path = self._place(one.setting) / f"bytes{kind.suffix}"
        searched = dataset.part(self.images.places["search"])
        if one.setting.size is not None:
            searched.transform = eval_transform(model)
        file = export(model, one.setting.config, path, wanted, images=searched, check=0)
        self._ready[one.name, str(one.engine)] = file

    def _place(self, setting: Setting) -> Path:
        place = self.folder / hashlib.sha256(setting.name.encode()).hexdigest()[:12]
        place.mkdir(parents=True, exist_ok=True)
        return place

    def batch(self, size: int | None = None) -> Tensor:
        """The images that files are timed on, (B, C, H, W)."""
        images = self.calibration(size)
        return images.repeat(-(-self.batch_size // len(images)), 1, 1, 1)[: self.batch_size]

    def calibration(self, size: int | None = None) -> Tensor:
        """Images to calibrate int8 on, (N, C, H, W), spread over the first third."""
        if size not in self._calibration:
            every = self._images([Setting(None, size)]).sample("search", CALIBRATED)
            self._calibration[size] = torch.cat([batch.at(size) for batch in every])
        return self._calibration[size]

    def _some(self, count: int, size: int | None = None) -> Tensor:
        """At most ``count`` of these, spread evenly."""
        images = self.calibration(size)
        return images[torch.from_numpy(spread(len(images), count))]
