"""What a run is refused for before its first update."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import DistributedType
from rich.console import Console
from safetensors.torch import load_file

import tiny
from tiny_training import recipe
from vitrim.errors import VitrimError
from vitrim.tasks import make_task
from vitrim.training.build import build_trainer
from vitrim.training.checks import beyond, check_classes
from vitrim.training.learner import Learner
from vitrim.training.loop import Running


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


# ---- what a short run of a recipe for a long one changes


def test_a_short_run_writes_weights_that_it_has_trained(images: Path, tmp_path: Path) -> None:
    """One epoch of a recipe for hundreds: the average follows the weights, which get the full rate."""
    console = Console(file=io.StringIO(), width=200)
    changes = {"epochs": 1, "batch_size": 2, "schedule": {"warmup_epochs": 5}, "ema": {"decay": 0.99996}}
    resolved = recipe(**changes, eval_split=None, optimizer={"name": "sgd", "lr": 0.1})
    run = build_trainer(resolved, images, Running(out=tmp_path, log_every=1), cpu=True, console=console)
    begun = {name: value.clone() for name, value in run.learner.model.state_dict().items()}
    run.run()
    written, trained = load_file(tmp_path / "model.safetensors"), run.learner.model.state_dict()
    name = "blocks.0.mlp.fc1.weight"
    assert (written[name] - trained[name]).norm() < 0.5 * (trained[name] - begun[name]).norm()
    with (tmp_path / "log.csv").open() as file:
        assert max(float(row["lr_0"]) for row in csv.DictReader(file)) > 0.09
    assert [line for line in console.file.getvalue().splitlines() if line.startswith("note: ")] == [
        "note: a warm-up of 5 epochs would not end in a run of 1: it has 0.1 (schedule.warmup_epochs)",
        "note: an average with decay 0.99996 would keep 100% of the weights that it starts from after 12 updates: its "
        "decay starts small, as with ema.warmup=true",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedule": {"warmup_epochs": 2}}, []),
        ({"schedule": {"warmup_epochs": 3}}, ["a warm-up of 3 epochs would not end in a run of 3: it has 0.3"]),
        ({"ema": {"decay": 0.99}}, []),  # 0.99 ** 90 = 0.4
        ({"ema": {"decay": 0.993}}, ["an average with decay 0.993 would keep 53% of the weights"]),
        ({"ema": {"decay": 0.993, "warmup": True}}, []),
        ({"optimizer": {"freeze_epochs": 3}}, ["the backbone is frozen for the whole run"]),
        ({"optimizer": {"freeze_epochs": 2}}, []),
        (
            {"ramps": [{"option": "r", "start": 0, "stop": 8, "end_epoch": 6, "whole": True}]},
            ["the ramp of r ends at epoch 6, after the run, which comes to 4"],
        ),
        ({"ramps": [{"option": "r", "start": 0, "stop": 8, "end_epoch": 3}]}, []),
        (
            {"switches": [{"option": "r", "value": 3, "epoch": 4}]},
            ["the switch of r is at epoch 4, after the run"],
        ),
        ({"switches": [{"option": "r", "value": 3, "epoch": 2}]}, []),
    ],
)
def test_what_a_recipe_plans_for_longer_than_the_run_is_told(changes: dict[str, Any], told: list[str]) -> None:
    found = list(beyond(recipe(**{"schedule": {}, **changes}).recipe, 90))
    assert len(found) == len(told)
    assert all(text.startswith(start) for text, start in zip(found, told, strict=True))
