"""``vitrim eval``: accuracy of reduced models next to the dense one, on a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.errors import VitrimError, unknown
from vitrim.loading import create_model

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from vitrim.core.config import MethodConfig
    from vitrim.data import ImageDataset
    from vitrim.measure.evaluation import Evaluation, Row

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

Data = Annotated[
    str, typer.Option("--data", help="parquet file or folder, folder with one folder per class, or hfds/owner/name")
]
ImageColumn = Annotated[str | None, typer.Option("--image-column", help="column of images, if not the only one")]
LabelColumn = Annotated[str | None, typer.Option("--label-column", help="column of labels, if not called label")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="so many images only, spread evenly over the data")]
Dtype = Annotated[str, typer.Option("--dtype", help="of parameters and images: fp32 or bf16")]
Workers = Annotated[
    int, typer.Option("--workers", min=0, max=common.MAX_WORKERS, help="processes that read images; 0: this one")
]


def evaluate(
    model: common.Model,
    data: Data,
    methods: common.MethodsBesideDense = None,
    split: common.Split = None,
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    batch_size: common.BatchSize = 32,
    limit: Limit = None,
    pretrained: common.Pretrained = False,
    checkpoint: common.Checkpoint = None,
    model_option: common.ModelOptions = None,
    device: common.Device = "cpu",
    dtype: Dtype = "fp32",
    workers: Workers = 0,
    seed: common.Seed = 0,
    json: common.Json = None,
) -> None:
    """Evaluate reduced models next to the dense one: accuracy, agreement, cosine, MACs, tokens.

    All methods see the same batches, in one pass over the data. If it stops half-way, what was gathered is kept.
    """
    common.check_json(json)
    configs = common.parse_methods(methods or ())
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    import torch

    from vitrim.data import batches, eval_transform, load_images
    from vitrim.measure.bench import one_line_errors
    from vitrim.measure.evaluation import Evaluation

    target = common.select_device(device)
    options = common.parse_options(model_option)
    torch.manual_seed(seed)
    learned = common.learned_reduction(model, checkpoint)
    dense = create_model(model, pretrained=pretrained, checkpoint=checkpoint, options=options)
    precision = getattr(torch, DTYPES[dtype])
    evaluation = Evaluation(dense, configs, device=target, dtype=precision, seed=seed, learned=learned)
    dataset = load_images(data, split=split, image_column=image_column, label_column=label_column)
    _check_labels(dataset, model, evaluation.num_classes)
    dataset.transform = eval_transform(dense)
    weights = common.weights_of(model, pretrained=pretrained, checkpoint=checkpoint)
    record: dict[str, Any] = {
        "command": "eval",
        "environment": common.environment(device=str(target), dtype=DTYPES[dtype], seed=seed),
        "weights": weights,
        "model_options": options,
        "untrained": _untrained(configs, learned),
        "data": {
            "source": data,
            "split": dataset.split,
            "images": len(dataset) if limit is None else min(limit, len(dataset)),
            "classes": None if dataset.class_names is None else len(dataset.class_names),
            "batch_size": batch_size,
        },
    }
    problem: str | None = "stopped before the end"
    try:
        with one_line_errors(f"batch {batch_size}, {dtype}", kept="; what was gathered is kept"):
            _run(evaluation, batches(dataset, batch_size, limit=limit, workers=workers), record["data"]["images"])
        problem = None
    except VitrimError as error:
        problem = str(error)
        raise
    finally:  # whatever stops it, Ctrl-C too: what took hours is not thrown away
        if evaluation.images:
            record |= {"complete": True} if problem is None else {"complete": False, "error": problem}
            _report(model, evaluation, record, json)


def _untrained(configs: list[MethodConfig], learned: Path | None) -> list[str]:
    """Methods that have parameters to learn and got none."""
    from vitrim.core.reduce import saved_method

    known = None if learned is None else saved_method(learned)
    return [config.describe() for config in configs if not config.training_free and config.name != known]


def _check_labels(dataset: ImageDataset, model: str, num_classes: int) -> None:
    """Before any image is read: every label must be a class of the model."""
    largest = int(dataset.labels.max())
    if largest >= num_classes:
        option = "" if ":" in model else f", e.g. --model-option num_classes={dataset.num_classes} with its checkpoint"
        raise VitrimError(
            f"label {largest} of {dataset.source} is beyond the model's {num_classes} classes, 0 to {num_classes - 1}; "
            f"use a model of these classes{option}"
        )


def _run(evaluation: Evaluation, loader: Any, planned: int) -> None:
    """Feed every batch, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("images", total=planned)
        for images, labels in loader:
            evaluation.update(images, labels)
            progress.update(task, completed=evaluation.images)


def _report(model: str, evaluation: Evaluation, record: dict[str, Any], json: str | None) -> None:
    """Print the table and write the record of what was gathered."""
    rows = evaluation.rows()
    out = common.console(json)
    _print(out, model, record["data"], rows)
    for note in _notes(record, evaluation.num_classes):
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    common.write_json(json, {**record, "rows": [{"model": model, **row.record()} for row in rows]})


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


def _notes(record: dict[str, Any], num_classes: int) -> Iterator[str]:
    """What a reader must know to read the table rightly."""
    yield (
        "top-k, agree (same class as dense) and saved (MACs) in %; change of top-1 in points; cosine of what the head "
        "reads; tokens left at the end, class token included"
    )
    if record["weights"] == "random":
        yield (
            "the model has random weights (neither --pretrained nor --checkpoint), so its accuracy is meaningless; "
            "agree and cosine still say how much the reduction changes"
        )
    if record["untrained"]:
        yield (
            f"{', '.join(record['untrained'])}: with random parameters, as nothing was given that learned them; "
            "--checkpoint takes the folder of a run of `vitrim train`"
        )
    classes = record["data"]["classes"]
    if classes not in (None, num_classes):
        yield (
            f"the data has {classes} classes and the model {num_classes}: accuracy is right only if every label is the "
            "index of the model's class"
        )
