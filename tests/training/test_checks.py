"""What a run is refused for before its first update."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from rich.console import Console
from safetensors.torch import load_file

import tiny
from tiny_training import recipe
from vitrim.errors import VitrimError
from vitrim.progress import progress
from vitrim.tasks import make_task
from vitrim.training.build import build_trainer
from vitrim.training.checks import beyond, check_classes
from vitrim.training.learner import Learner
from vitrim.training.running import Running


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


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [False, True])
def test_what_a_recipe_says_is_what_runs_in_a_short_run_too(images: Path, tmp_path: Path, warmup: bool) -> None:
    """One epoch of a recipe for hundreds: rates and average by twenty plain lines, and advice as notes."""
    console = Console(file=io.StringIO(), width=240)
    changes = {"epochs": 1, "batch_size": 2, "ema": {"decay": 0.99996, "warmup": warmup}, "eval_split": None}
    schedule = {"warmup_epochs": 5, "warmup_lr": 0.0}
    resolved = recipe(**changes, schedule=schedule, optimizer={"name": "sgd", "lr": 0.1})
    with progress("loading", "updates", console) as signs:
        run = build_trainer(resolved, images, Running(out=tmp_path, log_every=1), cpu=True, signs=signs)
    name, apply = "blocks.0.mlp.fc1.weight", run.learner.apply
    average, weights = run.learner.model.state_dict()[name].clone(), run.learner.model.state_dict()[name]

    def followed(update: int) -> None:
        apply(update)
        decay = 1 - max(update, 1) ** (-2 / 3) if warmup else 0.99996  # as timm's ModelEmaV3 warms up
        average.lerp_(weights, 1 - min(decay, 0.99996))

    run.learner.apply = followed  # type: ignore[method-assign]
    run.run()
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors")[name], average)
    with (tmp_path / "log.csv").open() as file:
        rates = [float(row["lr_0"]) for row in csv.DictReader(file)]
    assert rates == pytest.approx([0.1 * update / 60 for update in range(12)])
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("note: ")]  # type: ignore[attr-defined]
    assert (
        told
        == [
            "note: the warm-up of 5 epochs does not end in a run of 1, and no update has the full learning rate: for a "
            "short run set schedule.warmup_epochs=0.1",
            "note: the average with decay 0.99996 keeps 100% of the weights that it starts from after 12 updates: for "
            "a short run set ema.warmup=true, and its decay starts small",
        ][: 1 if warmup else 2]
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedule": {"warmup_epochs": 2}}, []),
        ({"schedule": {"warmup_epochs": 3}}, ["the warm-up of 3 epochs does not end in a run of 3"]),
        ({"ema": {"decay": 0.99}}, []),  # 0.99 ** 90 = 0.4
        ({"ema": {"decay": 0.993}}, ["the average with decay 0.993 keeps 53% of the weights"]),
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
