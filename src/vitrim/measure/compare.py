"""`compare`: accuracy and measured time of several methods, in one table and one picture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from vitrim.checked import Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_, refuse_reduced
from vitrim.core.registry import fitting, host_of
from vitrim.data import spread
from vitrim.data.dataset import calibrating
from vitrim.engines.copies import take_learned
from vitrim.engines.engine import Engine, compilation, engines_named, listed
from vitrim.engines.exported import Exported
from vitrim.engines.machine import environment, seeded_draws
from vitrim.engines.static import can_freeze, frozen, levelled
from vitrim.errors import ReductionWarning, VitrimError, one_line_errors
from vitrim.loading import Loaded, ModelSpec, PlacedModel
from vitrim.measure.bench import (
    BatchSizes,
    Speeds,
    batch_sizes,
    check_alone,
    check_enough,
    check_methods,
)
from vitrim.measure.comparison import Comparison
from vitrim.measure.contestants import Contestant
from vitrim.measure.evaluation import Opened, follow, open_models, paired_probes, standard_probes
from vitrim.measure.in_files import MethodsAndFiles, check_alike, parted, place_of
from vitrim.measure.inputs import EMBEDDING, ZERO_SHOT, ScoredData
from vitrim.measure.latency import Budget
from vitrim.measure.records import Batch, Row, read
from vitrim.measure.run import Measurement
from vitrim.measure.task_data import data_facts, open_task
from vitrim.measure.timing import Tell, in_dtype
from vitrim.report import DENSE, at_px
from vitrim.tasks import Task

SCORED_ON_ENGINES = ("classification", "multilabel", EMBEDDING, ZERO_SHOT)
"""Tasks that can be scored on the output of a file."""
FROZEN_ON = 64
"""Images of the data to find the schedules of adaptive methods on."""
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
    kernels. For batches above 1, a method whose counts depend on the images has a second row: its schedule, the mean
    counts on 64 images of ``data``, rounded up to multiples of 16 tokens (`vitrim.freeze`). It stands for a method that
    no engine runs at one of the batch sizes. In fp32 all engines compute the same, so every method has one row, timed
    on its fastest engine; in lower precisions a method has a row per engine, scored on that engine. Methods use the
    parameters that a training run learned for them.

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
    with seeded_draws(place, seed), warnings.catch_warnings():
        loaded, others = spec.load_sizes(place)
        if not given and not beside:
            check_alone(loaded.model)
        configs = {config.describe(): config for config in fitting(loaded.model, given)}
        refuse_reduced(loaded.model)
        freezes = {name: one for name, one in configs.items() if max(sizes) > 1 and can_freeze(one)}
        always = {name: one for name, one in configs.items() if name not in freezes}
        for one in (loaded, *others):
            check_methods(one.model, always, engines, sizes)
            check_methods(one.model, freezes, engines, ())
        warnings.simplefilter("ignore", ReductionWarning)  # the check has issued it
        lower = [one for one in engines if one.precision != "fp32"]
        task, dataset = open_task(loaded, images, embeddings=True, others=others)
        _check_scored(loaded, task, beside, lower, others)
        timed_on, facts = None if task.reads is not None else dataset, data_facts(images, task, dataset)
        check_enough(timed_on, max(sizes))
        schedules = _schedules(loaded, task, dataset, freezes, place)
        for name in freezes:
            if any(all(on.obstacle(configs[name], size) for on in engines) for size in sizes):
                del configs[name]
        configs |= {found.describe(): found for found in schedules.values()}
        opened = open_models(
            [loaded, *others], task, dataset, facts, list(configs.values()), list(beside.values()), device=place,
            dtype=torch.float32,
        )  # fmt: skip
        scores = _scores(opened, configs, lower, images, seed, on_progress, others)
        precisions = ",".join(dict.fromkeys(one.precision for one in engines))
        facts = {
            "environment": environment(device=str(place), dtype=precisions, seed=seed),
            **opened.facts,
            "metric": task.selects_by,
            "at": sizes,
            "timed_on": "random images" if timed_on is None else "the data",
            "frozen": {name: found.describe() for name, found in schedules.items()},
            "lacking": [*lacking, *_of_other_batches(configs, lower, opened.data["batch_size"])],
        }
        report, tell = Comparison("compare", facts), on_report or (lambda _: None)
        timed: list[list[Row]] = []
        report.fill(loaded.name, task, scores, timed)
        tell(report)
        speeds = Speeds(loaded.model, configs, timed_on, engines, budget, seed, loaded.learned, beside, others=others)
        for rows in speeds.at(sizes, on_progress):
            timed.append(rows)
            report.fill(loaded.name, task, scores, timed)
            tell(report)
    return report


def _schedules(
    loaded: Loaded, task: Task, dataset: Any, methods: Mapping[str, MethodConfig], place: torch.device
) -> dict[str, MethodConfig]:
    """The levelled schedules of adaptive methods, by the methods' names."""
    found = {}
    for name, config in methods.items():
        some = Subset(dataset, spread(len(dataset), FROZEN_ON).tolist())
        images = (batch.images.to(place) for batch in read(some, 1, collate=task.collate))
        fixed = frozen(loaded.model, config, images, learned=loaded.learned)
        rows, columns = host_of(loaded.model).facts(loaded.model).grid_size
        found[name] = levelled(fixed, rows * columns)
    return found


