"""The table of tasks: a new one is one new file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from vitrim import tasks as room
from vitrim.core import tables
from vitrim.core.registry import ask
from vitrim.tasks import Task, base, make_task, register_task, tasks
from vitrim.tasks.classes import places_of
from vitrim.tasks.classification import Classification
from vitrim.tasks.options import Mix, Protocol

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
    assert bool(task.losses) is not task.embeds  # of embeddings nothing is learned
    if name == "embedding":  # its scores are those of all images together
        return
    names = [name for key, metric in task.metrics().items() for name in getattr(metric, "names", (key,))]
    assert task.selects_by in names


@pytest.mark.parametrize(
    ("given", "once"),
    [
        ({}, True),
        ({"side": "long", "stride": 8}, True),
        ({"average": "probabilities"}, False),
        ({"flip": True}, False),
        ({"scales": (0.5,)}, False),
        ({"size": 32}, False),
        ({"mode": "slide", "window": 32}, False),
    ],
)
def test_a_plain_protocol_is_one_forward_on_the_image_as_it_is(given: dict[str, Any], once: bool) -> None:
    assert Protocol(**given).plain == once


@pytest.mark.parametrize(
    ("given", "on"),
    [({}, False), ({"mixup": 0.8}, True), ({"cutmix": 1.0}, True), ({"cutmix": 1.0, "probability": 0.0}, False)],
)
def test_images_are_mixed_by_either_kind(given: dict[str, float], on: bool) -> None:
    assert Mix(**given).on == on


# ---- classes by name


def _named(logits: torch.Tensor, *names: str) -> Any:
    """A model of timm's conventions that says the same of every image, of classes with names."""
    model: Any = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, len(names)))
    torch.nn.init.zeros_(model[1].weight)
    model[1].bias.data = logits
    model.num_classes, model.class_names, model.pretrained_cfg = len(names), list(names), {}
    return model


def test_classification_counts_labels_by_name() -> None:
    """The model says zebra, then cat, then dog, then eel; of the data's three images two are zebras."""
    model = _named(torch.tensor([4.0, 3.0, 2.0, 1.0]), "zebra", "cat", "dog", "eel")
    task = make_task("classification", 4)
    task.meet(places_of(["dog", "zebra"], model.class_names, model.num_classes))
    prediction = task.predict(model, torch.zeros(3, 1, 1, 1))
    assert prediction.tolist() == [[2.0, 4.0, 3.0, 1.0]] * 3  # dog, zebra, and what the data does not have
    assert task.num_classes == 4
    metrics = task.metrics()
    task.update(metrics, prediction, torch.tensor([1, 0, 1]))
    assert metrics.compute()["top1"].item() == pytest.approx(2 / 3)


def test_several_labels_are_read_by_name() -> None:
    model = _named(torch.tensor([4.0, 3.0, 2.0]), "zebra", "cat", "dog")
    task = make_task("multilabel", 3)
    task.meet(places_of(["dog", "zebra"], model.class_names, model.num_classes))
    assert task.predict(model, torch.zeros(2, 1, 1, 1)).tolist() == [[2.0, 4.0]] * 2
    assert task.num_classes == 2


def test_names_of_another_head_say_nothing() -> None:
    model = _named(torch.tensor([4.0, 3.0, 2.0]), "zebra", "cat", "dog")
    model.class_names = ["cat", "zebra"]
    task = make_task("classification", 3)
    task.meet(places_of(["cat", "dog", "zebra"], model.class_names, model.num_classes))
    assert task.predict(model, torch.zeros(1, 1, 1, 1)).tolist() == [[4.0, 3.0, 2.0]]


def test_names_that_timm_was_told_are_those_of_the_model() -> None:
    """`push_to_hf_hub` of timm writes them into the config."""
    model = timm.create_model("test_vit", num_classes=2)
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": ["zebra", "cat"]}
    assert ask(model).class_names(model) == ["zebra", "cat"]
