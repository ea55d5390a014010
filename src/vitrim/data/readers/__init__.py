"""Readers of datasets as their authors lay them out on disk, by name: `nabirds:PATH`.

A reader is a function in one file of this folder:

    @register_reader("nabirds")
    def read_nabirds(path: str, *, split: str | None = None) -> ImageDataset:
        ...

Its further keyword-only parameters are options of `load_data`. It reads labels and paths, refuses what does not fit
with a `DataError` of one line, and decodes no image.

A reader declares the tasks its data is for, `@register_reader("ade20k", "segmentation")`, by default `classification`.
A layout that holds data of several kinds has several functions under one name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vitrim.core.registry import discover, enter
from vitrim.data.dataset import ImageDataset, MultiLabelDataset
from vitrim.data.dense import DetectionDataset, SegmentationDataset
from vitrim.errors import check_known

Data = ImageDataset | MultiLabelDataset | SegmentationDataset | DetectionDataset
Reader = Callable[..., Data]
R = TypeVar("R", bound=Reader)

TASKS = ("classification", "multilabel", "segmentation", "detection", "instances")
"""The tasks that data can be for."""
WITH_LABELS = TASKS[:2]
"""Those whose labels are of whole images: they need not be named."""

_READERS: dict[str, dict[str, Reader]] = {}
"""Name -> task -> reader."""


def register_reader(name: str, *tasks: str) -> Callable[[R], R]:
    """Decorator: register a reader under a name, for tasks. A name can be registered only once for a task.

    Args:
        name: what stands before the colon in `name:path`.
        tasks: what its data is for, of `TASKS`; by default `classification`. A reader that takes the keyword `task` is
            told which of them was asked for.

    Raises:
        VitrimError: there is a reader of this name for this task, or no such task.

    Example:
        >>> list(readers()["coco"])
        ['multilabel', 'detection', 'instances']
        >>> @register_reader("coco", "multilabel")  # doctest: +ELLIPSIS
        ... def read_mine(path, *, split=None): ...
        Traceback (most recent call last):
        vitrim.errors.VitrimError: reader 'coco' is registered twice, by <function read_coco ...
    """

    def enter_all(reader: R) -> R:
        for task in tasks or TASKS[:1]:
            check_known("task of data", task, TASKS)
            enter(_READERS.setdefault(name, {}), task, reader, f"reader '{name}'")
        return reader

    return enter_all


def readers() -> dict[str, dict[str, Reader]]:
    """Every reader by name, sorted, and by the tasks that its data is for.

    Example:
        >>> list(readers())  # doctest: +NORMALIZE_WHITESPACE
        ['ade20k', 'cityscapes', 'coco', 'imagenet', 'masks', 'nabirds', 'nus_wide', 'voc', 'webdataset']
    """
    discover(__name__)
    return dict(sorted(_READERS.items()))
