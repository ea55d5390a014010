"""Small images with masks and boxes for the tests of dense data: 4 images of 32 px."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from image_files import encoded

SIDE = 32
COUNT = 4


def photo(seed: int, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """A picture of noise, ``size`` as (height, width)."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def mask(values: object, mode: str = "L", size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """A mask in vertical stripes of the values; 16 bits in mode "I;16"."""
    given = np.atleast_1d(np.asarray(values))
    stripes = given[np.arange(size[1]) * len(given) // size[1]]
    labels = np.broadcast_to(stripes, size).astype(np.uint16 if mode == "I;16" else np.uint8)
    image = Image.fromarray(np.ascontiguousarray(labels))
    if mode == "P":
        image.putpalette([level for index in range(256) for level in (index, 255 - index, 7)])
    return image


def save(path: Path, image: Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def write_masks_table(path: Path, values: list[object], column: str = "annotation") -> Path:
    """A parquet file of images and masks, one mask per entry of ``values``."""
    rows = {
        "image": [{"bytes": encoded(photo(row)), "path": None} for row in range(len(values))],
        column: [{"bytes": encoded(mask(each)), "path": None} for each in values],
    }
    features = datasets.Features({"image": datasets.Image(), column: datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path


def write_boxes_table(path: Path, objects: list[dict[str, list[object]]], names: list[str] | None = None) -> Path:
    """A parquet file of images and boxes x, y, width, height."""
    category = datasets.Value("int64") if names is None else datasets.ClassLabel(names=names)
    rows = {
        "image": [{"bytes": encoded(photo(row)), "path": None} for row in range(len(objects))],
        "objects": objects,
    }
    box = datasets.List(datasets.Value("float32"))
    features = {"image": datasets.Image(), "objects": {"bbox": datasets.List(box), "category": datasets.List(category)}}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).to_parquet(path)
    return path
