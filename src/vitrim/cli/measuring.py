"""The steps that commands which run a model over data share: its task and images, and the pass over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrim.cli import common
from vitrim.cli.options import Dtype as Dtype
from vitrim.cli.setup import Data, Model

if TYPE_CHECKING:
    from torch import nn

    from vitrim.measure.partial import Partial
    from vitrim.measure.run import Measurement
    from vitrim.tasks import Task

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def task_and_data(dense: nn.Module, model: Model, data: Data, changes: list[str] | None) -> tuple[Task, Any]:
    """The task of the model, and the images with its transform; a run's recipe says what the command line does not."""
    from vitrim.data import eval_transform
    from vitrim.measure.evaluation import check_dataset, task_name, task_of
    from vitrim.tasks import tasks
    from vitrim.training.images import geometry_of
    from vitrim.training.runs import as_trained

    protocol, options = as_trained(model.name, common.parse_options(changes, "protocol option"))
    name = task_name(dense, data.task)
    dataset = data.open(None if name is None else tasks()[name].reads, options)
    task = task_of(dense, dataset, name)
    task.follow(protocol)
    task.meet(dense, dataset.class_names)
    check_dataset(dataset, task, model.name)
    own = None if task.reads is None else task.eval_transform(geometry_of(dense))
    dataset.transform = own or eval_transform(dense)
    return task, dataset


def data_facts(dataset: Any, data: Data, batch_size: int) -> dict[str, Any]:
    """Describe the data of the evaluation, for the record."""
    return {
        "source": data.source,
        "split": dataset.split,
        "images": len(dataset) if data.limit is None else min(data.limit, len(dataset)),
        "classes": None if dataset.class_names is None else len(dataset.class_names),
        "batch_size": batch_size,
    }


def run_batches(
    measurement: Measurement, dataset: Any, limit: int | None, batch_size: int, workers: int, partial: Partial | None
) -> None:
    """Run every batch that was not run before, with a progress bar of the first process on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vitrim.measure.reading import read

    processes = measurement.processes
    done = 0 if partial is None else partial.restore(measurement)
    collate = measurement.task.collate
    loader = read(dataset, batch_size, limit=limit, workers=workers, processes=processes, done=done, collate=collate)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal or processes.index > 0
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        images = len(dataset) if limit is None else min(limit, len(dataset))
        task = progress.add_task("images", total=-(-images // processes.count))

        def told(seen: int) -> None:
            if partial is not None:
                partial.keep(measurement)
            progress.update(task, completed=seen)

        measurement.follow(loader, told)
