"""`compare`: accuracy and measured time of several methods, in one table and one picture."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction, reduce_
from vitrim.core.registry import ask, fitting
from vitrim.errors import ReductionWarning, VitrimError, check_read, one_line_errors
from vitrim.exporting.program import Program
from vitrim.loading import MADE, ModelSpec
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.copies import reduced_copy, shared_copy, take_learned
from vitrim.measure.earlier import earlier
from vitrim.measure.evaluation import paired_probes, standard_probes
from vitrim.measure.evaluation_report import NONE_CHANGED, change_cell, spelled, unseen, weight_and_class_notes
from vitrim.measure.in_files import MethodsAndFiles, OnFile, check_alike, file_words, in_batches, parted
from vitrim.measure.inputs import EMBEDDING, SCORED, ZERO_SHOT, DataSpec, untrained_methods
from vitrim.measure.latency import Budget
from vitrim.measure.machine import drawing, environment
from vitrim.measure.probes import MacsProbe, Tokens
from vitrim.measure.records import DENSE, Batch, Row, read
from vitrim.measure.run import Measurement
from vitrim.measure.task_data import data_facts, open_task
from vitrim.plots import style
from vitrim.report import Report, Table
from vitrim.speed.bench import (
    CALIBRATED,
    WHOLE,
    Speeds,
    Tell,
    batch_sizes,
    check_engines,
    check_enough,
    in_dtype,
    place_of,
)
from vitrim.speed.engines import Engine, Run, compilation, engines_named, listed
from vitrim.speed.words import bounds, doubt, engine_of, shows_only_cost, unrest
from vitrim.tasks import Task

SCORED_ON_ENGINES = ("classification", "multilabel", EMBEDDING, ZERO_SHOT)
"""Tasks that can be scored on the output of a file."""
LETTER = 0.085
"""Approximate width in inches of a letter in a legend."""
PALE = "#999999"
"""Colour of methods that only show vitrim's own overhead."""


@dataclass
class Comparison(Report):
    """The findings of `compare`: a row per method, dense first, and a summary in words.

    Attributes:
        words: a sentence per method, and a line per batch size with the methods that lose least for their time.
    """

    words: list[str] = field(default_factory=list)

    @property
    def figure(self) -> Any:
        """A matplotlib figure of loss over time, with a panel per batch size."""
        return draw(self.rows, self.facts["metric"], self.tables[0].title)

    @property
    def record(self) -> dict[str, Any]:
        return {"command": self.command, **self.facts, "words": self.words, "rows": [dict(row) for row in self.rows]}

    def parts(self) -> Iterator[Any]:
        yield from super().parts()
        yield from self.words

    def _repr_html_(self) -> str:
        return super()._repr_html_() + "".join(f"<p>{escape(line)}</p>" for line in self.words)


