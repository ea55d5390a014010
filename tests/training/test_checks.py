"""What a run is refused for before its first update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import DistributedType

import tiny
from tiny_training import recipe
from vitrim.errors import VitrimError
from vitrim.tasks import make_task
from vitrim.training.checks import beyond, check_classes
from vitrim.training.learner import Learner


def data(*names: str, split: str = "test") -> Any:
    return SimpleNamespace(class_names=list(names) or None, source="animals", split=split)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("cat", "eel"), "class 1 is 'eel' there and 'dog' here"),
        (("cat", "dog", "eel", "fox"), "class 3 is 'fox' there and none here"),
    ],
)
def test_other_classes_of_another_split_are_refused(names: tuple[str, ...], message: str) -> None:
    train = data("cat", "dog", "eel", split="train")
    with pytest.raises(VitrimError, match=r"^animals \(test\) has other classes than the training data: " + message):
        check_classes(train, train, None, data(*names))


def test_classes_without_names_are_numbers() -> None:
    check_classes(data("cat", "dog"), None, data(), data("cat", "dog"))
    check_classes(data(), data("cat"))


def test_a_detector_that_is_sharded_is_refused_at_once() -> None:
    sharded: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(VitrimError, match="task detection cannot be evaluated on a model that is sharded"):
        Learner(recipe().recipe, tiny.HOSTS["vit"](), make_task("detection", 3), sharded, 1)


# ---- what a short run of a recipe for a long one changes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedule": {"warmup_epochs": 2}}, []),
        ({"schedule": {"warmup_epochs": 3}}, ["the warm-up of 3 epochs does not end in a run of 3"]),
        ({"ema": {"decay": 0.99}}, []),
        ({"ema": {"decay": 0.993}}, ["the average with decay 0.993 keeps 53% of the weights"]),
        ({"ema": {"decay": 0.993, "warmup": True}}, []),
        ({"optimizer": {"freeze_epochs": 3}}, ["the backbone is frozen for the whole run"]),
        ({"optimizer": {"freeze_epochs": 2}}, []),
        (
            {"ramps": [{"option": "r", "start": 0, "stop": 8, "end_epoch": 6, "whole": True}]},
            ["the ramp of r ends at epoch 6, after the run, which comes to 4"],
        ),
        (
            {"switches": [{"option": "r", "value": 3, "epoch": 4}]},
            ["the switch of r is at epoch 4, after the run"],
        ),
    ],
)
def test_what_a_recipe_plans_for_longer_than_the_run_is_told(changes: dict[str, Any], told: list[str]) -> None:
    found = list(beyond(recipe(**{"schedule": {}, **changes}).recipe, 90))
    assert len(found) == len(told)
    assert all(text.startswith(start) for text, start in zip(found, told, strict=True))
