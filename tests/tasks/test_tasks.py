"""The table of tasks: a new one is one new file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from vitrim import tasks as room
from vitrim.core import tables
from vitrim.errors import VitrimError
from vitrim.tasks import Task, base, make_task, register_task, tasks
from vitrim.tasks.classification import Classification

NEW = """
from vitrim.tasks.base import register_task
from vitrim.tasks.classification import Classification

@register_task
class Balanced(Classification):
    name = "test_balanced"
"""


def test_a_new_task_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put beside the others, it is found without being named anywhere."""
    (tmp_path / "balanced.py").write_text(NEW)
    before = dict(tasks())
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path)])
    tables.discover.cache_clear()
    try:
        assert set(tasks()) - set(before) == {"test_balanced"}
        assert list(tasks()) == sorted(tasks())
        made = make_task("test_balanced", 3)
        assert (type(made).__name__, made.num_classes) == ("Balanced", 3)
    finally:
        base.TASKS.pop("test_balanced", None)
        sys.modules.pop("vitrim.tasks.balanced", None)
        importlib.invalidate_caches()
    assert tasks() == before


def test_a_task_is_registered_once() -> None:
    class Other(Classification):
        name = "multilabel"

    before = tasks()
    with pytest.raises(ValueError, match=r"task 'multilabel' is registered twice, by .*MultiLabel.* and .*Other"):
        register_task(Other)
    assert tasks() == before


@pytest.mark.parametrize("name", sorted(tasks()))
def test_every_task_says_what_it_is(name: str) -> None:
    task = make_task(name, 3)
    assert isinstance(task, Task)
    assert task.name == name
    assert task.losses
    names = [name for key, metric in task.metrics().items() for name in getattr(metric, "names", (key,))]
    assert task.selects_by in names


def test_an_unknown_task_is_one_line() -> None:
    with pytest.raises(VitrimError, match=r"^unknown task 'multilable'; did you mean 'multilabel'\? valid: "):
        make_task("multilable", 3)