@earlier(model=ModelSpec, data=DataSpec, budget=Budget)
def compare(
    model: nn.Module | str | ModelSpec,
    methods: MethodsAndFiles,
    data: Any,
    *,
    at: int | Sequence[int] = (1, 8),
    engine: str | Engine | Sequence[str | Engine] = "eager",
    precision: str | Sequence[str] = "fp32",
    budget: Budget | None = None,
    seed: int = 0,
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
            `vitrim.ModelSpec`.
        methods: one or several, configs or text; the picture joins the settings of one method. For a model that cannot
            be reduced, such as Swin, only ``none``. Exported files among them have a row each and are scored and timed
            on their own engine.
        data: labelled images: a source, as for ``--data``, a dataset, or a `vitrim.DataSpec`.
        at: batch sizes to time.
        engine: one or several, names or objects of `vitrim.speed.engines`.
        precision: fp32, bf16, fp16, int8, or several; losses are relative to the dense model in fp32. int8 is
            calibrated on images of ``data``, which are also scored.
        budget: rounds and seconds for timing; default: 10 rounds and one second per model.
        seed: seed of random weights, parameters and methods.
        on_report: called with the report so far, after the evaluation and after every batch size.
        on_progress: called often with a short text on the current step.

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
    spec, images, sizes, budget = ModelSpec.of(model), DataSpec.of(data), batch_sizes(at), budget or Budget()
    check_read(spec, (*MADE, "device"))
    check_read(images, SCORED)
    given, beside = parted(methods)
    if not given and not beside:
        raise VitrimError("there is nothing to compare with dense: name at least one method")
    place = place_of(spec)
    engines, lacking = engines_named(listed(engine), list(dict.fromkeys(listed(precision))), place)
    lower = [one for one in engines if one.precision != "fp32"]
    with drawing(place, seed), warnings.catch_warnings():
        loaded = spec.load(place)
        configs = {config.describe(): config for config in fitting(loaded.model, given)}
        for size in sizes:
            check_engines(engines, configs, loaded.model, size)
        for config in configs.values():
            reduced_copy(loaded.model, config)
        warnings.simplefilter("ignore", ReductionWarning)  # the copies above have issued it
        goal, dataset = open_task(loaded, images, embeddings=True)
        check_alike(loaded.model, list(beside.values()))
        if (beside or lower) and goal.name not in SCORED_ON_ENGINES:
            what = "files are" if beside else f"{lower[0].precision} is"
            raise VitrimError(f"{what} compared for {', '.join(SCORED_ON_ENGINES)}, not {goal.name}")
        if lower and goal.embeds and ask(loaded.model).num_classes(loaded.model):
            raise VitrimError(
                f"in {lower[0].precision} engines give this classifier's logits, and not what it reads: take it "
                "without its head, e.g. num_classes=0"
            )
        timed_on = dataset if goal.reads is None else None
        if timed_on is not None:
            check_enough(timed_on, max(sizes))
        batch_size = goal.eval_batch(images.batch_size)
        about_data = data_facts(dataset, images.name(dataset), images.limit, batch_size)
        batches = partial(read, dataset, batch_size, limit=images.limit, workers=images.workers, collate=goal.collate)
        progress = None if on_progress is None else lambda seen: on_progress(f"{seen} of {about_data['images']} images")
        with one_line_errors(f"batch {batch_size}", kept=""):
            models = [
                *contestants(loaded.model, list(configs.values()), goal, dtype=torch.float32, learned=loaded.learned),
                *(OnFile(file, goal) for file in beside.values()),
            ]
            measurement = Measurement(models, [*standard_probes(goal), *paired_probes(goal)], goal, seed=seed)
            measurement.follow(batches(), progress)
            found = [
                Row(row.method, {**row, "engine": own.file.engine, "precision": own.file.precision})
                if (own := beside.get(row.method)) is not None
                else row
                for row in measurement.rows()
            ]
            scores: list[tuple[Row, Engine | None]] = [(row, None) for row in found]
            if lower:
                scores += score_on_engines(
                    loaded.model, configs, lower, batches, goal, learned=loaded.learned, seed=seed, on_progress=progress
                )
        facts = {
            "environment": environment(
                device=str(place), dtype=",".join(dict.fromkeys(one.precision for one in engines)), seed=seed
            ),
            "weights": loaded.weights,
            "model_options": loaded.options,
            "untrained": untrained_methods(configs.values(), loaded.learned),
            "task": goal.name,
            "metric": goal.selects_by,
            "data": about_data,
            "at": sizes,
            "timed_on": "random images" if timed_on is None else "the data",
            "lacking": [
                *([file_words(list(beside.values()))] if beside else []),
                *lacking,
                *_of_other_batches(configs, lower, batch_size),
            ],
        }
        report = Comparison("compare", facts)
        timed: list[list[Row]] = []
        tell = on_report or (lambda _: None)
        _fill(report, loaded.name, goal, scores, timed)
        tell(report)
        speeds = Speeds(loaded.model, configs, timed_on, engines, budget, seed, loaded.learned, beside)
        for rows in speeds.at(sizes, on_progress):
            timed.append(rows)
            _fill(report, loaded.name, goal, scores, timed)
            tell(report)
    return report


def _of_other_batches(methods: Mapping[str, MethodConfig], engines: Sequence[Engine], batch_size: int) -> list[str]:
    """A line for every batch-dependent method that engines run one image at a time."""
    return [
        f"{name} counts on the whole batch: MACs saved are those of batches of {batch_size}, and engines are scored "
        "on single images, of which it may merge more; with --batch-size 1 (batch_size=1) both are of those"
        for name, config in methods.items()
        if config.batch_dependent and any(one.obstacle(config, batch_size) is not None for one in engines)
    ]


class OnEngine(Contestant):
    """A contestant whose predictions an engine computes.

    Args:
        model: dense or reduced, in the dtype of the engine.
        run: runs batches of ``size``; larger batches are split, and the last one is padded.
        size: B.
    """

    def __init__(
        self, model: nn.Module, task: Task, reduction: Reduction | None, engine: Engine, run: Run, size: int
    ) -> None:
        shadow, program = shared_copy(model), Program(model)

        def batch(images: Tensor) -> Tensor:
            return program.tensor(run(images.to(engine.dtype))).float()

        shadow.forward = lambda images: in_batches(batch, images, size)
        super().__init__(shadow, task, reduction)


def score_on_engines(
    model: nn.Module,
    methods: Mapping[str, MethodConfig],
    engines: Sequence[Engine],
    batches: Callable[[], Iterable[Batch]],
    task: Task,
    *,
    learned: Path | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[tuple[Row, Engine]]:
    """Score models on their engines: the task's metrics, and agreement with the dense model in fp32.

    Args:
        model: the dense model; not changed.
        methods: configs by name; those that an engine cannot run are left out.
        engines: each in its precision. int8 is calibrated on the first 64 images.
        batches: makes an iterator over the batches; called twice for int8.
        task: one of `SCORED_ON_ENGINES`.
        learned: folder of a saved reduction, whose parameters the methods of that name load.

    Returns:
        A row per model and engine, engine by engine, the dense model first.
    """
    first = next(iter(batches())).images
    size, calibration = len(first), None
    if any(engine.precision == "int8" for engine in engines):
        few = islice(batches(), -(-CALIBRATED // size))
        calibration = torch.cat([batch.images for batch in few])[:CALIBRATED]
    exact = Contestant(in_dtype(model, torch.float32), task)
    device = next(exact.forward.parameters()).device
    found: list[tuple[OnEngine, Engine]] = []
    with TemporaryDirectory() as folder, compilation(any(engine.compiled for engine in engines)):
        for engine in engines:
            for number, config in enumerate((None, *methods.values())):
                # engines run most adaptive methods one image at a time, whatever the size of the batches read
                at = size if config is None or engine.obstacle(config, size) is None else 1
                if config is not None and engine.obstacle(config, at) is not None:
                    continue
                copied = in_dtype(model, engine.dtype)
                reduction = None if config is None else reduce_(copied, config)
                if reduction is not None:
                    take_learned(reduction, learned)
                place = Path(folder) / f"{number}-{engine.dtype}"
                place.mkdir(exist_ok=True)
                given = first[:at].to(device, engine.dtype)
                run = engine.prepare(copied, given, place, calibration)
                found.append((OnEngine(copied, task, reduction, engine, run, at), engine))
        models = [exact, *(one for one, _ in found)]
        probes = [one for one in standard_probes(task) if not isinstance(one, MacsProbe | Tokens)]  # in the fp32 rows
        measurement = Measurement(models, [*probes, *paired_probes(task)], task, seed=seed)
        measurement.follow(batches(), on_progress)
        left_out = () if task.embeds else ("cosine",)  # needs the head's input, which engines do not return
    return [
        (Row(row.method, {key: row[key] for key in row if key not in left_out}), engine)
        for row, (_, engine) in zip(measurement.rows()[1:], found, strict=True)
    ]


# ---- rows and words --------------------------------------------------------------------------------------------------


def _fill(
    report: Comparison,
    model: str,
    task: Task,
    scores: Sequence[tuple[Row, Engine | None]],
    timed: Sequence[Sequence[Row]],
) -> None:
    """Fill in the report's rows, tables, notes and words from the measurements so far.

    ``scores`` are fp32 rows, without an engine, and rows of engines in lower precisions; ``timed`` are rows of `Speeds`
    for every batch size.
    """
    exact, main = {row.method: row for row, engine in scores if engine is None}, task.selects_by
    dense = exact[DENSE]
    report.rows = []
    for row, engine in scores:
        label, precision = (None, "fp32") if engine is None else (engine.label, engine.precision)
        # columns that do not depend on the precision come from fp32
        whole = {"precision": precision, "engine": label, **exact[row.method], **row}
        speeds = []
        for setting in timed:
            own = [
                one
                for one in setting
                if one.method == row.method and one["precision"] == whole["precision"]
                if label in (None, one["engine"]) and one.get("part", WHOLE) == WHOLE
            ]
            if own:
                speeds.append(dict(max(own, key=lambda one: one["speedup"])))
        if timed and not speeds:
            continue  # fp32 is the reference of the loss only, and was not timed
        report.rows.append(
            {
                "model": model,
                **whole,
                "saved": 1 - sum(whole["gmacs"].values()) / sum(dense["gmacs"].values()),
                "loss": dense[main] - whole[main],
                "loss_error": whole.get("loss_error"),
                "speeds": speeds,
            }
        )
    report.tables = [_table(report, main)]
    report.notes = list(_notes(report.facts, report.rows, task))
    report.words = list(in_words(report.rows, main))


def named(row: Mapping[str, Any]) -> str:
    """The method of a row; below fp32 with engine and precision.

    Example:
        >>> named({"method": "tome:r=8", "precision": "int8", "engine": "openvino"})
        'tome:r=8 on openvino int8'
    """
    return row["method"] if row["precision"] == "fp32" else f"{row['method']} on {row['engine']} {row['precision']}"


def _table(report: Comparison, metric: str) -> Table:
    data, sizes = report.facts["data"], [speed["batch_size"] for speed in report.rows[0]["speeds"]]
    title = f"{report.rows[0]['model']} on {data['source']}: {data['images']} images"
    timed = (column for size in sizes for column in (f"ms at {size}", f"speed-up at {size}"))
    several = len({speed["engine"] for row in report.rows for speed in row["speeds"]}) > 1  # name the fastest in fp32
    columns = ("method", spelled(metric), "change", "agree", "MACs saved", *timed)
    cells = [
        (
            named(row),
            f"{100 * row[metric]:.2f}",
            change_cell(0.0 - row["loss"], None if row is report.rows[0] else row["loss_error"], row["images"]),
            f"{100 * row['agreement']:.1f}",
            f"{100 * row['saved']:.1f}",
            *(
                cell
                for speed in row["speeds"]
                for cell in (
                    f"{speed['latency_ms']['p50'] / speed['batch_size']:.2f}",
                    _speed_cell(speed, several and row["engine"] is None),
                )
            ),
        )
        for row in report.rows
    ]
    return Table("compare", title, columns, cells)


def _speed_cell(speed: Mapping[str, Any], several: bool) -> str:
    median, q1, q3 = (f"{speed[key]:.2f}" for key in ("speedup", "speedup_q1", "speedup_q3"))
    quartiles = "" if q1 == q3 else f" ({q1}-{q3})"
    return f"{median}{quartiles}" + (f" {speed['engine']}" if several else "")


def _notes(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], task: Task) -> Iterator[str]:
    yield (
        f"{spelled(task.selects_by)}, agree ({task.agreement_means}) and MACs saved in %; change in points"
        f"{'' if rows[0]['loss_error'] is None else f' ± its standard error{NONE_CHANGED}'}; ms per "
        "image, the median; speed-up over the fastest dense model at the same batch size, with its quartiles"
    )
    speeds = rows[0]["speeds"]
    if speeds:
        kernels = ", ".join(
            f"{one['dense_kernel']} attention on {one['dense_engine']} in {one['dense_precision']} at batch "
            f"{one['batch_size']}"
            for one in speeds
        )
        yield f"dense is {kernels}, timed on {facts['timed_on']}; threads: {facts['environment']['threads']}"
    yield from facts["lacking"]
    yield from weight_and_class_notes(facts, task, "agree still says")


def in_words(rows: Sequence[Mapping[str, Any]], metric: str) -> Iterator[str]:
    """Yield a sentence per method, and a line per batch size.

    A method is dominated if another method, or the dense model, is at least as fast and loses no more, and is clearly
    better in time or loss: its quartiles do not overlap, or the losses differ by more than their combined standard
    error.

    Example:
        >>> def row(method, loss, median):
        ...     speed = {"speedup": median, "speedup_q1": median - 0.02, "speedup_q3": median + 0.02}
        ...     own = {"method": method, "precision": "fp32", "engine": None, "loss": loss, "loss_error": 0.001}
        ...     return {**own, "images": 99, "speeds": [{"batch_size": 8, **speed}]}
        >>> found = [row("dense", 0.0, 1.0), row("tome:r=8", 0.003, 1.21), row("evit", 0.009, 1.15)]
        >>> print("\\n".join(in_words(found, "top1")))
        tome:r=8 loses 0.30 points of top-1 (standard error 0.10): at batch 8 1.21x as fast as dense, and nothing here \
is clearly better
        evit loses 0.90 points of top-1 (standard error 0.10): at batch 8 1.15x as fast as dense, dominated by \
tome:r=8 (1.21x, loses 0.30)
        least loss for the time at batch 8: tome:r=8 (1.21x, loses 0.30)
    """
    own = [row for row in rows if not shows_only_cost(row["method"])]
    sizes = [speed["batch_size"] for speed in rows[0]["speeds"]]
    if not sizes:
        return
    best: dict[int, list[Mapping[str, Any]]] = {size: [] for size in sizes}
    every = [row for row in own if row["method"] == DENSE]
    for row in own if len(every) > 1 else own[1:]:
        texts = []
        for place, size in enumerate(sizes):
            speed, better = row["speeds"][place], [other for other in own if dominates(other, row, place)]
            text = f"at batch {size} {speed['speedup']:.2f}x as fast as dense"
            if row in every:
                texts.append(f"at batch {size} {speed['speedup']:.2f}x the speed of the fastest dense")
                best[size] += [] if better else [row]
            elif any(dense in better for dense in every):
                texts.append(f"at batch {size} it does not pay: {speed['speedup']:.2f}x the speed of dense")
            elif better:
                winner = min(better, key=lambda other: (other["loss"], -other["speeds"][place]["speedup"]))
                texts.append(f"{text}, dominated by {named(winner)} ({_in_short(winner, place)})")
            elif bounds(speed)[0] <= 1.0 and len(every) == 1:
                texts.append(f"{text}, no clear gain: {doubt(speed)}")
            else:
                best[size].append(row)
                texts.append(f"{text}, and nothing here is clearly better")
        error = "" if row["loss_error"] is None else f" (standard error {100 * row['loss_error']:.2f})"
        if (most := unseen(row["loss"], row["loss_error"], row["images"])) is not None:
            error = f" (none of {row['images']} images changed: below {most:.2f}, at 95 %)"
        yield f"{named(row)} {_change(row)} points of {spelled(metric)}{error}: {'; '.join(texts)}"
    for place, size in enumerate(sizes):
        timed = [{"method": row["method"], **row["speeds"][place]} for row in own]
        yield from (f"at batch {size} {line}" for line in unrest(timed))
        order = sorted((row for row in best[size] if row not in every), key=lambda row: row["loss"])
        texts = [f"{named(row)} ({_in_short(row, place)})" for row in order]
        yield f"least loss for the time at batch {size}: {', '.join(texts) or 'dense; no method here pays'}"


def dominates(other: Mapping[str, Any], row: Mapping[str, Any], place: int) -> bool:
    """True if ``other`` is at least as good in time and loss at one batch size, and clearly better in one."""
    if other is row:
        return False
    speed, own = other["speeds"][place], row["speeds"][place]
    if speed["speedup"] < own["speedup"] or other["loss"] > row["loss"]:
        return False
    noise = math.hypot(other["loss_error"] or 0.0, row["loss_error"] or 0.0)
    return bool(speed["speedup_q1"] > own["speedup_q3"] or row["loss"] - other["loss"] > noise)


def _change(row: Mapping[str, Any]) -> str:
    points = f"{100 * abs(row['loss']):.2f}"
    return f"{'gains' if row['loss'] < 0 and float(points) else 'loses'} {points}"


def _in_short(row: Mapping[str, Any], place: int) -> str:
    return f"{row['speeds'][place]['speedup']:.2f}x, {_change(row)}"


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Mapping[str, Any]], metric: str, title: str = "") -> Any:
    """A figure of loss in points over milliseconds per image, a panel per batch size: down and to the left is better.

    Dense models are stars; a line marks the time of the fastest. Lines join the settings of one method. Error bars are
    quartiles of the speed-up, and standard errors of the loss.
    """
    names = [named(row) for row in rows]
    stars = [named(row) for row in rows if row["method"] == DENSE]
    shades = {**style.colours(names), **{name: PALE for name in names if shows_only_cost(name)}}
    shapes = style.markers([name for name in names if name not in stars])
    sizes = [speed["batch_size"] for speed in rows[0]["speeds"]]
    # names are not shortened; two columns if they fit
    columns, longest = min(len(sizes), 2), max(map(len, names))
    across = 2 if 2 * longest * LETTER + 1 <= 4.4 * columns else 1
    width = max(4.4, (longest * LETTER + 0.6) / columns)
    lines = textwrap.wrap(title, int(0.85 * width * columns / LETTER))
    above = 0.3 + 0.25 * len(lines) + 0.2 * -(-len(rows) // across)
    figure, axes = style.panels(len(sizes), across=2, size=(width, 3.6), above=above)
    for place, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        every = [row for row in rows if row["method"] == DENSE]
        dense = min(row["speeds"][place]["latency_ms"]["p50"] for row in every) / size
        axis.axhline(0.0, color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
        axis.axvline(dense, color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
        points: dict[tuple[str, str | None, str], list[tuple[float, float]]] = {}
        for row in rows:
            name, speed, loss = named(row), row["speeds"][place], 100 * row["loss"]
            time = speed["latency_ms"]["p50"] / size
            if row in every:
                axis.plot(
                    [time], [loss], marker="*", markersize=13, color=style.DENSE_COLOUR, linestyle="none", zorder=4
                )
                if len(every) > 1:
                    axis.annotate(
                        engine_of(speed), (time, loss), xytext=(4, 6), textcoords="offset points", fontsize=style.SMALL
                    )
                continue
            points.setdefault((style.method_of(name), row["engine"], row["precision"]), []).append((time, loss))
            # quartiles of the paired ratio, as time offsets from the median
            low, high = (time * (speed["speedup"] / speed[key] - 1) for key in ("speedup_q3", "speedup_q1"))
            axis.errorbar(
                [time], [loss], xerr=[[-low], [high]],
                yerr=None if row["loss_error"] is None else [100 * row["loss_error"]],
                color=shades[name], marker=shapes[name], markersize=6, linestyle="none", elinewidth=0.8, zorder=3,
            )  # fmt: skip
        for (method, *_), own in points.items():
            if len(own) > 1:
                axis.plot(*zip(*sorted(own), strict=True), color=style.colours([method])[method], linewidth=1.2)
        axis.set_title(f"batch {size}", fontsize=style.TITLE)
        axis.set_xlabel("ms per image", fontsize=style.TEXT)
        axis.set_ylabel(f"loss of {spelled(metric)}, points", fontsize=style.TEXT)
        axis.grid(alpha=0.3)
    figure.suptitle("\n".join(lines), fontsize=style.TITLE)
    style.stars_and_dots(figure, shades, shapes, across=across)
    return figure
