"""`compare`: accuracy and measured time of several methods, in one table and one picture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vitrim.checked import Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.core.registry import fitting
from vitrim.data import spread
from vitrim.data.dataset import calibrating
from vitrim.engines.copies import take_learned
from vitrim.engines.engine import Engine, compilation, engines_named, listed
from vitrim.engines.exported import Exported
from vitrim.engines.machine import drawing, environment
from vitrim.errors import ReductionWarning, VitrimError, one_line_errors
from vitrim.loading import Loaded, ModelSpec, PlacedModel
from vitrim.measure.bench import (
    BatchSizes,
    Speeds,
    Tell,
    batch_sizes,
    check_alone,
    check_enough,
    check_methods,
    in_dtype,
    place_of,
)
from vitrim.measure.comparison import Comparison
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.evaluation import paired_probes, standard_probes
from vitrim.measure.in_files import MethodsAndFiles, check_alike, file_words, parted
from vitrim.measure.inputs import EMBEDDING, ZERO_SHOT, ScoredData, untrained_methods
from vitrim.measure.latency import Budget
from vitrim.measure.records import Batch, Row, read
from vitrim.measure.run import Measurement
from vitrim.measure.task_data import data_facts, open_task
from vitrim.report import DENSE
from vitrim.tasks import Task

SCORED_ON_ENGINES = ("classification", "multilabel", EMBEDDING, ZERO_SHOT)
"""Tasks that can be scored on the output of a file."""
UNTOLD = ("gmacs", "gmacs_images", "tokens_per_block", "tokens_at_end")
"""Columns of rows in fp32 that engines do not tell; nor, without what the head reads, the cosine."""


@checked_call
def compare(
    model: nn.Module | str | ModelSpec,
    methods: MethodsAndFiles,
    data: Any,
    *,
    at: BatchSizes = (1, 8),
    engine: str | Engine | Sequence[str | Engine] = "eager",
    precision: str | Sequence[str] = "fp32",
    budget: Budget | None = None,
    seed: Seed = 0,
    on_report: Callable[[Comparison], None] | None = None,
    on_progress: Tell | None = None,
) -> Comparison:
    """Measure accuracy and time of methods: `vitrim eval` and `vitrim bench` in one table.

    Accuracy is measured on all ``data``, in one pass for all methods. Time is measured on images of ``data``, dense and
    reduced models in turn; the baseline is the fastest dense model of the run, over engines, precisions and attention
    kernels. In fp32 all engines compute the same, so every method has one row, timed on its fastest engine; in lower
    precisions a method has a row per engine, scored on that engine. Methods use the parameters that a training run
    learned for them.

    Args:
        model: an unreduced module, which is not changed and runs on its device, a name as on the command line, or a
            `vitrim.PlacedModel`.
        methods: one or several, configs or text; the picture joins the settings of one method. For a model that cannot
            be reduced, such as Swin, none at all, or ``none``. Exported files among them have a row each and are scored
            and timed on their own engine.
        data: labelled images: a source, as for ``--data``, a dataset, or a `vitrim.ScoredData`.
        at: batch sizes to time.
        engine, budget, seed, on_progress: see `vitrim.bench`.
        precision: fp32, bf16, fp16, int8, or several; losses are relative to the dense model in fp32. int8 is
            calibrated on images of ``data``, which are also scored.
        on_report: called with the report so far, after the evaluation and after every batch size.

    Returns:
        One row per method, dense first, and in lower precisions one per engine: the columns of `vitrim eval`,
        ``precision``, ``engine`` (None in fp32), ``saved`` (share of the dense MACs), ``loss`` (dense in fp32 minus
        this row, as a share, of the metric named in ``facts``), ``loss_error`` (upper bound on its standard error, None
        if unknown), and ``speeds``: for every batch size the row of `vitrim bench` for its engine, in fp32 for the
        method's fastest engine. ``words`` has a sentence per method; ``figure`` is the picture.

    Raises:
        VitrimError: an invalid name, method, data source or option, or an engine that cannot run here, before anything
            is measured. Or the machine has too little memory, or cannot compute in a precision.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> from vitrim.data import ImageDataset
        >>> Image.new("RGB", (32, 32)).save(file := io.BytesIO(), "png")
        >>> data = ImageDataset([file.getvalue()] * 2, [0, 1])
        >>> from vitrim.loading import create_model
        >>> options = {"img_size": 32, "patch_size": 8, "depth": 1, "num_classes": 2}
        >>> model, once = create_model("test_vit", options=options), Budget(min_rounds=1, min_seconds=0)
        >>> report = compare(model, ["tome:r=2"], data, at=2, budget=once)
        >>> [(row["method"], row["images"], row["speeds"][0]["batch_size"]) for row in report.rows]
        [('dense', 2, 2), ('tome:r=2', 2, 2)]
    """
    spec, images, sizes, budget = PlacedModel.of(model), ScoredData.of(data), batch_sizes(at), budget or Budget()
    given, beside = parted(methods)
    place = place_of(spec)
    engines, lacking = engines_named(listed(engine), list(dict.fromkeys(listed(precision))), place)
    with drawing(place, seed), warnings.catch_warnings():
        loaded = spec.load(place)
        if not given and not beside:
            check_alone(loaded.model)
        configs = {config.describe(): config for config in fitting(loaded.model, given)}
        check_methods(loaded.model, configs, engines, sizes)
        warnings.simplefilter("ignore", ReductionWarning)  # the check has issued it
        lower = [one for one in engines if one.precision != "fp32"]
        task, dataset = open_task(loaded, images, embeddings=True)
        contest = _Contest(loaded, configs, beside, lower, task, images, dataset)
        contest.check()
        check_enough(contest.timed_on, max(sizes))
        scores = contest.scores(seed, on_progress)
        precisions = ",".join(dict.fromkeys(one.precision for one in engines))
        facts = {
            "environment": environment(device=str(place), dtype=precisions, seed=seed),
            **contest.facts(),
            "at": sizes,
            "timed_on": "random images" if contest.timed_on is None else "the data",
            "lacking": [*contest.files_note(), *lacking, *contest.of_other_batches()],
        }
        report, tell = Comparison("compare", facts), on_report or (lambda _: None)
        timed: list[list[Row]] = []
        report.fill(loaded.name, task, scores, timed)
        tell(report)
        speeds = Speeds(loaded.model, configs, contest.timed_on, engines, budget, seed, loaded.learned, beside)
        for rows in speeds.at(sizes, on_progress):
            timed.append(rows)
            report.fill(loaded.name, task, scores, timed)
            tell(report)
    return report


def on_engine(
    model: nn.Module,
    method: MethodConfig | None,
    engine: Engine,
    task: Task,
    images: Tensor,
    folder: Path,
    calibration: Tensor | None = None,
    learned: Path | None = None,
) -> Contestant:
    """A model as an engine computes it, in its precision.

    Args:
        model: the dense model; not changed.
        method: None for the dense model.
        task: one of `SCORED_ON_ENGINES`.
        images: the first batch. Most adaptive methods run on single images instead.
        folder: for files; engines with the same folder and dtype share the files of a model.
        calibration: (N, C, H, W) for int8; None for ``images``.
        learned: folder of a saved reduction, whose parameters a method of that name loads.
    """
    size = len(images) if method is None or engine.obstacle(method, len(images)) is None else 1
    copied = in_dtype(model, engine.dtype)
    if method is not None:
        take_learned(reduce_(copied, method), learned)
    place = folder / str(engine.dtype)
    place.mkdir(parents=True, exist_ok=True)
    runnable = engine.prepare(copied, images[:size], place, calibration)
    return Contestant(runnable, task, name=DENSE if method is None else method.describe())


@dataclass(frozen=True)
class _Contest:
    """The models that `compare` scores, and the images.

    Attributes:
        methods, files: by row name.
        lower: the engines in lower precisions than fp32.
        dataset: as ``images`` say.
    """

    loaded: Loaded
    methods: Mapping[str, MethodConfig]
    files: Mapping[str, Exported]
    lower: Sequence[Engine]
    task: Task
    images: ScoredData
    dataset: Any

    def check(self) -> None:
        """Refuse files, and engines, that cannot be scored beside the model."""
        task = self.task
        check_alike(self.loaded.model, list(self.files.values()))
        if (self.files or self.lower) and task.name not in SCORED_ON_ENGINES:
            what = "files are" if self.files else f"{self.lower[0].precision} is"
            raise VitrimError(f"{what} compared for {', '.join(SCORED_ON_ENGINES)}, not {task.name}")
        if self.lower and task.embeds and self.loaded.num_classes:
            raise VitrimError(
                f"in {self.lower[0].precision} engines give this classifier's logits, and not what it reads: take it "
                "without its head, e.g. num_classes=0"
            )

    @property
    def timed_on(self) -> Any:
        """The dataset of the timings; None for random images."""
        return self.dataset if self.task.reads is None else None

    @property
    def batch_size(self) -> int:
        return self.task.eval_batch(self.images.batch_size)

    def batches(self) -> Iterator[Batch]:
        """Read the images from the start."""
        given = self.images
        return read(self.dataset, self.batch_size, limit=given.limit, workers=given.workers, collate=self.task.collate)

    @property
    def calibration(self) -> Tensor | None:
        """Images (N, C, H, W) for int8, spread over those that are scored; None without int8."""
        if all(engine.precision != "int8" for engine in self.lower):
            return None
        chosen = calibrating(spread(len(self.dataset), self.images.limit)).tolist()
        few = read(Subset(self.dataset, chosen), self.batch_size, collate=self.task.collate)
        return torch.cat([batch.images for batch in few])

    @property
    def data(self) -> dict[str, Any]:
        """The facts about the images."""
        images = self.images
        return data_facts(self.dataset, images.name(self.dataset), images.limit, self.batch_size)

    def facts(self) -> dict[str, Any]:
        """The entries of the record about model, task and data."""
        loaded = self.loaded
        return {
            "weights": loaded.weights,
            "model_options": loaded.options,
            "untrained": untrained_methods(self.methods.values(), loaded.learned),
            "task": self.task.name,
            "metric": self.task.selects_by,
            "data": self.data,
        }

    def scores(self, seed: int, on_progress: Tell | None) -> list[tuple[Row, Engine | None]]:
        """Rows in fp32, without an engine, and rows of the engines in lower precisions."""
        count = self.data["images"]
        progress = None if on_progress is None else lambda seen: on_progress(f"{seen} of {count} images")
        model, learned, task = self.loaded.model, self.loaded.learned, self.task
        with (
            one_line_errors(f"batch {self.batch_size}", kept=""),
            TemporaryDirectory() as folder,
            compilation(any(engine.compiled for engine in self.lower)),
        ):
            models = [
                *contestants(model, list(self.methods.values()), task, dtype=torch.float32, learned=learned),
                *(Contestant(file, task, name=name) for name, file in self.files.items()),
            ]
            lower: list[tuple[Contestant, Engine]] = []
            if self.lower:
                images = next(self.batches()).images
                calibration = self.calibration
                lower = [
                    (on_engine(model, config, engine, task, images, Path(folder) / name, calibration, learned), engine)
                    for engine in self.lower
                    for name, config in {DENSE: None, **self.methods}.items()
                    if config is None or engine.obstacle(config, 1) is None
                ]
            every = [*models, *(one for one, _ in lower)]
            measurement = Measurement(every, [*standard_probes(task), *paired_probes(task)], task, seed=seed)
            measurement.follow(self.batches(), progress)
        rows = measurement.rows()
        untold = UNTOLD if task.embeds else (*UNTOLD, "cosine")
        return [
            *((self._with_engine(row), None) for row in rows[: len(models)]),
            *(
                (Row(row.method, {key: row[key] for key in row if key not in untold}), engine)
                for row, (_, engine) in zip(rows[len(models) :], lower, strict=True)
            ),
        ]

    def _with_engine(self, row: Row) -> Row:
        """The row; that of a file with its engine and precision."""
        own = self.files.get(row.method)
        if own is None:
            return row
        return Row(row.method, {**row, "engine": own.engine, "precision": own.precision})

    def files_note(self) -> list[str]:
        return [file_words(list(self.files.values()))] if self.files else []

    def of_other_batches(self) -> list[str]:
        """A line for every batch-dependent method that engines run one image at a time."""
        size = self.batch_size
        return [
            f"{name} counts on the whole batch: MACs saved are those of batches of {size}, and engines are scored "
            "on single images, of which it may merge more; with --batch-size 1 (batch_size=1) both are of those"
            for name, config in self.methods.items()
            if config.traits.batch_dependent and any(one.obstacle(config, size) is not None for one in self.lower)
        ]