def on_engine(
    model: nn.Module,
    method: MethodConfig | None,
    engine: Engine,
    task: Task,
    images: Tensor,
    folder: Path,
    calibration: Tensor | None = None,
    learned: Path | None = None,
    img_size: int | None = None,
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
        img_size: of ``model``, if it is another than that of the images of a batch.
    """
    size = len(images) if method is None or engine.obstacle(method, len(images)) is None else 1
    copied = in_dtype(model, engine.dtype)
    if method is not None:
        take_learned(reduce_(copied, method), learned)
    place = folder / str(engine.dtype)
    place.mkdir(parents=True, exist_ok=True)
    runnable = engine.prepare(copied, images[:size], place, calibration)
    name = at_px(DENSE if method is None else method.describe(), img_size)
    return Contestant(runnable, task, name=name, img_size=img_size)


def _check_scored(
    loaded: Loaded, task: Task, files: Mapping[str, Exported], lower: Sequence[Engine], others: Sequence[Loaded]
) -> None:
    """Refuse files, and engines in lower precisions, that cannot be scored beside the model."""
    check_alike(loaded, list(files.values()), others)
    if (files or lower) and task.name not in SCORED_ON_ENGINES:
        what = "files are" if files else f"{lower[0].precision} is"
        raise VitrimError(f"{what} compared for {', '.join(SCORED_ON_ENGINES)}, not {task.name}")
    if lower and task.embeds and loaded.num_classes:
        raise VitrimError(
            f"in {lower[0].precision} engines give this classifier's logits, and not what it reads: take it without "
            "its head, e.g. num_classes=0"
        )


def _scores(
    opened: Opened,
    methods: Mapping[str, MethodConfig],
    lower: Sequence[Engine],
    images: ScoredData,
    seed: int,
    on_progress: Tell | None,
    others: Sequence[Loaded],
) -> list[tuple[Row, Engine | None]]:
    """Rows in fp32, without an engine, and rows of the engines in lower precisions."""
    loaded, task, size = opened.loaded, opened.task, opened.data["batch_size"]
    named: list[tuple[str, MethodConfig | None]] = [(DENSE, None), *methods.items()]
    progress = None if on_progress is None else lambda seen, count: on_progress(f"{seen} of {count} images")
    with (
        one_line_errors(f"batch {size}", kept=""),
        TemporaryDirectory() as folder,
        compilation(any(engine.compiled for engine in lower)),
    ):
        every = [(at_px(name, one.img_size), config, one) for one in (loaded, *others) for name, config in named]
        on = [(engine, *each) for engine in lower for each in every]
        on = [each for each in on if each[2] is None or each[0].obstacle(each[2], 1) is None]
        batches = read(opened.dataset, size, limit=images.limit, collate=task.collate)
        first = next(batches) if on else None
        calibration = _calibration(opened, lower, images)
        ready = [
            on_engine(
                one.model, config, engine, task, first.at(one.img_size), Path(folder) / name,
                None if calibration is None else torch.cat([few.at(one.img_size) for few in calibration]),
                loaded.learned, one.img_size,
            )
            for engine, name, config, one in on
            if first is not None
        ]  # fmt: skip
        probes = [*standard_probes(task), *paired_probes(task)]
        measurement = Measurement([*opened.models, *ready], probes, task, seed=seed)
        follow(measurement, opened, images, progress)
    findings = measurement.findings()
    files = {str(file.path): {"engine": file.engine, "precision": file.precision} for file in opened.files}
    untold = UNTOLD if task.embeds else (*UNTOLD, "cosine")
    return [
        *((Row(row.method, {**row, **files.get(row.method, {})}), None) for row in opened.rows(measurement, findings)),
        *(
            (Row(row.method, {key: row[key] for key in row if key not in untold}), engine)
            for row, (engine, *_) in zip(findings.rows[len(opened.models) :], on, strict=True)
        ),
    ]


def _calibration(opened: Opened, lower: Sequence[Engine], images: ScoredData) -> list[Batch] | None:
    """Images for int8, spread over those that are scored; None without int8."""
    if all(engine.precision != "int8" for engine in lower):
        return None
    chosen = calibrating(spread(len(opened.dataset), images.limit)).tolist()
    return list(read(Subset(opened.dataset, chosen), opened.data["batch_size"], collate=opened.task.collate))


def _of_other_batches(methods: Mapping[str, MethodConfig], lower: Sequence[Engine], size: int) -> list[str]:
    """A line for every batch-dependent method that engines run one image at a time."""
    return [
        f"{name} counts on the whole batch: MACs saved are those of batches of {size}, and engines are scored "
        "on single images, of which it may merge more; with --batch-size 1 (batch_size=1) both are of those"
        for name, config in methods.items()
        if config.traits.batch_dependent and any(one.obstacle(config, size) is not None for one in lower)
    ]
