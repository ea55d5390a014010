"""`optimize`, the function of ``vitrim optimize``: find the fastest file for a model on this machine, and its loss.

    model = vitrim.create_model("deit_small_patch16_224", pretrained=True)
    report = vitrim.optimize(model, "imagenet:ROOT", max_loss=1.0)
    report.file.run(images), report.sentence

The images are split into thirds. On the first, methods and schedules race: their damage there determines how much each
may remove. On the second, the fastest are scored as files of the fastest engine, and one is chosen. On the third, only
the chosen file is scored; the sentence of the report states that loss.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vitrim.core.checks import described
from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, host_of, parse_method, parse_methods
from vitrim.core.saving import entries
from vitrim.errors import VitrimError, check_read, check_whole
from vitrim.exporting.exported import Exported, sidecar, staged, weights_beside
from vitrim.exporting.formats import formats
from vitrim.exporting.writing import FileSpec, export
from vitrim.files import check_folder, json_text, write_text
from vitrim.loading import MADE, ModelSpec
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.copies import reduced_copy, shared_copy
from vitrim.measure.earlier import earlier
from vitrim.measure.evaluation_report import unseen, weight_and_class_notes
from vitrim.measure.in_files import FileModel
from vitrim.measure.inputs import EMBEDDING, WHERE, DataSpec, open_images, task_name
from vitrim.measure.latency import Budget, in_turn, paired_speedup, summarise, time_interleaved
from vitrim.measure.machine import drawing, environment
from vitrim.measure.neighbours import NeighbourLoss
from vitrim.measure.probes import PairedLoss
from vitrim.measure.records import DENSE, read
from vitrim.measure.run import Measurement, weights_fingerprint
from vitrim.measure.task_data import num_classes, open_task
from vitrim.plots import style
from vitrim.report import Pace, Report, Results, Table
from vitrim.speed.bench import CALIBRATED, RING
from vitrim.speed.engines import Eager, Engine, FileEngine, engines_named, listed
from vitrim.speed.scoring import SCORED_ON_ENGINES, OnEngine
from vitrim.speed.words import engine_of
from vitrim.tasks import Task, make_task
from vitrim.tuning.cost import MacsCost, within
from vitrim.tuning.proxy import DatasetImages, Part
from vitrim.tuning.space import Point, Space, normal, quiet, training_free
from vitrim.tuning.study import Study

IMAGES = 3 * 512
"""Default limit of images: 512 each for racing, choosing and checking."""

LEAST = 30
"""Fewest images for a meaningful result."""

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

TOGETHER = 8
"""Settings scored in one pass."""

THIRDS = {"search": "1st", "selection": "2nd", "check": "3rd"}

SPOKEN = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "aoti": "AOTInductor"}
"""Names of engines in sentences."""

FEW = {
    "six blocks": (0.0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6),
    "three blocks": (0.25, 0.5, 0.75),
    "two blocks": (0.25, 0.5),
    "two early blocks": (0.17, 0.42),
}
"""Schedules with few stages, by relative depth: every reducing block has the overhead of small operations."""


@dataclass(repr=False)
class OptimizeReport(Report):
    """The findings of `optimize`.

    Attributes:
        best: its method; None for the dense model, if reducing does not pay.
        sentence: its gain and loss.
    """

    file: Exported = field(kw_only=True)
    best: MethodConfig | None = None
    sentence: str = ""

    @property
    def figure(self) -> Any:
        """A matplotlib figure of loss over milliseconds: dense on every engine, and every timed setting."""
        return draw(self.rows, self.facts)

    def parts(self) -> Iterator[Any]:
        yield from self.tables
        yield from self.notes
        yield self.sentence


@dataclass(frozen=True)
class Ladder:
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


@earlier(model=ModelSpec, images=DataSpec, out=Results)
def optimize(
    model: nn.Module | str | ModelSpec,
    images: Any,
    *,
    max_loss: float | None = None,
    speedup: float | None = None,
    batch_size: int = 1,
    methods: MethodConfig | str | Sequence[MethodConfig | str] | None = None,
    engine: str | Sequence[str] | None = None,
    precision: str | Sequence[str] | None = None,
    out: str | Path | Results = "optimized",
    on_progress: Callable[[str], None] | None = None,
) -> OptimizeReport:
    """Find the fastest file for a model on this machine: engine, precision, method and schedule.

    The dense model is timed on every engine in every precision; methods and schedules race on the fastest pair whose
    own loss is within the bound. If reducing does not pay there, the result is the dense file, and the report says so.

    Args:
        model: a dense classifier, or a tower that returns an embedding; a module is not changed. Or its name as on the
            command line, or a `vitrim.ModelSpec`.
        images: a source, as for ``--images``, a dataset, or a `vitrim.DataSpec`, whose ``limit`` defaults to 1,536.
            They are split into thirds (see the module); the reported loss is of the last third. With ``labels``, the
            loss is of top-1, otherwise of agreement with the dense model. For a tower, labels say which images belong
            together, and the loss is of recall@1, otherwise of the dense model's nearest neighbours. ``few`` accepts
            too few images to show that a loss is within ``max_loss``.
        max_loss: points of top-1, or of agreement, that may be lost; default 1.0. The expected loss of top-1 is
            estimated from the divergence from the dense model (`Race.fits`).
        speedup: instead of ``max_loss``: minimise the loss at this speed relative to the fastest dense model.
        batch_size: images per batch; the only batch size of the file.
        methods: one or several, configs or text; None for all that need no training and have a fixed graph.
        engine: file engines of `vitrim.bench`: onnxruntime, openvino, torch.export, aoti; None for the installed ones
            of the first two, else torch.export.
        precision: fp32, bf16, int8; None for those that the engines support here.
        out: folder for the file, ``best.json``, ``report.json``, ``loss_over_time.png`` and ``study.jsonl``, or a
            `vitrim.Results`, whose ``resume`` reuses the study's measurements, and whose ``preprocess`` makes a file of
            raw images.
        on_progress: called often with a short text on the current step.

    Returns:
        A report with the ``file``, its method as ``best`` and the ``sentence``. Its rows are everything that was timed:
        ``method, engine, precision, p50_ms, speedup, speedup_q1, speedup_q3`` (for dense models over PyTorch in fp32,
        for methods over the dense model on their engine), ``saved`` (share of the MACs), ``loss`` and ``loss_error``
        (shares), ``scored_on`` (search, selection or check) and ``images``. Methods are timed in a separate run beside
        the dense file: to make all times comparable, their ``p50_ms`` is that of the dense file over their speed-up;
        ``own_p50_ms`` is the time in that run.

    Raises:
        VitrimError: an invalid option, a model that file engines cannot run, data that cannot be read, fewer than 30
            images or too few to show ``max_loss``, or a study of another search; nothing is written.
    """
    spec, source, results = ModelSpec.of(model), DataSpec.of(images), Results.of(out)
    check_read(spec, MADE)
    check_read(
        source, (*WHERE, "options", "limit", "labels", "few") if source.labels else (*WHERE, "limit", "labels", "few")
    )
    check_read(results, ("resume", "preprocess"))
    folder, labels, seed = Path(results.folder or "optimized"), source.labels, spec.seed or 0
    if max_loss is not None and speedup is not None:
        raise VitrimError("give max_loss or speedup, not both: one is the bound, and the other is made best")
    bound = 1.0 if max_loss is None else max_loss
    if not isinstance(bound, int | float) or not 0.0 <= bound <= 100.0:
        raise VitrimError(f"max_loss={max_loss} must be from 0 to 100 points")
    if speedup is not None and not (isinstance(speedup, int | float) and 1.0 < speedup < 1000.0):
        raise VitrimError(f"speedup={speedup} must be above 1, over the fastest dense model")
    check_whole(batch_size=(batch_size, 1), limit=(source.limit, LEAST))
    engines, lacking = _engines(engine, precision)
    wanted = None if methods is None else parse_methods(methods)
    check_folder(folder)
    tell = on_progress or (lambda _: None)
    with drawing(torch.device("cpu"), seed), quiet():
        loaded = spec.load("cpu")
        host = loaded.model.float().eval() if spec.named else loaded.model
        like = next(host.parameters())
        if like.device.type != "cpu" or like.dtype != torch.float32:
            kind = str(like.dtype).removeprefix("torch.")
            raise VitrimError(f"the model is {kind} on {like.device}: give it in float32 on the CPU, where files run")
        if labels:
            task, dataset = open_task(loaded, source, embeddings=True)
        else:
            tower = task_name(host) == EMBEDDING
            task = make_task(EMBEDDING, 0) if tower else make_task("classification", num_classes(host))
            dataset = open_images(host, source)
        if task.name not in SCORED_ON_ENGINES:
            raise VitrimError(f"files are optimized for models of {', '.join(SCORED_ON_ENGINES)}, not {task.name}")
        if len(dataset) < LEAST:
            raise VitrimError(f"{dataset.source} has {len(dataset)} images, and {LEAST} are needed: ten for each third")
        for config in wanted or ():
            if (why := engines[0].obstacle(config, batch_size)) is not None:
                raise VitrimError(f"{config.describe()} does not run on {engines[0]}: {why}")
            Space.of(host, config)
            reduced_copy(host, config)
        parts = DatasetImages(dataset, (source.limit or IMAGES) // 3, SEARCHED_AT, collate=task.collate)
        if task.name == EMBEDDING:
            first = next(iter(parts.batches("search", 0, 1)))
            check_vector(host, task, first.images)
        facts: dict[str, Any] = {
            "model": loaded.name,
            "weights": loaded.weights,
            "environment": environment(dtype=",".join(dict.fromkeys(one.precision for one in engines)), seed=seed),
            "source": source.name(dataset),
            "split": dataset.split,
            "images": {part: parts.count(part) for part in get_args(Part)},
            "labels": labels,
            "task": task.name,
            **({"embedding": ask(host).embedding_name(host)} if task.name == EMBEDDING else {}),
            "bound": {"max_loss": bound} if speedup is None else {"speedup": speedup},
            "batch_size": batch_size,
            "engines": [str(one) for one in engines],
        }
        settings = {
            **{key: value for key, value in facts.items() if key != "environment"},
            "parameters": weights_fingerprint(host),
            "methods": None if wanted is None else [one.describe() for one in wanted],
            "threads": torch.get_num_threads(),
            "seed": seed,
            **({"preprocess": True} if results.preprocess else {}),
        }
        doubts: list[str] = []
        if labels:
            given = {**facts, "untrained": [], "data": {"classes": dataset.num_classes}}
            doubts = list(weight_and_class_notes(given, task, "only agreement says"))
        for doubt in doubts:  # before hours of work
            warnings.warn(f"{doubt}; --no-labels compares with the dense model alone", stacklevel=2)
        seen = can_show(parts.count("check"))
        tell(seen)
        if speedup is None and (why := cannot_show(bound, parts.count("check"))) is not None:
            if not source.few:
                raise VitrimError(f"{why}, or go on with --few-images (few=True)")
            warnings.warn(why, stacklevel=2)
        study = Study(folder / "study.jsonl", settings, resume=results.resume)
        loss: PairedLoss | NeighbourLoss
        if task.name == EMBEDDING:
            loss = NeighbourLoss(labelled=labels)
            doubts.append(f"the embedding: {facts['embedding']}; neighbours are looked for within each third")
        else:
            loss = PairedLoss(task, labels=labels and task.selects_by == "top1")
        race = Race(host, task, loss, parts, engines, batch_size, study, folder / "files", tell)
        race.score(wanted)
        dense = race.dense(bound / 100)
        chosen = race.reduced(dense, bound / 100, speedup)
        notes = [*doubts, *lacking, seen]
        if results.preprocess:
            race.step = STEPS
            race.say("making the file that takes images as they are read")
            race.take_bytes(chosen or dense, dataset)
            notes.append("the file takes uint8 images (batch, height, width, 3); its time is that without normalising")
        return _hand_over(race, dense, chosen, folder, facts, notes)


def check_vector(model: nn.Module, task: Task, images: Tensor) -> None:
    """Check that the file of a tower would return its embedding.

    Args:
        model: dense, without a classifier.
        images: (B, C, H, W).

    Raises:
        VitrimError: it has no embedding, or also has a text tower.
    """
    if hasattr(model, "get_image_features"):
        raise VitrimError(
            f"{type(model).__name__} has a tower for text, too, and a file takes images alone: take its image tower, "
            "e.g. ...VisionModelWithProjection of transformers"
        )
    with torch.no_grad():
        task.predict(model, images)


def can_show(count: int) -> str:
    """A sentence on the loss that a number of images can detect.

    By the rule of three, a change in none of n images is below 3/n, at 95 %.

    Example:
        >>> can_show(500)
        'the loss is that of 500 images: one that none of them shows is below 0.6 points (at 95 %)'
    """
    return (
        f"the loss is that of {count} images: one that none of them shows is below {300 / count:.1f} points (at 95 %)"
    )


def cannot_show(bound: float, count: int) -> str | None:
    """A sentence on a loss of ``bound`` points that a number of images cannot detect; None if they can.

    Example:
        >>> cannot_show(1.0, 32)  # doctest: +NORMALIZE_WHITESPACE
        'a loss of 1 point cannot be seen on 32 images: even where none of them changes it is only known to be below 9.4
        points (at 95 %); give 900 images, 300 for each third, allow more with --max-loss'
        >>> cannot_show(1.0, 300) is None
        True
    """
    if bound * count >= 300:
        return None
    points = f"{bound:g} point{'' if bound == 1 else 's'}"
    needed = math.ceil(300 / bound) if bound else 0
    more = f"give {3 * needed:,} images, {needed:,} for each third, " if needed else ""
    return (
        f"a loss of {points} cannot be seen on {count} images: even where none of them changes it is only known to be "
        f"below {300 / count:.1f} points (at 95 %); {more}allow more with --max-loss"
    )


def _engines(
    engine: str | Sequence[str] | None, precision: str | Sequence[str] | None
) -> tuple[list[Engine], list[str]]:
    """The file engines to choose from, and notes on what they lack; raise `VitrimError` for other engines."""
    given, precisions = listed(engine), listed(precision)
    of_files = {kind.engine: kind for kind in formats().values()}
    wrong = next((name for name in given if name not in of_files), None)
    if wrong is not None:
        raise VitrimError(f"engine {wrong} runs no files; valid: {', '.join(sorted(of_files))}")
    if not given:
        given = [name for name in ("onnxruntime", "openvino") if of_files[name].missing() is None] or ["torch.export"]
    notes: list[str] = []
    if not precisions:
        quantiser = importlib.util.find_spec("nncf") is not None
        precisions = ["fp32", "bf16", *(["int8"] if quantiser else [])]
        if not quantiser:
            notes.append("int8 is not tried: it needs nncf (pip install 'vitrim[int8]')")
    found, lacking = engines_named(given, precisions)
    return found, [*notes, *lacking]


# ---- the race --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """One file: a method, or none, on an engine.

    Attributes:
        config: None for the dense model.
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


