"""Five updates of a run against a plain loop of torch and timm.

It knows nothing of vitrim but where randomness comes from: the order of an epoch from (seed, epoch), what a forward
draws from (seed, 1, update, process, part).
"""

from __future__ import annotations

import math
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import Mixup
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from tiny_training import recipe, trainer
from vitrim.data import eval_transform
from vitrim.data.transforms import Geometry, geometry_of
from vitrim.training import checkpoint
from vitrim.training.images import ImagePlace, Seeded, TrainTransform
from vitrim.training.recipe import Augment

MEAN, STD = (0.2, 0.4, 0.6), (0.9, 0.7, 0.3)
UPDATES, EPOCH, BATCH, SEED = 5, 3, 8, 7
LR, WARMUP_LR, MIN_LR, WARMUP, EPOCHS = 0.05, 0.01, 0.002, 2, 4
DECAY, WEIGHT_DECAY, MOMENTUM, CLIP = 0.8, 0.3, 0.9, 0.25

RUN: dict[str, Any] = {
    "seed": SEED,
    "epochs": EPOCHS,
    "batch_size": BATCH,
    "model_options": {
        "img_size": 16,
        "patch_size": 4,
        "drop_rate": 0.2,
        "drop_path_rate": 0.3,
        "pretrained_cfg_overlay": {"mean": MEAN, "std": STD},
    },
    "augment": {"crop": "squash", "hflip": 0.0},
    "mix": {"mixup": 0.8, "cutmix": 1.0, "probability": 0.9},
    "loss": {"smoothing": 0.1},
    "optimizer": {"name": "momentum", "lr": LR, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM, "clip": CLIP},
    "schedule": {"warmup_epochs": WARMUP / EPOCH, "warmup_lr": WARMUP_LR, "min_lr": MIN_LR},
    "ema": {"decay": DECAY},
    "eval_every": None,
}


