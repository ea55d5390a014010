"""Readers of published dataset layouts, by name: `nabirds:PATH`; a reader is a function in one file of this folder.

Keyword-only parameters are options of `load_data`. A reader reads labels and paths, keeps their order, and decodes no
image. A layout with several kinds of data has several functions under one name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vitrim.core.tables import discover, enter
from vitrim.data.dataset import ImageDataset, MultiLabelDataset
from vitrim.data.dense import DetectionDataset, SegmentationDataset
from vitrim.data.pages import PageDataset
from vitrim.errors import check_known

AnyDataset = ImageDataset | MultiLabelDataset | SegmentationDataset | DetectionDataset | PageDataset
Reader = Callable[..., AnyDataset]
R = TypeVar("R", bound=Reader)

TASKS = ("classification", "multilabel", "segmentation", "detection", "instances", "retrieval")
"""Tasks that data can be for."""
WITH_LABELS = TASKS[:2]
"""Tasks with labels of whole images, which need not be named."""

_READERS: dict[str, dict[str, Reader]] = {}
"""Name -> task -> reader."""


def register_reader(name: str, *tasks: str) -> Callable[[R], R]:
    """Decorator: register a reader under a name, once per task.

    Args:
        tasks: of `TASKS`; by default `classification`. A reader with the keyword `task` receives the requested one.

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
    """Every reader by name, sorted, and by task."""
    discover(__name__)
    return dict(sorted(_READERS.items()))
