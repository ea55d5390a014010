"""Accuracy of reduced models next to the dense one, for any number of methods in one pass over the data.

rows = evaluate(model, ["tome:r=13", "evit:keep_rate=0.7"], batches(dataset, 32))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, host_of
from vitrim.data.dataset import MultiLabelDataset
from vitrim.errors import VitrimError, unknown
from vitrim.loading import Loaded
from vitrim.measure.partial import Partial
from vitrim.measure.probes import Agreement, Macs, Probe, TaskMetrics, Tokens
from vitrim.measure.records import Batch, Row
from vitrim.measure.run import Measurement, run
from vitrim.tasks import Task, make_task

__all__ = ["check_dataset", "evaluate", "num_classes", "standard_probes", "task_name", "task_of"]


def standard_probes(task: Task) -> list[Probe]:
    """The probes of an evaluation: the task's metrics, agreement with the dense model, MACs and tokens.

    Example:
        >>> [type(probe).__name__ for probe in standard_probes(make_task("classification", 10))]
        ['TaskMetrics', 'Agreement', 'Macs', 'Tokens']
    """
    return [TaskMetrics(task), Agreement(task), Macs(), Tokens()]


def num_classes(model: nn.Module) -> int:
    """The number of classes that ``model`` predicts.

    Raises:
        VitrimError: it has no classifier, or is not a supported host.
    """
    host_of(model)
    count = ask(model).num_classes(model)
    if not count:
        raise VitrimError(f"this {type(model).__name__} has no classifier (num_classes=0), so it predicts nothing")
    return count


def task_name(model: nn.Module, wanted: str | None = None) -> str | None:
    """The task that ``model`` is evaluated in: the ``wanted`` one, else that it is made for; None: labels of images.

    Raises:
        VitrimError: the model is not for the wanted task.
    """
    own = ask(model).tasks(model)
    if wanted is None or wanted in own:
        return wanted or ask(model).task(model)
    if not own:
        raise VitrimError(f"this {type(model).__name__} predicts labels of whole images: leave task {wanted} out")
    raise unknown(f"task of {type(model).__name__}", wanted, own)


def task_of(model: nn.Module, dataset: Any, name: str | None = None) -> Task:
    """The task ``name``, else that ``model`` is made for or, of a classifier, ``dataset``: one label or several.

    Raises:
        VitrimError: the model has no classifier.
    """
    several = isinstance(dataset, MultiLabelDataset)
    name = name or ask(model).task(model) or ("multilabel" if several else "classification")
    return make_task(name, num_classes(model))


def check_dataset(dataset: Any, task: Task, model: str) -> None:
    """Check before any image is read that the model has the classes of the labels.

    Args:
        dataset: of this package.
        task: of the model.
        model: its name on the command line, for the message.

    Raises:
        VitrimError: a label beyond the model's classes, or another number of classes where images have several.
    """
    count = task.num_classes
    option = "" if ":" in model else f", e.g. --model-option num_classes={dataset.num_classes} with its checkpoint"
    if task.reads is not None or isinstance(dataset, MultiLabelDataset):
        if dataset.num_classes != count:
            raise VitrimError(
                f"{dataset.source} has {dataset.num_classes} classes and the model {count}: use a model of these "
                f"classes{option}"
            )
        task.check(dataset)
        return
    largest = int(dataset.labels.max())
    if largest >= count:
        raise VitrimError(
            f"label {largest} of {dataset.source} is beyond the model's {count} classes, 0 to {count - 1}; "
            f"use a model of these classes{option}"
        )


def evaluate(
    model: nn.Module,
    methods: Sequence[MethodConfig | str],
    batches: Iterable[Batch | tuple[Tensor, Any]],
    *,
    task: Task | str = "classification",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    learned: Path | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Row]:
    """Compare ``methods`` with the dense ``model`` in one pass over ``batches``: `run` with the `standard_probes`.

    Args:
        model, methods, device, dtype, seed, learned, on_progress: as for `vitrim.measure.run.run`.
        batches: pairs of images (B, C, H, W) and targets: labels (B,) for classification, (B, K) of 0 and 1 for several
            labels. Read once.
        task: what the model predicts, or the name of a task with as many classes as the model has.

    Returns:
        One `Row` per model, the dense one first, with ``images``; the task's metrics, shares in [0, 1], such as
        ``top1`` and ``top5``; ``agreement``, ``cosine``; ``gmacs``, ``gmacs_images``; ``tokens_per_block``,
        ``tokens_at_end``. See the probes for what each is.

    Raises:
        VitrimError: the model is reduced, no host, has no classifier or is for another task; a method is unknown or
            does not fit; targets are wrong; outputs are not finite; there are no images.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", num_classes=3)
        >>> batches = [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))]
        >>> [(row.method, row["tokens_per_block"][0]) for row in evaluate(model, ["tome:r=8"], batches)]
        [('dense', 101), ('tome:r=8', 93)]
    """
    if isinstance(task, str):
        if ask(model).tasks(model):
            task_name(model, task)
        task = make_task(task, num_classes(model))
    return run(
        model,
        methods,
        batches,
        standard_probes(task),
        task=task,
        device=device,
        dtype=dtype,
        seed=seed,
        learned=learned,
        on_progress=on_progress,
    )


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Of parameters and images, by the names of the command line."""


def open_task(
    loaded: Loaded,
    data: Any,
    *,
    task: str | None = None,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    data_options: Mapping[str, Any] | None = None,
    protocol: Mapping[str, Any] | None = None,
) -> tuple[Task, Any]:
    """The task of a model, and the images with its transform; a run's recipe says what the arguments do not."""
    from vitrim.data import eval_transform, load_data
    from vitrim.tasks import tasks
    from vitrim.training.images import geometry_of
    from vitrim.training.runs import as_trained

    plan, options = as_trained(loaded.name, dict(protocol or {}))
    name = task_name(loaded.model, task)
    if not isinstance(data, str | Path):
        dataset = copy.copy(data)
    else:
        dataset = load_data(
            data,
            task=None if name is None else tasks()[name].reads,
            split=split,
            image_column=image_column,
            label_column=label_column,
            **{**options, **(data_options or {})},
        )
    made = task_of(loaded.model, dataset, name)
    made.follow(plan)
    made.meet(loaded.model, dataset.class_names)
    check_dataset(dataset, made, loaded.name)
    own = None if made.reads is None else made.eval_transform(geometry_of(loaded.model))
    dataset.transform = own or eval_transform(loaded.model)
    return made, dataset


def data_facts(dataset: Any, source: str, limit: int | None, batch_size: int) -> dict[str, Any]:
    """What a record says of the images: where they are from, how many there are and how many are read."""
    return {
        "source": source,
        "split": dataset.split,
        "images": len(dataset) if limit is None else min(limit, len(dataset)),
        "classes": None if dataset.class_names is None else len(dataset.class_names),
        "batch_size": batch_size,
    }


def run_batches(
    measurement: Measurement,
    dataset: Any,
    limit: int | None,
    batch_size: int,
    workers: int = 0,
    partial: Partial | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Show a measurement every batch of ``dataset`` that it has not seen before."""
    from vitrim.measure.reading import read

    done = 0 if partial is None else partial.restore(measurement)
    collate, processes = measurement.task.collate, measurement.processes
    batches = read(dataset, batch_size, limit=limit, workers=workers, processes=processes, done=done, collate=collate)

    def seen(images: int) -> None:
        if partial is not None:
            partial.keep(measurement)
        if on_progress is not None:
            on_progress(images)

    measurement.follow(batches, seen)
