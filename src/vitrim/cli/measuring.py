"""The steps that commands which run a model over data share: its task and images, and the pass over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.setup import Data, Model

if TYPE_CHECKING:
    from torch import nn

    from vitrim.measure.run import Measurement, Partial
    from vitrim.tasks import Task

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

Dtype = Annotated[str, typer.Option("--dtype", help="of parameters and images: fp32 or bf16")]


def task_and_data(dense: nn.Module, model: Model, data: Data, changes: list[str] | None) -> tuple[Task, Any]:
    """The task of the model, and the images with its transform: `vitrim.measure.evaluation.open_task`."""
    from vitrim.loading import Loaded
    from vitrim.measure.evaluation import open_task

    return open_task(
        Loaded(dense, model.name, model.weights, model.options, model.learned),
        data.source,
        task=data.task,
        split=data.split,
        image_column=data.image_column,
        label_column=data.label_column,
        data_options=common.parse_options(data.data_option, "data option"),
        protocol=common.parse_options(changes, "protocol option"),
    )


def data_facts(dataset: Any, data: Data, batch_size: int) -> dict[str, Any]:
    """Describe the data of the evaluation, for the record."""
    from vitrim.measure import evaluation

    return evaluation.data_facts(dataset, data.source, data.limit, batch_size)


def run_batches(
    measurement: Measurement, dataset: Any, limit: int | None, batch_size: int, workers: int, partial: Partial | None
) -> None:
    """Run every batch that was not run before, with a progress bar."""
    from vitrim.measure import evaluation

    images = len(dataset) if limit is None else min(limit, len(dataset))
    share = -(-images // measurement.processes.count)
    with progress_bar() as progress:
        evaluation.run_batches(
            measurement, dataset, limit, batch_size, workers, partial, lambda seen: progress(seen, share)
        )


@contextmanager
def progress_bar(unit: str = "images") -> Iterator[Callable[[int, int | None], None]]:
    """A bar on the terminal of the first process, gone at the end; it is moved by what is done and the total."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal or not common.is_first_process()
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
