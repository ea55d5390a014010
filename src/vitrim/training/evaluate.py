"""The metrics of a task over a dataset, by all processes of a run together."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset

from vitrim.measure.contestants import Contestant
from vitrim.measure.probes import TaskMetrics
from vitrim.measure.records import Processes, read
from vitrim.measure.run import Measurement
from vitrim.tasks.base import Task


def evaluate(
    model: nn.Module,
    task: Task,
    data: Dataset[Any],
    accelerator: Accelerator,
    *,
    batch_size: int = 64,
    workers: int = 0,
    by_class: bool = False,
) -> dict[str, Any]:
    """The task's metrics of a model on a dataset, in percent.

    Every process takes its share of the batches; the numbers are over all images. The generators stay as they were.

    Args:
        model: from images (B, C, H, W) to logits (B, K), or to an output with them.
        task: reads targets and has the metrics.
        data: map-style, with the model's own transform.
        accelerator: processes, device and precision.
        batch_size: images at once in each process.
        workers: processes that read images, 0 for this one.
        by_class: give the scores of every class, too, under ``classes`` if the task tells them apart.
    """
    training = model.training
    processes = Processes(accelerator.process_index, accelerator.num_processes)
    measurement = Measurement(
        [Contestant(model, task)], [TaskMetrics(task)], task, processes=processes, precision=accelerator.autocast
    )
    size, collate = task.eval_batch(batch_size), task.collate
    measurement.follow(read(data, size, workers=workers, processes=processes, collate=collate))
    model.train(training)
    findings = measurement.findings()
    (row,) = findings.rows
    scores = {name: 100 * value for name, value in row.items() if name not in ("method", "images")}
    (classes,) = findings.classes(data, task.num_classes) if by_class else ({},)
    return {**scores, "classes": _percent(classes)} if classes else scores


def _percent(classes: dict[str, dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    return {
        score: {name: None if value is None else 100 * value for name, value in values.items()}
        for score, values in classes.items()
    }
