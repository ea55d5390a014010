"""Made images with masks, boxes and outlines, and runs of a few seconds on them, for the tests of dense training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from image_files import encoded
from vitrim.data import DetectionDataset, SegmentationDataset
from vitrim.training.build import make_accelerator, starting_model
from vitrim.training.images import seed_all
from vitrim.training.loop import Trainer
from vitrim.training.recipe import Resolved, resolve
from vitrim.training.running import Running

SIDE = 64
COUNT = 4
NAMES = ("ground", "red", "blue")
LEVELS = {1: 0, 2: 2}
"""The channel that is bright in an object of a class."""

BACKBONE: dict[str, Any] = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
HEADS: dict[str, Any] = {"channels": 32, "hidden": 32, "rpn_layers": 1, "box_layers": 1}

COMMON: dict[str, Any] = {
    "epochs": 2,
    "batch_size": COUNT,
    "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "clip": 1.0},
    "schedule": {"shape": "constant"},
    "eval_every": None,
}
STILL: dict[str, Any] = {"crop": "scaled", "range": [1.0, 1.0], "cat_max_share": 1.0, "hflip": 0.0}
"""Images as they are."""

RECIPES: dict[str, dict[str, Any]] = {
    "segmentation": {
        **COMMON,
        "task": "segmentation",
        "model": "segmenter:vit_tiny_patch16_224",
        "model_options": {**BACKBONE, "img_size": 32},
        "loss": {"name": "pixel_cross_entropy"},
        "dense_augment": {"crop": "scaled", "range": [1.0, 2.5], "photometric": True},
    },
    "detection": {
        **COMMON,
        "task": "detection",
        "model": "vitdet:vit_tiny_patch16_224",
        "model_options": {**BACKBONE, **HEADS, "img_size": SIDE},
        "loss": {"name": "rcnn"},
        "dense_augment": {"crop": "jitter", "range": [0.5, 1.5]},
    },
}
RECIPES["instances"] = {
    **RECIPES["detection"],
    "task": "instances",
    "model_options": {**RECIPES["detection"]["model_options"], "masks": True},
}


def recipe(task: str, **changes: Any) -> Resolved:
    """The recipe of a task with changes; ``model_options`` are added to its own."""
    options = {**RECIPES[task]["model_options"], **changes.pop("model_options", {})}
    return resolve({**RECIPES[task], **changes, "model_options": options}, name=f"tiny {task}")


# ---- what is seen ----------------------------------------------------------------------------------------------------


def scene(seed: int) -> tuple[Image.Image, list[list[int]], list[int]]:
    """A picture of one object of each class on dark noise, with boxes x1 y1 x2 y2 and classes 1 and 2."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 90, (SIDE, SIDE, 3), dtype=np.uint8)
    boxes = []
    for place, label in enumerate(LEVELS):  # one in the left half, one in the right
        width, height = generator.integers(14, 26, 2).tolist()
        left = 32 * place + int(generator.integers(0, 32 - width))
        top = int(generator.integers(0, SIDE - height))
        pixels[top : top + height, left : left + width, LEVELS[label]] += 150
        boxes.append([left, top, left + width, top + height])
    return Image.fromarray(pixels), boxes, list(LEVELS)


def mask_of(boxes: list[list[int]], labels: list[int]) -> Image.Image:
    """A mask of the classes, 0 where no object is; the upper left corner is ignored (255)."""
    labelled = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for (left, top, right, bottom), label in zip(boxes, labels, strict=True):
        labelled[top:bottom, left:right] = label
    labelled[:4, :4] = 255
    return Image.fromarray(labelled)


def write_masks(root: Path, count: int = COUNT) -> Path:
    """Parquet files of images and masks, split into train, val and test."""
    root.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    for part, name in enumerate(("train", "val", "test")):
        scenes = [scene(100 * part + seed) for seed in range(count)]
        rows = {
            "image": [{"bytes": encoded(picture), "path": None} for picture, _, _ in scenes],
            "annotation": [{"bytes": encoded(mask_of(boxes, labels)), "path": None} for _, boxes, labels in scenes],
        }
        datasets.Dataset.from_dict(rows, features=features).to_parquet(root / f"made-{name}.parquet")
    return root


def write_boxes(root: Path, count: int = COUNT) -> Path:
    """A parquet file of images and boxes to train on."""
    root.mkdir(parents=True, exist_ok=True)
    box = datasets.List(datasets.Value("float32"))
    category = datasets.ClassLabel(names=list(NAMES[1:]))
    objects = {"bbox": datasets.List(box), "category": datasets.List(category)}
    scenes = [scene(seed) for seed in range(count)]
    rows = {
        "image": [{"bytes": encoded(picture), "path": None} for picture, _, _ in scenes],
        "objects": [
            {
                "bbox": [[left, top, right - left, bottom - top] for left, top, right, bottom in boxes],
                "category": [label - 1 for label in labels],
            }
            for _, boxes, labels in scenes
        ],
    }
    features = datasets.Features({"image": datasets.Image(), "objects": objects})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(root / "made-train.parquet")
    return root


def data(task: str, *seeds: int, empty: int = 0) -> SegmentationDataset | DetectionDataset:
    """The scenes of these ``seeds``, and so many images without any object."""
    scenes = [*map(scene, seeds or range(COUNT)), *((scene(seed)[0], [], []) for seed in range(empty))]
    images = [encoded(picture) for picture, _, _ in scenes]
    if task == "segmentation":
        masks = [encoded(mask_of(boxes, labels)) for _, boxes, labels in scenes]
        return SegmentationDataset(images, masks, class_names=list(NAMES), source="made")
    outlines = [[_outline(*box) for box in boxes] for _, boxes, _ in scenes]
    return DetectionDataset(
        images,
        [boxes for _, boxes, _ in scenes],
        [[label - 1 for label in labels] for _, _, labels in scenes],
        outlines=outlines if task == "instances" else None,
        class_names=list(NAMES[1:]),
        source="made",
    )


def _outline(left: int, top: int, right: int, bottom: int) -> bytes:
    return json.dumps([[left, top, right, top, right, bottom, left, bottom]]).encode()


# ---- runs ------------------------------------------------------------------------------------------------------------


def trainer(resolved: Resolved, out: Path, train: Any = None, watched: Any = None, **running: Any) -> Trainer:
    """A run on ``train``, by default `data`, as `build_trainer` makes it."""
    found = resolved.recipe
    train = data(found.task) if train is None else train
    accelerator = make_accelerator(found, cpu=True)
    seed_all(found.seed)
    model = starting_model(found, train.num_classes, None)
    settings = {"log_every": 1, "save_minutes": 1e9, **running}
    return Trainer(resolved, model, train, watched, accelerator, Running(out=out, **settings))
