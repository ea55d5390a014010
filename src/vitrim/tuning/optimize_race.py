"""The race of `vitrim.optimize`: which methods and schedules are measured, how, and which file wins.

`Race.check_dense`, `score`, `dense`, `reduced` and `check` run in this order. Below them are the measurements, whose
numbers a store keeps, and the files.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vitrim.core.method import MethodConfig
from vitrim.data import spread
from vitrim.data.dataset import CALIBRATED
from vitrim.engines.copies import reduced_copy, shared_copy
from vitrim.engines.engine import Eager, Engine, FileEngine
from vitrim.engines.runnable import Runnable
from vitrim.engines.writing import FileSpec
from vitrim.errors import VitrimError
from vitrim.measure.bench import RING
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.evaluation_report import at_chance
from vitrim.measure.export import export
from vitrim.measure.latency import Budget, in_turn, paired_speedup, summarise, time_interleaved
from vitrim.measure.neighbours import NeighbourLoss
from vitrim.measure.probes import PairedLoss, TaskMetrics
from vitrim.measure.records import read
from vitrim.measure.run import Measurement
from vitrim.measure.store import Store
from vitrim.report import DENSE, Pace
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

TIMED = 12
"""Most settings timed on the engine."""

FINALISTS = 4
"""Most files scored on the second third."""

STEPS = 6
"""Steps in progress messages: race methods, race schedules, time and score dense files, time reduced files, score the
fastest of these, check the chosen file."""

COUNTED = 8
"""Images to count the MACs of adaptive methods on."""

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


@dataclass(frozen=True)
class RacedSchedule:
    """A method with a schedule: where it acts, and with which relative strength per block.

    Attributes:
        point: weights of the blocks; None for one value for all.
    """

    space: Space
    cost: MacsCost
    point: Point | None
    schedule: str

    @property
    def name(self) -> str:
        """The method and its schedule."""
        return f"{self.space.base.describe()}, {self.schedule}"

    def at(self, share: float) -> MethodConfig | None:
        """The setting with at most this share of the dense MACs, levelled (`Space.level`); None if there is none."""
        config = within(self.space, self.point, self.cost, share)
        return None if config is None else self.space.level(config)


class ScoredSetting(NamedTuple):
    """A setting of a schedule, its share of the dense MACs, and its ``loss, loss_error, kl`` on the first third."""

    share: float
    config: MethodConfig
    score: Mapping[str, float]


@dataclass(frozen=True)
class Candidate:
    """One file: a method, or none, on an engine.

    Attributes:
        config: None for the dense model.
        row: its row of the report, updated when it is scored on other images.
    """

    config: MethodConfig | None
    engine: Engine
    row: dict[str, Any]

    @property
    def name(self) -> str:
        return named(self.config)


def named(config: MethodConfig | None) -> str:
    """The method, or "dense"."""
    return DENSE if config is None else config.describe()


# ---- the race --------------------------------------------------------------------------------------------------------


@dataclass
class Race:
    """The race of one model. Everything is measured once: the store keeps the numbers, a folder the files.

    Attributes:
        rows: of everything that was timed; the first is PyTorch.
        known: by schedule, the scored settings, mildest first.
        slope: loss of top-1 per nat of divergence, fitted over these.
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
    rows: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, list[ScoredSetting]] = field(default_factory=dict)
    slope: float = 1.0
    step: int = 0
    _ready: dict[tuple[str, str], Runnable] = field(default_factory=dict)

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
            configs = training_free(self.model, counted=self.batch_size > 1)
            configs = [one for one in configs if self.engines[0].obstacle(one, self.batch_size) is None]
        self.step = 1
        self.say(f"counting MACs of {len(configs)} methods")
        kept = self._best_of(self.schedules(configs))
        settings = [(one, config) for one in kept for share in SHARES if (config := one.at(share)) is not None]
        # levelling may make settings of two shares equal
        settings = list({(one.name, config.describe()): (one, config) for one, config in settings}.values())
        shares = [one.cost.share(config) for one, config in settings]
        self.step = 2
        scores = self.losses([config for _, config in settings])
        for (one, config), share, score in zip(settings, shares, scores, strict=True):
            self.known.setdefault(one.name, []).append(ScoredSetting(share, config, score))
        self._fit_slope(scores)

    def schedules(self, configs: Sequence[MethodConfig]) -> list[RacedSchedule]:
        """Every method with every schedule that it supports: its default blocks, and few blocks."""
        found: list[RacedSchedule] = []
        for config in configs:
            space = Space.of(self.model, config)
            cost = MacsCost(self.model, space, [self._some(COUNTED if space.adaptive else 1)])
            found.append(RacedSchedule(space, cost, None, "every block" if space.placing is None else "its own stages"))
            if space.size > 3:
                for words, depths in FEW.items():
                    wanted = [round(depth * space.num_layers) for depth in depths]
                    point = normal([float(block in wanted) for block in space.blocks])
                    found.append(RacedSchedule(space, cost, point, words))
        return found

    def _best_of(self, schedules: Sequence[RacedSchedule]) -> list[RacedSchedule]:
        """The schedules that diverge least from the dense model at one share; and the best one that prunes."""
        raced = {one.name: (one, config) for one in schedules if (config := one.at(RACED_AT)) is not None}
        running = list({config.describe(): (one, config) for one, config in raced.values()}.values())
        raced_scores = halve([config for _, config in running], self.evaluator, least=KEPT)
        scores = [one[self.evaluator.proxy] for one in raced_scores]
        order = sorted(range(len(scores)), key=lambda place: (-len(scores[place]), scores[place].mean()))
        best_first = [running[place][0] for place in order]
        kept = best_first[:KEPT]
        cheap = [one for one in best_first if one.space.base.kind == "prune"]
        return kept + [one for one in cheap[:1] if one not in kept]  # pruning may be faster at the same MACs

    def _fit_slope(self, scores: Sequence[Mapping[str, float]]) -> None:
        mild = [score for score in scores if 0.0 < score["kl"] <= MILD]
        if mild:
            fitted = sum(one["kl"] * one["loss"] for one in mild) / sum(one["kl"] ** 2 for one in mild)
            # in case no image changed: assume one had, at the largest divergence
            least = 1.0 / (self.images.count("search") * max(one["kl"] for one in mild))
            self.slope = max(fitted, least)

    # ---- on the second third: files ----------------------------------------------------------------------------------

    def dense(self, bound: float) -> Candidate:
        """The fastest dense file whose own loss is within ``bound``, a share; `VitrimError` if there is none."""
        self.step = 3
        pairs: list[tuple[MethodConfig | None, Engine]] = [(None, one) for one in (Eager(), *self.engines)]
        found = [
            Candidate(None, engine, {"method": DENSE, "engine": engine.label, "precision": engine.precision, **row})
            for (_, engine), row in zip(pairs, self.times(pairs, "dense"), strict=True)
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
        room = max(bound - max(self.expected(dense.row), 0.0), 0.0)
        promising = [setting for scored in self.known.values() for setting in self._promising(scored, room, speedup)]
        timed = self._timed(promising, dense, "reduced")
        if speedup is not None and all(one.row["speedup"] < speedup for one in timed):
            # an engine gains less than MACs promise: only the strongest settings tell what can be reached
            done = {one.name for one in timed}
            strongest = [scored[-1] for scored in self.known.values() if scored[-1].config.describe() not in done]
            timed += self._timed(strongest, dense, "strongest")
        # score the fastest, or those with the least loss at the requested speed, as files on other images
        faster = [one for one in timed if one.row["speedup_q1"] > 1.0]
        if speedup is None:
            finalists = sorted(faster, key=lambda one: one.row["p50_ms"])[:FINALISTS]
        else:
            able = [one for one in faster if one.row["speedup"] >= speedup]
            finalists = sorted(able, key=lambda one: one.row["loss"])[:FINALISTS]
        if not finalists:
            return None
        self.step = 5
        for one, own in zip(finalists, self.file_losses(finalists, "selection"), strict=True):
            one.row.update(own, scored_on="selection")
        if speedup is not None:
            return min(finalists, key=lambda one: one.row["loss"])
        good = [one for one in finalists if self.fits(one.row, bound)]
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
        return list(takewhile(lambda one: self.fits(one.score, room), scored))[-2:]

    @property
    def fastest(self) -> Mapping[str, Any] | None:
        """The row of the fastest setting over its dense file; None if none was timed."""
        rows = (row for row in self.rows if row["method"] != DENSE)
        return max(rows, key=lambda row: row["speedup"], default=None)

    def _timed(self, scored: Sequence[ScoredSetting], dense: Candidate, what: str) -> list[Candidate]:
        """Time the settings with the fewest MACs, and the dense file, in one run."""
        if not scored:
            return []
        scored = sorted(scored, key=lambda one: one.share)[:TIMED]
        self.step, engine = 4, dense.engine
        pairs: list[tuple[MethodConfig | None, Engine]] = [(None, engine), *((one.config, engine) for one in scored)]
        found = []
        for (share, config, score), row in zip(scored, self.times(pairs, what)[1:], strict=True):
            facts = {"method": config.describe(), "engine": engine.label, "precision": engine.precision}
            own = {"loss": score["loss"], "loss_error": score["loss_error"], "images": self.images.count("search")}
            # a machine may be faster in one run than in another: only ratios within a run are comparable
            own |= {"p50_ms": dense.row["p50_ms"] / row["speedup"], "own_p50_ms": row["p50_ms"]}
            found.append(
                Candidate(config, engine, {**facts, **row, **own, "saved": 1.0 - share, "scored_on": "search"})
            )
        self.rows += [one.row for one in found]
        return found

    def expected(self, score: Mapping[str, Any]) -> float:
        """The expected loss of a model, a share.

        Top-1 of a few hundred images is too noisy to detect a loss of one point. So the expected loss is the divergence
        from the dense model, which is measured far more precisely, times the loss per nat over all scored settings.
        Disagreement itself is precise enough.
        """
        return float(self.slope * score["kl"] if self.loss.labels else score["loss"])

    def fits(self, score: Mapping[str, Any], bound: float) -> bool:
        """True if the expected loss of a model is within a ``bound``, a share, and its measured loss compatible."""
        return self.expected(score) <= bound and bool(score["loss"] - score["loss_error"] <= bound)

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

    def losses(self, configs: Sequence[MethodConfig]) -> list[dict[str, float]]:
        """``loss, loss_error, kl`` of reduced models in PyTorch, on the first third."""
        pace, count = Pace(), self.images.count("search")

        def scored(places: Sequence[int]) -> list[dict[str, float]]:
            models = contestants(self.model, [configs[place] for place in places], self.task)
            measurement = Measurement(models, [self.loss], self.task)

            def seen(images: int) -> None:
                left = pace.left(places[0] * count + images * len(places), len(configs) * count, time.monotonic())
                self.say(f"{places[0]} of {len(configs)} settings scored on {count} images{left}")

            measurement.follow(self.images.batches("search", 0, count), seen)
            return [{key: row[key] for key in ("loss", "loss_error", "kl")} for row in measurement.rows()[1:]]

        return self.store.values([f"loss of {config.describe()}" for config in configs], scored)

    def times(self, pairs: Sequence[tuple[MethodConfig | None, Engine]], what: str) -> list[dict[str, Any]]:
        """``p50_ms`` of files, and ``speedup, speedup_q1, speedup_q3`` over the first of them, timed in turn."""

        def timed() -> list[dict[str, Any]]:
            adaptive = any(config is not None and config.is_adaptive() for config, _ in pairs)
            ring = self._some(RING).split(1) if adaptive else [self.batch]
            with torch.inference_mode():
                calls: dict[str, Callable[[], object]] = {}
                for place, pair in enumerate(pairs):
                    self.say(f"making {named(pair[0])} ready on {pair[1]}, {place + 1} of {len(pairs)}")
                    ready = self.ready(*pair)
                    calls[str(place)] = in_turn(ready.run, [ready.given(images) for images in ring])
                self.say(f"timing {len(calls)} files")
                # use every image equally often, in both halves of the rounds
                budget = Budget(15, 1.0) if len(ring) == 1 else Budget(2 * len(ring), 0.0, 2 * len(ring))
                times = time_interleaved(calls, budget=budget)
            return [{"p50_ms": summarise(own).p50_ms, **paired_speedup(times["0"], own).row} for own in times.values()]

        return self.store.value(what, timed)

    def file_losses(self, candidates: Sequence[Candidate], part: Third) -> list[dict[str, float]]:
        """``loss, loss_error, kl, images`` of files on all images of a part, against the dense model in PyTorch."""

        def scored() -> list[dict[str, float]]:
            models = [Contestant(shared_copy(self.model).eval(), self.task)]
            for one in candidates:
                models.append(Contestant(self.ready(one.config, one.engine), self.task, name=one.name))
            measurement = Measurement(models, [self.loss], self.task)
            pace, count = Pace(), self.images.count(part)

            def seen(images: int) -> None:
                left = pace.left(images, count, time.monotonic())
                self.say(f"{len(candidates)} files scored on {images} of {count} images{left}")

            some = Subset(self.images.dataset, self.images.places[part])
            measurement.follow(read(some, self.batch_size, collate=self.task.collate), seen)
            return [{key: row[key] for key in ("loss", "loss_error", "kl", "images")} for row in measurement.rows()[1:]]

        texts = "; ".join(f"{one.name} on {one.engine}" for one in candidates)
        return self.store.value(f"{part}: {texts}", scored)

    # ---- files -------------------------------------------------------------------------------------------------------

    def ready(self, config: MethodConfig | None, engine: Engine) -> Runnable:
        """The file of a method, or of the dense model, on an engine."""
        key = (named(config), str(engine))
        if key not in self._ready:
            model = shared_copy(self.model) if config is None else reduced_copy(self.model, config)
            self._ready[key] = engine.prepare(model, self.batch, self._place(config), self.calibration)
        return self._ready[key]

    def take_bytes(self, one: Candidate, dataset: Any) -> None:
        """Export a candidate with its preprocessing in the graph, and use this file from now on; the first third of
        ``dataset``, with the model's transform, calibrates int8."""
        self.step = STEPS
        self.say("making the file that takes images as they are read")
        assert isinstance(one.engine, FileEngine)
        kind = one.engine.kind
        wanted = FileSpec(kind.name, self.batch_size, precision=one.engine.precision, preprocess=True)
        path = self._place(one.config) / f"bytes{kind.suffix}"
        searched = dataset.part(self.images.places["search"])
        file = export(self.model, one.config, path, wanted, images=searched, check=0)
        self._ready[one.name, str(one.engine)] = file

    def _place(self, config: MethodConfig | None) -> Path:
        place = self.folder / hashlib.sha256(named(config).encode()).hexdigest()[:12]
        place.mkdir(parents=True, exist_ok=True)
        return place

    @cached_property
    def batch(self) -> Tensor:
        """The images that files are timed on, (B, C, H, W)."""
        repeated = -(-self.batch_size // len(self.calibration))
        return self.calibration.repeat(repeated, 1, 1, 1)[: self.batch_size]

    @cached_property
    def calibration(self) -> Tensor:
        """Images to calibrate int8 on, (N, C, H, W), spread over the first third."""
        return torch.cat([batch.images for batch in self.images.sample("search", CALIBRATED)])

    def _some(self, count: int) -> Tensor:
        """At most ``count`` of these, spread evenly."""
        return self.calibration[torch.from_numpy(spread(len(self.calibration), count))]