def plain_loop(model: nn.Module, images: Path, parts: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights, their average and the norms of the gradients after `UPDATES` updates."""
    data = ImageFolder(str(images / "train"))
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    pixels = torch.stack([(pil_to_tensor(image) / 255 - mean) / std for image, _ in data])
    labels = torch.tensor(data.targets)
    kept = [
        value for name, value in model.named_parameters() if value.ndim > 1 and name not in ("cls_token", "pos_embed")
    ]
    free = [value for value in model.parameters() if not any(value is one for one in kept)]
    groups = [{"params": kept, "weight_decay": WEIGHT_DECAY}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.9, label_smoothing=0.0, num_classes=3)
    average, norms = deepcopy(model.state_dict()), []
    for update in range(UPDATES):
        warm = WARMUP_LR + update * (LR - WARMUP_LR) / WARMUP
        cosine = MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * update / (EPOCHS * EPOCH)))
        for group in optimizer.param_groups:
            group["lr"] = warm if update < WARMUP else cosine
        order = torch.randperm(24, generator=torch.Generator().manual_seed(SEED * 1_000_003 + update // EPOCH))
        chosen = order[update % EPOCH * BATCH :][:BATCH]
        for part, batch in enumerate(chosen.split(BATCH // parts)):
            first, second = map(int, np.random.SeedSequence((SEED, 1, update, 0, part)).generate_state(2))
            random.seed(first), np.random.seed(second), torch.manual_seed((first << 31) ^ second)
            mixed, targets = mixup(pixels[batch].clone(), labels[batch])
            (F.cross_entropy(model(mixed), targets, label_smoothing=0.1) / parts).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        average = {name: DECAY * average[name] + (1 - DECAY) * value for name, value in model.state_dict().items()}
    return model.state_dict(), average, norms


@pytest.mark.parametrize("parts", [1, 2])
def test_five_updates_are_those_of_a_plain_loop(parts: int, images: Path, tmp_path: Path) -> None:
    """Order, normalisation, mixing, drop path, schedule, weight decay, clipping, micro-batches and average."""
    resolved = recipe(**RUN, micro_batch=None if parts == 1 else BATCH // parts)
    run = trainer(resolved, images, tmp_path, max_updates=UPDATES)
    expected, average, norms = plain_loop(deepcopy(run.learner.model).train(), images, parts)
    assert min(norms) > CLIP  # it is really clipped
    run.run()
    saved = checkpoint.load(checkpoint.latest(tmp_path / "checkpoints")).tensors
    for found, wanted in ((saved["model"], expected), (saved["ema"], average)):
        assert {name.removeprefix("model.").removeprefix("module.") for name in found} == wanted.keys()
        for name, value in found.items():
            key = name.removeprefix("model.").removeprefix("module.")
            torch.testing.assert_close(
                value, wanted[key], rtol=1e-4, atol=1e-6, msg=lambda text, at=key: f"{at}: {text}"
            )


def test_adam_after_five_updates_is_that_of_a_plain_loop(images: Path, tmp_path: Path) -> None:
    """What most recipes train with, without anything random."""
    changes = {
        "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.8, 0.9], "weight_decay": 0.3},
        "augment": {"crop": "squash", "hflip": 0.0},
        "schedule": {"min_lr": 1e-3},
        "eval_split": None,
    }
    run = trainer(recipe(**changes), images, tmp_path, max_updates=UPDATES)
    model = deepcopy(run.learner.model).train()
    kept = [
        value for name, value in model.named_parameters() if value.ndim > 1 and name not in ("cls_token", "pos_embed")
    ]
    free = [value for value in model.parameters() if not any(value is one for one in kept)]
    groups = [{"params": kept, "weight_decay": 0.3}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))
    data = ImageFolder(str(images / "train"))
    pixels = torch.stack([(pil_to_tensor(image) / 255 - 0.5) / 0.5 for image, _ in data])
    for update in range(UPDATES):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(update // EPOCH))
        batch = order[update % EPOCH * BATCH :][:BATCH]
        F.cross_entropy(model(pixels[batch]), torch.tensor(data.targets)[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.run()
    for name, value in run.learner.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


# ---- single steps ----------------------------------------------------------------------------------------------------


def test_a_training_image_is_normalised_with_mean_and_deviation() -> None:
    image = Image.new("RGB", (6, 6), (51, 102, 204))
    found = TrainTransform(Geometry((6, 6), MEAN, STD), Augment(crop="squash", hflip=0.0))(image)
    expected = [(value / 255 - mean) / std for value, mean, std in zip((51, 102, 204), MEAN, STD, strict=True)]
    assert found[:, 3, 3].tolist() == pytest.approx(expected, abs=1e-6)


def test_an_image_is_prepared_for_evaluation_with_mean_and_deviation() -> None:
    model = timm.create_model("test_vit", img_size=16, pretrained_cfg_overlay={"mean": MEAN, "std": STD})
    assert geometry_of(model) == Geometry((16, 16), MEAN, STD)
    found = eval_transform(model)(Image.new("RGB", (16, 16), (51, 102, 204)))
    expected = [(value / 255 - mean) / std for value, mean, std in zip((51, 102, 204), MEAN, STD, strict=True)]
    assert found[:, 3, 3].tolist() == pytest.approx(expected, abs=1e-6)


def test_an_image_is_changed_in_another_way_in_every_epoch() -> None:
    """At the same place of the order, with nothing drawn in between."""

    class Draws(torch.utils.data.Dataset[Any]):
        def __getitem__(self, index: int) -> tuple[float, ...]:
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    data = Seeded(Draws(), seed=3)
    drawn = [data[ImagePlace(0, epoch, position)] for epoch in range(4) for position in range(4)]
    assert len(set(drawn)) == 16
    assert all(len(set(column)) == 16 for column in zip(*drawn, strict=True))
    assert Seeded(Draws(), seed=4)[ImagePlace(0, 0, 0)] != drawn[0]


def test_what_is_evaluated_is_what_the_row_says(images: Path, tmp_path: Path) -> None:
    """The average, which after a few updates knows less than the weights themselves."""
    changes = {
        "epochs": 10,
        "augment": {"crop": "squash", "hflip": 0.0},
        "optimizer": {"lr": 2e-3},
        "schedule": {"warmup_epochs": 9},  # timm's average is the model itself for two updates
        "ema": {"decay": 0.9999},
        "eval_every": None,
    }
    run = trainer(recipe(**changes), images, tmp_path)
    assert run.learner.ema is not None
    run.learner.ema.use_warmup = False  # the decay of so short a run starts small
    data = ImageFolder(str(images / "test"))
    pixels = torch.stack([(pil_to_tensor(image) / 255 - 0.5) / 0.5 for image, _ in data])
    labels = torch.tensor(data.targets)
    last = run.run()["last"]
    with torch.no_grad():
        model, average = (
            100 * float((one.eval()(pixels).argmax(dim=1) == labels).float().mean())
            for one in (run.learner.model, run.learner.ema.module)
        )
    assert abs(model - average) > 20
    assert last["weights"] == "average"
    assert last["top1"] == pytest.approx(average, abs=1e-4)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("scores", "best"),
    [([math.nan, 10.0, 20.0, 15.0], 20.0), ([10.0, math.nan, 5.0], 10.0), ([30.0, 30.0], 30.0)],
)
def test_the_best_is_the_largest_number(
    scores: list[float], best: float, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nan is what a detector that finds nothing scores: never better than a number, and never kept from one."""
    run = trainer(recipe(epochs=len(scores)), images, tmp_path)
    rows = [{"top1": score, "weights": "model", "update": update} for update, score in enumerate(scores)]
    coming = iter(rows)
    monkeypatch.setattr(run, "_scores", lambda data: next(coming))
    result = run.run()
    assert result["last"] == rows[-1]
    assert result["best"]["top1"] == best
    assert result["best"]["update"] == scores.index(best)
