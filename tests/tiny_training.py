"""A small dataset and runs of a few seconds, for the tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrim.training.build import build_trainer
from vitrim.training.loop import Trainer
from vitrim.training.recipe import Resolved, resolve
from vitrim.training.running import Running

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

COPIES: dict[str, Any] = {"epochs": 7}
"""What `training_worker.py` trains in two processes that DDP keeps equal: a change of `TINY`."""

SHARDED: dict[str, Any] = {"method": "cropr:r=1", "optimizer": {"name": "sgd", "lr": 1e-2, "clip": 1.0}}
"""What `training_worker.py` trains with shards: a method that learns, and draws nothing at random."""


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
    settings = {"log_every": 1, "save_minutes": 1e9, **running}
    return build_trainer(resolved, images, Running(out=out, **settings), checkpoint=start, cpu=True)
