"""``vitrim eval``: accuracy of reduced models next to the dense one, on a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.setup import Data, Machine, Model, Record
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from vitrim.core.config import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.measure.evaluation import Evaluation, Row

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

Dtype = Annotated[str, typer.Option("--dtype", help="of parameters and images: fp32 or bf16")]


def evaluate(
    *,
    model: Model,
    data: Data,
    methods: common.MethodsBesideDense = None,
    batch_size: common.BatchSize = 32,
    dtype: Dtype = "fp32",
    workers: common.Workers = 0,
    machine: Machine,
    record: Record,
) -> None:
    """Evaluate reduced models next to the dense one: accuracy, agreement, cosine, MACs, tokens.

    All methods see the same batches, in one pass over the data. If it stops half-way, what was gathered is kept.
    """
    configs = common.parse_methods(methods or ())
    common.check_choice("dtype", dtype, DTYPES)
    import torch

    from vitrim.data import batches, eval_transform
    from vitrim.measure.evaluation import Evaluation

    device = machine.select()
    dense, learned = model.load(), model.learned
    precision = getattr(torch, DTYPES[dtype])
    evaluation = Evaluation(dense, configs, device=device, dtype=precision, seed=machine.seed, learned=learned)
    dataset = data.open()
    _check_labels(dataset, model.name, evaluation.num_classes)
    dataset.transform = eval_transform(dense)
    found: dict[str, Any] = {
        "environment": machine.environment(DTYPES[dtype]),
        "weights": model.weights,
        "model_options": model.options,
        "untrained": _untrained(configs, learned),
        "data": _facts(dataset, data, batch_size),
    }
    loader = batches(dataset, batch_size, limit=data.limit, workers=workers)
    with _reported(evaluation, model.name, f"batch {batch_size}, {dtype}", found, record):
        _run(evaluation, loader, found["data"]["images"])


def _facts(dataset: ImageDataset, data: Data, batch_size: int) -> dict[str, Any]:
    """Describe the data of the evaluation, for the record."""
    return {
        "source": data.source,
        "split": dataset.split,
        "images": len(dataset) if data.limit is None else min(data.limit, len(dataset)),
        "classes": None if dataset.class_names is None else len(dataset.class_names),
        "batch_size": batch_size,
    }


@contextmanager
def _reported(
    evaluation: Evaluation, model: str, setting: str, found: dict[str, Any], record: Record
) -> Iterator[None]:
    """Report the results gathered so far, whatever stops the run, Ctrl-C too: hours of work are not thrown away.

    Raises:
        VitrimError: what stopped it, in one line.
    """
    from vitrim.measure.bench import one_line_errors

    problem: str | None = "stopped before the end"
    try:
        with one_line_errors(setting, kept="; what was gathered is kept"):
            yield
        problem = None
    except VitrimError as error:
        problem = str(error)
        raise
    finally:
        if evaluation.images:
            ended: dict[str, Any] = {"complete": True} if problem is None else {"complete": False, "error": problem}
            _report(model, evaluation, found | ended, record)


def _untrained(configs: list[MethodConfig], learned: Path | None) -> list[str]:
    """The methods that have parameters to learn and were given none."""
    from vitrim.core.reduce import saved_method

    known = None if learned is None else saved_method(learned)
    return [config.describe() for config in configs if not config.training_free and config.name != known]


def _check_labels(dataset: ImageDataset, model: str, num_classes: int) -> None:
    """Check before any image is read that every label is a class of the model."""
    largest = int(dataset.labels.max())
    if largest >= num_classes:
        option = "" if ":" in model else f", e.g. --model-option num_classes={dataset.num_classes} with its checkpoint"
        raise VitrimError(
            f"label {largest} of {dataset.source} is beyond the model's {num_classes} classes, 0 to {num_classes - 1}; "
            f"use a model of these classes{option}"
        )


def _run(evaluation: Evaluation, loader: Any, planned: int) -> None:
    """Run every batch, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("images", total=planned)
        for images, labels in loader:
            evaluation.update(images, labels)
            progress.update(task, completed=evaluation.images)


def _report(model: str, evaluation: Evaluation, found: dict[str, Any], record: Record) -> None:
    """Print the table and write the record of the results gathered."""
    rows = evaluation.rows()
    out = record.console()
    _print(out, model, found["data"], rows)
    for note in _notes(found, evaluation.num_classes):
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    record.write("eval", **found, rows=[{"model": model, **row.record()} for row in rows])


def _print(out: Console, model: str, data: dict[str, Any], rows: list[Row]) -> None:
    dense = rows[0]
    seen = f"{dense.images} of {data['images']}" if dense.images < data["images"] else f"{dense.images}"
    title = f"{model} on {data['source']}: {seen} images in batches of {data['batch_size']}"
    out.print(title, markup=False, highlight=False, soft_wrap=True)
    columns = ["method", "top-1", f"top-{dense.k}", "change", "agree", "cosine", "GMACs", "saved", "tokens"]
    common.print_table(out, "", columns, [_cells(row, dense) for row in rows])


def _cells(row: Row, dense: Row) -> list[str]:
    from rich.markup import escape

    total, full = sum(row.gmacs.values()), sum(dense.gmacs.values())
    return [
        escape(row.method),
        f"{100 * row.top1:.2f}",
        f"{100 * row.topk:.2f}",
        f"{100 * (row.top1 - dense.top1):+.2f}",
        f"{100 * row.agreement:.1f}",
        f"{row.cosine:.4f}",
        f"{total:.2f}" if full >= 1 else f"{total:.4f}",
        f"{100 * (1 - total / full):.1f}",
        f"{row.tokens_at_end:.1f}".removesuffix(".0"),
    ]


def _notes(found: dict[str, Any], num_classes: int) -> Iterator[str]:
    """Notes needed to read the table correctly."""
    yield (
        "top-k, agree (same class as dense) and saved (MACs) in %; change of top-1 in points; cosine of what the head "
        "reads; tokens left at the end, class token included"
    )
    if found["weights"] == "random":
        yield (
            "the model has random weights (neither --pretrained nor --checkpoint), so its accuracy is meaningless; "
            "agree and cosine still say how much the reduction changes"
        )
    if found["untrained"]:
        yield (
            f"{', '.join(found['untrained'])}: with random parameters, as nothing was given that learned them; "
            "--checkpoint takes the folder of a run of `vitrim train`"
        )
    classes = found["data"]["classes"]
    if classes not in (None, num_classes):
        yield (
            f"the data has {classes} classes and the model {num_classes}: accuracy is right only if every label is the "
            "index of the model's class"
        )
