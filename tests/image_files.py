"""Small image files, tables and trees for the tests of datasets."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vitrim.data import ImageDataset


def picture(level: int = 0, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new(mode, size, level if mode == "L" else (level, 0, 0))


def encoded(image: Image.Image, kind: str = "png") -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def write_table(path: Path, labels, *, label="label", feature=None, **columns) -> Path:
    """A parquet file as `datasets` writes it; pixel (0, 0) of row i has red = i."""
    images = [{"bytes": encoded(picture(i)), "path": None} for i in range(len(labels))]
    feature = feature or datasets.ClassLabel(names=["cat", "dog", "eel"])
    features = {"img": datasets.Image(), label: feature} | {name: value[0] for name, value in columns.items()}
    table = {"img": images, label: labels} | {name: value[1] for name, value in columns.items()}
    datasets.Dataset.from_dict(table, features=datasets.Features(features)).to_parquet(path)
    return path


def write_plain(path: Path, **columns) -> Path:
    """A parquet file without the features that `datasets` adds."""
    pq.write_table(pa.table(columns), path)
    return path


def plain_images(count: int) -> list[dict[str, object]]:
    return [{"bytes": encoded(picture(i)), "path": "x.png"} for i in range(count)]


def write_tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(7).save(root / name)
    return root


def write_noise(root: Path, each: int) -> Path:
    """A folder with ``each`` images of 32 x 32 random pixels in each of two classes."""
    random = np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(each):
            pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def labels(dataset: ImageDataset) -> list[int]:
    return [label for _, label in dataset]
