"""Tasks by name: what a recipe's ``task`` may be. A new one is one new file and one line here."""

from __future__ import annotations

from vitrim.errors import unknown
from vitrim.tasks.base import Task
from vitrim.tasks.classification import Classification
from vitrim.tasks.detection import Detection, Instances
from vitrim.tasks.multilabel import MultiLabel
from vitrim.tasks.segmentation import Segmentation

__all__ = ["Task", "make_task", "tasks"]


def tasks() -> dict[str, type[Task]]:
    """The tasks by name.

    Example:
        >>> sorted(tasks())
        ['classification', 'detection', 'instances', 'multilabel', 'segmentation']
    """
    return {task.name: task for task in (Classification, MultiLabel, Segmentation, Detection, Instances)}


def make_task(name: str, num_classes: int) -> Task:
    """The task called ``name``, for data of ``num_classes`` classes.

    Raises:
        VitrimError: there is no such task.

    Example:
        >>> make_task("classification", 10).selects_by
        'top1'
    """
    if name not in tasks():
        raise unknown("task", name, tasks())
    return tasks()[name](num_classes)