@dataclass
class Race:
    """The measurements of one model, each made once: the study keeps the numbers, a folder the files.

    Attributes:
        loss: probe of the loss.
        known: by ladder, share of the MACs, setting and loss of everything scored, mildest first.
        slope: loss of top-1 per nat of divergence, fitted over these.
    """

    model: nn.Module
    task: Task
    loss: PairedLoss | NeighbourLoss
    images: DatasetImages
    engines: Sequence[Engine]
    batch_size: int
    study: Study
    folder: Path
    tell: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, list[tuple[float, MethodConfig, dict[str, float]]]] = field(default_factory=dict)
    slope: float = 1.0
    step: int = 0
    _ready: dict[tuple[str, str], Any] = field(default_factory=dict)

    @cached_property
    def calibration(self) -> Tensor:
        """The first images of the first third, (N, C, H, W)."""
        few = self.images.batches("search", 0, min(CALIBRATED, self.images.count("search")))
        return torch.cat([batch.images for batch in few])

    @cached_property
    def batch(self) -> Tensor:
        """The images that files are timed on, (B, C, H, W)."""
        repeated = -(-self.batch_size // len(self.calibration))
        return self.calibration.repeat(repeated, 1, 1, 1)[: self.batch_size]

    def say(self, text: str) -> None:
        self.tell(f"step {self.step} of {STEPS}, {text}")

    def ready(self, config: MethodConfig | None, engine: Engine) -> Any:
        """A callable that runs batches through the ``file`` of a method, or of the dense model, on an engine."""
        key = (named(config), str(engine))
        if key not in self._ready:
            model = shared_copy(self.model) if config is None else reduced_copy(self.model, config)
            self._ready[key] = engine.prepare(model, self.batch, self._place(config), self.calibration)
        return self._ready[key]

    def take_bytes(self, one: Candidate, dataset: Any) -> None:
        """Export a candidate with its preprocessing in the graph, and use this file from now on; ``dataset``, with the
        model's transform, calibrates int8."""
        assert isinstance(one.engine, FileEngine)
        kind = one.engine.kind
        wanted = FileSpec(kind.name, self.batch_size, precision=one.engine.precision, preprocess=True)
        path = self._place(one.config) / f"bytes{kind.suffix}"
        file = export(self.model, one.config, path, wanted, images=dataset, check=0)
        self._ready[one.name, str(one.engine)] = FileModel(file)

    def _place(self, config: MethodConfig | None) -> Path:
        place = self.folder / hashlib.sha256(named(config).encode()).hexdigest()[:12]
        place.mkdir(parents=True, exist_ok=True)
        return place

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def times(self, pairs: Sequence[tuple[MethodConfig | None, Engine]], what: str) -> list[dict[str, Any]]:
        """``p50_ms`` of files, and ``speedup, speedup_q1, speedup_q3`` over the first of them, timed in turn."""

        def timed() -> list[dict[str, Any]]:
            adaptive = any(config is not None and config.is_adaptive() for config, _ in pairs)
            ring = self.calibration[:RING].split(1) if adaptive else [self.batch]
            with torch.inference_mode():
                calls: dict[str, Callable[[], object]] = {}
                for place, pair in enumerate(pairs):
                    self.say(f"making {named(pair[0])} ready on {pair[1]}, {place + 1} of {len(pairs)}")
                    calls[str(place)] = in_turn(self.ready(*pair), ring)
                self.say(f"timing {len(calls)} files")
                # use every image equally often, in both halves of the rounds
                budget = Budget(15, 1.0) if len(ring) == 1 else Budget(2 * len(ring), 0.0, 2 * len(ring))
                times = time_interleaved(calls, budget=budget)
            found = []
            for own in times.values():
                found.append({"p50_ms": summarise(own).p50_ms, **paired_speedup(times["0"], own).row})
            return found

        found: list[dict[str, Any]] = self.study.value(what, timed, kind=list[dict[str, float | list[float]]])
        return found

    def losses(self, configs: Sequence[MethodConfig], count: int) -> list[dict[str, float]]:
        """``loss, loss_error, kl`` of reduced models in PyTorch, on the first ``count`` images of the first third."""

        rows: list[dict[str, float]] = []
        pace, forwards = Pace(), len(configs) * count
        for start in range(0, len(configs), TOGETHER):  # stored by group, since all groups may take an hour
            group = configs[start : start + TOGETHER]

            def scored(group: Sequence[MethodConfig] = group, start: int = start) -> list[dict[str, float]]:
                measurement = Measurement(contestants(self.model, group, self.task), [self.loss], self.task)

                def seen(images: int) -> None:
                    left = pace.left(start * count + images * len(group), forwards, time.monotonic())
                    self.say(f"{start} of {len(configs)} settings scored on {count} images{left}")

                measurement.follow(self.images.batches("search", 0, count), seen)
                return [{key: row[key] for key in ("loss", "loss_error", "kl")} for row in measurement.rows()[1:]]

            texts = "; ".join(config.describe() for config in group)
            rows += self.study.value(f"losses on {count} images: {texts}", scored, kind=list[dict[str, float]])
        return rows

    def file_losses(self, candidates: Sequence[Candidate], part: Part) -> list[dict[str, float]]:
        """``loss, loss_error, kl, images`` of files on all images of a part, against the dense model in PyTorch."""

        def scored() -> list[dict[str, float]]:
            exact = Contestant(shared_copy(self.model).eval(), self.task)
            models = [exact]
            for one in candidates:
                run = self.ready(one.config, one.engine)
                models.append(OnEngine(self.model, self.task, None, one.engine, run, self.batch_size))
            measurement = Measurement(models, [self.loss], self.task)
            count = self.images.count(part)
            some = Subset(self.images.dataset, self.images.places[part])
            pace = Pace()

            def seen(images: int) -> None:
                left = pace.left(images, count, time.monotonic())
                self.say(f"{len(candidates)} files scored on {images} of {count} images{left}")

            measurement.follow(read(some, self.batch_size, collate=self.task.collate), seen)
            return [{key: row[key] for key in ("loss", "loss_error", "kl", "images")} for row in measurement.rows()[1:]]

        texts = "; ".join(f"{one.name} on {one.engine}" for one in candidates)
        rows: list[dict[str, float]] = self.study.value(f"{part}: {texts}", scored, kind=list[dict[str, float]])
        return rows

    # ---- the dense model ---------------------------------------------------------------------------------------------

    def dense(self, bound: float) -> Candidate:
        """The fastest dense file whose own loss is within ``bound``, a share; `VitrimError` if there is none."""
        self.step, eager = 3, Eager()
        pairs: list[tuple[MethodConfig | None, Engine]] = [(None, one) for one in (eager, *self.engines)]
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

    # ---- reduced models ----------------------------------------------------------------------------------------------

    def ladders(self, configs: Sequence[MethodConfig]) -> list[Ladder]:
        """Every method with every schedule that it supports: its default blocks, and few blocks."""
        found: list[Ladder] = []
        for config in configs:
            space = Space.of(self.model, config)
            cost = MacsCost(self.model, space, [self.calibration[: COUNTED if space.adaptive else 1]])
            found.append(Ladder(space, cost, None, "every block" if space.placing is None else "its own stages"))
            if space.size > 3:
                for words, depths in FEW.items():
                    wanted = [round(depth * space.num_layers) for depth in depths]
                    point = normal([float(block in wanted) for block in space.blocks])
                    found.append(Ladder(space, cost, point, words))
        return found

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
        raced = {one.name: (one, config) for one in self.ladders(configs) if (config := one.at(RACED_AT)) is not None}
        running = list({config.describe(): (one, config) for one, config in raced.values()}.values())
        whole = self.images.count("search")
        few = min(whole, max(whole // 4, 2 * SEARCHED_AT))
        scores = self.losses([config for _, config in running], few)
        order = sorted(range(len(scores)), key=lambda place: scores[place]["kl"])
        best_first = [running[place][0] for place in order]
        kept = best_first[:KEPT]
        cheap = [one for one in best_first if one.space.base.kind == "prune"]
        kept += [one for one in cheap[:1] if one not in kept]  # pruning may be faster at the same MACs
        settings = [(one, config) for one in kept for share in SHARES if (config := one.at(share)) is not None]
        # levelling may make settings of two shares equal
        settings = list({(one.name, config.describe()): (one, config) for one, config in settings}.values())
        steps = [(one, one.cost.share(config), config) for one, config in settings]
        self.step = 2
        scored = self.losses([config for _, _, config in steps], whole)
        for (one, share, config), score in zip(steps, scored, strict=True):
            self.known.setdefault(one.name, []).append((share, config, score))
        mild = [score for score in scored if 0.0 < score["kl"] <= MILD]
        if mild:
            fitted = sum(one["kl"] * one["loss"] for one in mild) / sum(one["kl"] ** 2 for one in mild)
            # in case no image changed: assume one had, at the largest divergence
            self.slope = max(fitted, 1.0 / (whole * max(one["kl"] for one in mild)))

    def fits(self, score: Mapping[str, Any], bound: float) -> bool:
        """True if the measured losses of a model are compatible with a ``bound``, a share.

        Top-1 of a few hundred images is too noisy to detect a loss of one point. So the expected loss is the divergence
        from the dense model, which is measured far more precisely, times the loss per nat over all scored settings; the
        measured loss only has to be compatible with the bound. Disagreement itself is precise enough.
        """
        if not self.loss.labels:
            return bool(score["loss"] <= bound)
        return bool(self.slope * score["kl"] <= bound and score["loss"] - score["loss_error"] <= bound)

    def reduced(self, dense: Candidate, bound: float, speedup: float | None) -> Candidate | None:
        """The best reduced file on the engine of ``dense``; None if none is better.

        Args:
            dense: the fastest dense file.
            bound: allowed loss, a share, if there is no ``speedup``.
            speedup: over ``dense``, to reach with the least loss.
        """
        engine, whole = dense.engine, self.images.count("search")
        room = max(bound - max(self.slope * dense.row["kl"] if self.loss.labels else dense.row["loss"], 0.0), 0.0)
        known = self.known
        chosen = [pick for each in known.values() for pick in self._picks(each, room, speedup)]
        if not chosen:
            return None
        chosen = sorted(chosen, key=lambda pick: pick[0])[:TIMED]
        # their times, with the dense file in the same run
        self.step = 4
        pairs: list[tuple[MethodConfig | None, Engine]] = [(None, engine), *((pick[1], engine) for pick in chosen)]
        timed = self.times(pairs, "reduced")[1:]
        found = []
        for (share, config, score), row in zip(chosen, timed, strict=True):
            facts: dict[str, Any] = {"method": config.describe()}
            facts |= {"engine": engine.label, "precision": engine.precision}
            own = {"loss": score["loss"], "loss_error": score["loss_error"], "images": whole}
            # a machine may be faster in one run than in another: only ratios within a run are comparable
            own |= {"p50_ms": dense.row["p50_ms"] / row["speedup"], "own_p50_ms": row["p50_ms"]}
            found.append(
                Candidate(config, engine, {**facts, **row, **own, "saved": 1.0 - share, "scored_on": "search"})
            )
            self.rows.append(found[-1].row)
        # score the fastest, or those with the least loss at the requested speed, as files on other images
        pays = [one for one in found if one.row["speedup_q1"] > 1.0]
        if speedup is None:
            finalists = sorted(pays, key=lambda one: one.row["p50_ms"])[:FINALISTS]
        else:
            able = [one for one in pays if one.row["speedup"] >= speedup]
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

    def _picks(
        self, each: Sequence[tuple[float, MethodConfig, dict[str, float]]], room: float, speedup: float | None
    ) -> list[tuple[float, MethodConfig, dict[str, float]]]:
        """The settings of one ladder, mildest first, that are worth timing.

        Without a speed-up, the two strongest that fit: on the engine, or on other images, the strongest may fail. With
        one, the two mildest whose MACs promise it.
        """
        if speedup is not None:
            return [pick for pick in each if 1.0 / pick[0] >= speedup][:2]
        fits = [self.fits(score, room) for _, _, score in each]
        return list(each[: fits.index(False)] if False in fits else each)[-2:]


# ---- the file and the words ------------------------------------------------------------------------------------------


def _hand_over(
    race: Race, dense: Candidate, chosen: Candidate | None, folder: Path, facts: dict[str, Any], lacking: Sequence[str]
) -> OptimizeReport:
    """Score the chosen file on the last third, and write it to the folder with a report."""
    best = chosen or dense
    last = [dense, best] if chosen is not None else [dense]
    race.step = STEPS
    score = race.file_losses(last, "check")[-1]
    report_rows = [*race.rows, {**best.row, **score, "scored_on": "check"}]
    sentence = in_words(race, dense, chosen, score)
    made = race.ready(best.config, best.engine).file.path
    path = folder / f"model{made.suffix}"
    with staged(path) as place:
        for file in (made, *weights_beside(made)):
            if file.is_file():
                shutil.copyfile(file, place.with_name(file.name.replace(made.stem, place.stem)))
        known = dict(Exported.open(made, trust=True).metadata)
        sidecar(place).write_text(json_text(known, indent=2) + "\n", encoding="utf-8")
    report = OptimizeReport("optimize", facts, report_rows, file=Exported.open(path, trust=True), best=best.config)
    report.sentence = sentence
    report.facts |= {"sentence": sentence, "chosen": best.name, "engine": str(best.engine)}
    report.tables = [_table(report_rows)]
    report.notes = [*_meaning(dense.engine), *lacking, f"the file: {path}; it takes batches of {race.batch_size}"]
    report.files = [path, *(file for file in (sidecar(path), *weights_beside(path)) if file.is_file())]
    config = best.config or parse_method("none")
    made_for = {**described(host_of(race.model), race.model), "parameters": weights_fingerprint(race.model)}
    write_text(folder / "best.json", json_text(entries(config, {"made_for": made_for, **facts}), indent=2) + "\n")
    report.save(folder / "report.json")
    report.files += [folder / "best.json", folder / "report.json"]
    if importlib.util.find_spec("matplotlib") is not None:
        style.save(report.figure, folder / "loss_over_time.png")
        report.files.append(folder / "loss_over_time.png")
    shutil.rmtree(race.folder, ignore_errors=True)
    return report


def in_words(race: Race, dense: Candidate, chosen: Candidate | None, score: Mapping[str, float]) -> str:
    """The sentence of the report: times, the speed-up over PyTorch, and the loss.

    Args:
        race: its first row is PyTorch.
        chosen: the reduced file; None if reducing does not pay.
        score: score of the chosen file on the last third.
    """
    what = f"points of {metric(neighbours=isinstance(race.loss, NeighbourLoss), labels=race.loss.labels)}"
    points = 100 * score["loss"]
    change = f"{abs(points):.1f} {what} {'fewer' if points >= 0 else 'more'}"
    sentence = f"{race.rows[0]['p50_ms']:.1f} ms per batch of {race.batch_size} as you run it now (PyTorch, fp32); "
    spoken = SPOKEN.get(dense.engine.label, dense.engine.label)
    sentence += f"{dense.row['p50_ms']:.1f} with {spoken} in {dense.engine.precision}"
    if chosen is None:
        sentence += f", {dense.row['speedup']:.1f} times as fast, {change}"
        end = "; reducing tokens does not pay here within the bound, so the file is of the dense model"
    else:
        ratio = chosen.row["speedup"] * dense.row["speedup"]  # over the dense file, times its speed-up over PyTorch
        sentence += f"; {chosen.row['p50_ms']:.1f} with {chosen.name} ({100 * chosen.row['saved']:.0f} % of the MACs "
        sentence += f"saved): {ratio:.1f} times as fast, {change}"
        end = ""
    most = unseen(score["loss"], score["loss_error"], round(score["images"]))
    known = (
        f"standard error {100 * score['loss_error']:.1f}"
        if most is None
        else f"none changed: below {most:.1f}, at 95 %"
    )
    images = f"{score['images']:.0f} images not searched on ({known})"
    return f"{sentence} on {images}{end}"


def metric(*, neighbours: bool, labels: bool) -> str:
    """The name of the score in sentences.

    Example:
        >>> [metric(neighbours=True, labels=labels) for labels in (True, False)]
        ['recall@1', "the dense model's neighbours"]
    """
    if neighbours:
        return "recall@1" if labels else "the dense model's neighbours"
    return "top-1" if labels else "agreement"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of all timings, fastest first, and the chosen file last."""
    *timed, last = rows
    dense = {engine_of(row): row["speedup"] for row in timed if row["method"] == DENSE}

    def speeds(row: Mapping[str, Any]) -> tuple[str, str]:
        own = f"{row['speedup']:.2f} ({row['speedup_q1']:.2f}-{row['speedup_q3']:.2f})"
        if row["method"] == DENSE:
            return own, ""
        return f"{row['speedup'] * dense[engine_of(row)]:.2f}", own

    cells = [
        (
            f"{row['method']} on {engine_of(row)}" if row["method"] == DENSE else row["method"],
            f"{row['p50_ms']:.2f}",
            *speeds(row),
            f"{100 * row['saved']:.0f}",
            _loss_cell(row),
            THIRDS[row["scored_on"]],
        )
        for row in [*sorted(timed, key=lambda row: row["p50_ms"]), last]
    ]
    return Table("optimize", "", ("model", "ms", "over PyTorch", "over dense", "MACs saved %", "loss", "of"), cells)


def _loss_cell(row: Mapping[str, Any]) -> str:
    most = unseen(row["loss"], row["loss_error"], row["images"])
    return f"{100 * row['loss']:.1f} ± {100 * row['loss_error']:.1f}" if most is None else f"none; < {most:.1f}"


def _meaning(engine: Engine) -> list[str]:
    return [
        "ms: median of a batch; over PyTorch: speed-up over the model in PyTorch in fp32; over dense: over the dense "
        f"file on {engine}, where methods run; in brackets quartiles, where both were timed in one run",
        "loss: points and their standard error, or, where no image changed, what it is below (at 95 %), on the third "
        "of the images under 'of'; the last row is the file that is handed over",
    ]


def draw(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Any:
    """A figure of loss in points over milliseconds per batch: stars are dense models, dots methods, a circle the file.

    Error bars are standard errors of the loss.
    """
    figure, (axis,) = style.panels(1, across=1, size=(6.4, 4.4), above=1.0)
    *timed, last = rows
    names = list(dict.fromkeys(row["method"] for row in timed if row["method"] != DENSE))
    shades, shapes = style.colours(names), style.markers(names)
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    end = max(row["p50_ms"] for row in rows)
    stars = sorted((row for row in timed if row["method"] == DENSE), key=lambda row: row["p50_ms"])
    for place, row in enumerate(stars):
        at = row["p50_ms"], 100 * row["loss"]
        axis.plot(*at, "*", markersize=12, color=style.DENSE_COLOUR, linestyle="none")
        # alternate above and below, and put slow ones to the left, so that names do not overlap
        side = "right" if at[0] > 0.7 * end else "left"
        offset = (-6 if side == "right" else 6), (7 if place % 2 == 0 else -14)
        axis.annotate(
            engine_of(row),
            at,
            xytext=offset,
            textcoords="offset points",
            fontsize=style.SMALL,
            horizontalalignment=side,
        )
    for row in timed:
        colour = shades.get(row["method"], style.DENSE_COLOUR)
        shape = shapes.get(row["method"], "")
        axis.errorbar(
            [row["p50_ms"]], [100 * row["loss"]], yerr=[100 * row["loss_error"]], color=colour, marker=shape,
            linestyle="none", elinewidth=0.8,
        )  # fmt: skip
    axis.plot([last["p50_ms"]], [100 * last["loss"]], "o", markersize=16, fillstyle="none", color=style.DENSE_COLOUR)
    axis.axhline(0.0, color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(labelsize=style.TEXT)
    axis.set_xlabel(f"ms per batch of {facts['batch_size']}, median", fontsize=style.TEXT)
    axis.set_ylabel("loss, points", fontsize=style.TEXT)
    axis.set_title(f"{facts['model']}: circled is the file, on images not searched on", fontsize=style.TITLE)
    style.stars_and_dots(figure, shades, shapes, across=1 if len(max(names, key=len, default="")) > 40 else 2)
    return figure
