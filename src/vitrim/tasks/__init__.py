"""Tasks by name, the values of a recipe's ``task``. All files of this folder are imported on first use."""

from __future__ import annotations

from vitrim.core.tables import discover
from vitrim.errors import check_known
from vitrim.tasks.base import TASKS, Task, register_task

__all__ = ["Task", "make_task", "register_task", "tasks"]


def tasks() -> dict[str, type[Task]]:
    """The tasks by name, sorted."""
    discover(__name__)
    return dict(sorted(TASKS.items()))


def make_task(name: str, num_classes: int) -> Task:
    """The task ``name`` for data of ``num_classes`` classes; `VitrimError` for an unknown name."""
    check_known("task", name, tasks())
    return tasks()[name](num_classes)
