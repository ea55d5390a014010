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
from vitrim.training.checks import check_classes
from vitrim.training.learner import Learner


def data(*names: str, split: str = "test") -> Any:
    return SimpleNamespace(class_names=list(names) or None, source="animals", split=split)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("cat", "eel"), "class 1 is 'eel' there and 'dog' here"),
        (("cat", "dog"), "class 2 is none there and 'eel' here"),
        (("cat", "dog", "eel", "fox"), "class 3 is 'fox' there and none here"),
        (("dog", "cat", "eel"), "class 0 is 'dog' there and 'cat' here"),
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
