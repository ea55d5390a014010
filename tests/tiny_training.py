"""A small dataset and runs of a few seconds, for the tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from PIL import Image

from vitrim.cli.train import create, load_data
from vitrim.data import eval_transform
from vitrim.training.images import seed_all
from vitrim.training.loop import Running, Trainer
from vitrim.training.recipe import Resolved, resolve

CLASSES = ("ant", "bee", "cat")
PER_CLASS = {"train": 8, "test": 4}

TINY: dict[str, Any] = {
    "model": "test_vit",
    "model_options": {"img_size": 16, "patch_size": 4},
    "epochs": 3,
    "batch_size": 8,
    "augment": {"crop": "padded", "padding": 2},
    "optimizer": {"lr": 1e-3},
    "schedule": {"warmup_epochs": 1},
}


def recipe(**changes: Any) -> Resolved:
    """`TINY` with changes."""
    return resolve({**TINY, **changes}, name="tiny")


def write_images(root: Path) -> Path:
    """24 images to train on and 12 to test on, of three classes that differ in their colour."""
    generator = np.random.default_rng(0)
    for split, count in PER_CLASS.items():
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 128, (16, 16, 3), dtype=np.uint8)
                pixels[..., label] += 100
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return root


def trainer(resolved: Resolved, images: Path | str, out: Path, *, start: Path | None = None, **running: Any) -> Trainer:
    """A run as the command line builds it."""
    seed_all(resolved.recipe.seed)
    train_data, eval_data = load_data(resolved, str(images))
    model = create(resolved, train_data.num_classes, start)
    if eval_data is not None:
        eval_data.transform = eval_transform(model)
    settings = {"log_every": 1, "save_minutes": 1e9, **running}
    precision = {"fp32": "no"}.get(resolved.recipe.precision, resolved.recipe.precision)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    return Trainer(resolved, model, train_data, eval_data, accelerator, Running(out=out, **settings), start=start)
