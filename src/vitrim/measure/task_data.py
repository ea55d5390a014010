"""The task of a model, and images with the classes and the transform for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from vitrim.core.registry import host_of, input_size_of, supported_parts
from vitrim.data.dataset import ImageDataset, MultiLabelDataset
from vitrim.data.decoding import to_tensor
from vitrim.data.dense import DetectionDataset, SegmentationDataset, plain
from vitrim.data.transforms import eval_transform, geometry_of
from vitrim.errors import VitrimError
from vitrim.loading import Loaded, as_trained
from vitrim.measure.inputs import (
    EMBEDDING,
    RETRIEVAL,
    ZERO_SHOT,
    ScoredData,
    at_all_sizes,
    check_own_transform,
    open_data,
    task_name,
)
from vitrim.tasks import Task, make_task
from vitrim.tasks.classes import BY_NUMBER, places_of
from vitrim.tasks.options import Protocol
from vitrim.tasks.zero_shot import ZeroShot

DATASETS = (ImageDataset, MultiLabelDataset, SegmentationDataset, DetectionDataset)


def num_classes(loaded: Loaded) -> int:
    """The number of classes that a model predicts; `VitrimError` without a classifier, or for several hosts."""
    model, count = loaded.model, loaded.num_classes
    if isinstance(model, nn.Module) and supported_parts(model):
        host_of(model)  # raises an error that names the part to use
    if count is None:
        raise VitrimError(f"this {type(model).__name__} does not say how many classes it predicts: give it num_classes")
    if not count:
        raise VitrimError(f"this {type(model).__name__} has no classifier (num_classes=0), so it predicts nothing")
    return count


def task_of(loaded: Loaded, dataset: Any, name: str | None = None) -> Task:
    """The task ``name``, else the model's or, for a classifier, the dataset's: one label or several per image."""
    several = isinstance(dataset, MultiLabelDataset)
    name = name or task_name(loaded) or ("multilabel" if several else "classification")
    return make_task(name, 0 if name in (EMBEDDING, ZERO_SHOT) else num_classes(loaded))


def check_dataset(dataset: Any, task: Task, model: str) -> None:
    """Check that ``model`` has the classes of the labels, before any image is read."""
    count = task.num_classes
    if task.reads is None and not isinstance(dataset, ImageDataset | MultiLabelDataset):
        raise VitrimError(f"{dataset.source} has no labels of whole images, which the model predicts")
    if task.name == EMBEDDING:
        if not isinstance(dataset, ImageDataset):
            raise VitrimError(f"{dataset.source} has several labels per image, and neighbours of embeddings need one")
        return
    # Only models of timm take the number of classes as an option of this name.
    option = "" if ":" in model else f", e.g. model option num_classes={dataset.num_classes} and its checkpoint"
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


def open_task(
    loaded: Loaded, data: Any, *, embeddings: bool = False, others: Sequence[Loaded] = ()
) -> tuple[Task, Any]:
    """The task of a model, and its images with the model's transform; the recipe of a training run sets the defaults.

    Args:
        loaded: dense model (`vitrim.ModelSpec.load`).
        data: a `vitrim.DataSpec`, or its source or dataset. A dataset is not changed; its transform is kept if one was
            set. Options of the reader override those of the training run.
        embeddings: accept a model without a classifier, by its embeddings.
        others: the model at other sizes, see `open_images`.

    Example:
        >>> from io import BytesIO
        >>> from PIL import Image
        >>> from vitrim.loading import ModelSpec
        >>> Image.new("RGB", (40, 30)).save(png := BytesIO(), "png")
        >>> loaded = ModelSpec("test_vit", options={"num_classes": 3}).load()
        >>> task, dataset = open_task(loaded, ImageDataset([png.getvalue()], [0]))
        >>> task.name, dataset[0][0].shape
        ('classification', torch.Size([3, 160, 160]))
    """
    spec = ScoredData.of(data)
    rules, trained = as_trained(loaded.name, spec.protocol)
    options = dict(spec.options or {})
    by_number = options.pop(BY_NUMBER, False)
    if not isinstance(by_number, bool) and by_number != "names":
        raise VitrimError(f"data option {BY_NUMBER}={by_number!r} must be true, false or names")
    name = task_name(loaded, spec.task)
    if name == RETRIEVAL:
        raise VitrimError(f"{type(loaded.model).__name__} finds pages for queries: vitrim eval measures that")
    if name == EMBEDDING and not embeddings:
        raise VitrimError(
            f"this needs a classifier, and {type(loaded.model).__name__} is taken by its embeddings: vitrim eval, "
            "compare, tune, optimize and analyze take those"
        )
    if spec.by_name:
        dataset: Any = open_data(spec.source, task=name, **spec.columns, options={**trained, **options})
    else:
        if any(spec.columns.values()) or options:
            raise VitrimError("split, columns and data_options say how to read a source, and a dataset is given")
        if not isinstance(spec.source, DATASETS):
            kind = type(spec.source).__name__
            raise VitrimError(f"expected a source of images or a dataset of vitrim.data, got {kind}")
        dataset = copy.copy(spec.source)
    task = task_of(loaded, dataset, name)
    if others and task.reads is not None:
        raise VitrimError(f"image sizes are of models of whole images: the protocol sets that of {task.name}")
    # A model that takes one image size cannot read a larger map at once: it goes window by window.
    task.follow(_windows(loaded) if task.by_windows and loaded.library.takes_one_size and rules.plain else rules)
    task.unpadded = loaded.library.sees_unpadded
    # The data may have some of the model's classes, in an order of its own: they are met by name.
    names, known = dataset.class_names, (loaded.class_names, loaded.num_classes)
    if isinstance(task, ZeroShot):
        task.read_names(loaded.model, names)
    elif not task.embeds:
        task.meet(places_of(names, *known, by_number=by_number, numbered=task.reads is not None))
    check_dataset(dataset, task, loaded.name)
    if dataset.transform in (to_tensor, plain):
        own = None if task.reads is None else task.eval_transform(geometry_of(loaded.model))
        dataset.transform = own or at_all_sizes(eval_transform(loaded.model), others)
    else:
        check_own_transform(dataset, others)
    return task, dataset


def _windows(loaded: Loaded) -> Protocol:
    """The protocol of a model of one image size: windows of that size."""
    _, side, _ = input_size_of(loaded.model)
    return Protocol(mode="slide", size=side, window=side)


def data_facts(images: ScoredData, task: Task, dataset: Any) -> dict[str, Any]:
    """The entry of a record about the images: source, split, number of images read, classes, batch size."""
    return {
        "source": images.name(dataset),
        "split": dataset.split,
        "images": min(images.limit or len(dataset), len(dataset)),
        "classes": None if dataset.class_names is None else len(dataset.class_names),
        "batch_size": task.eval_batch(images.batch_size),
    }
