"""A second, independent check of dense scores: mIoU of the shipped CamVid model and AP of a detector, recomputed.

    python benchmarks/second_check.py segmentation camvid-test.parquet --record miou.json
    python benchmarks/second_check.py detection bccd-test.parquet --run runs/bccd --record ap.json

Of vitrim this uses the model and its forward, and nothing else: the table is read by pyarrow, images are decoded and
resized by Pillow, normalised, scored and counted here, by loops over classes, images and boxes. With the record of
`vitrim eval --json` on the same images the last line is the difference. The standard error is that of a bootstrap over
images.

Pillow resizes 8-bit images and rounds, vitrim float images or tensors: the scores may differ in the second decimal of a
percent.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from PIL import Image

from vitrim.loading import create_model

MEAN = STD = 0.5
"""Preprocessing of both models' training (their recipes, and timm's of their backbones)."""
DRAWS = 200
"""Samples of the bootstrap."""

CLASSES, IGNORED = 11, 11
LONG_SIDE = 320

KINDS = 3
HEIGHT, WIDTH = 160, 224
THRESHOLDS = np.arange(50, 100, 5) / 100
RECALLS = np.linspace(0, 1, 101)
MOST = 100
"""Detections of an image and a class that count."""

Floats = NDArray[np.float64]


def main() -> None:
    """Recompute the scores of a parquet file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", choices=("segmentation", "detection"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--run", type=Path, help="folder of the detector's training; the segmenter comes with vitrim")
    parser.add_argument("--record", type=Path, help="of `vitrim eval --json`, to compare with")
    parser.add_argument("--limit", type=int, help="the first images only; then there is nothing to compare with")
    given = parser.parse_args()
    rows = pyarrow.parquet.read_table(given.data).slice(0, given.limit).to_pylist()
    if given.task == "segmentation":
        score, name, counted = segmentation(rows), "mIoU", "mIoU"
    else:
        score, name, counted = detection(rows, given.run), "AP", "box_AP"
    every = np.arange(len(rows))
    drawn = np.random.default_rng(0).integers(len(rows), size=(DRAWS, len(rows)))
    error = float(np.std([score(one) for one in drawn], ddof=1))
    print(f"{len(rows)} images, {name} {100 * score(every):.3f} ± {100 * error:.3f}")
    if given.record is not None:
        theirs = json.loads(given.record.read_text())["rows"][0][counted]
        print(f"vitrim eval: {name} {100 * theirs:.3f}, difference {100 * (score(every) - theirs):+.3f}")


def pixels_of(image: Image.Image, size: tuple[int, int]) -> NDArray[np.float32]:
    """An image of another size (width, height), normalised, (3, H, W)."""
    small = image.resize(size, Image.Resampling.BILINEAR)
    return ((np.asarray(small, dtype=np.float32) / 255 - MEAN) / STD).transpose(2, 0, 1)


# ---- mIoU


def segmentation(rows: Sequence[Mapping[str, Any]]) -> Callable[[NDArray[np.int64]], float]:
    """The mIoU of some of the images, as a function of their places."""
    model = create_model("vitrim:camvid_vit").eval()
    shared, either = np.zeros((2, len(rows), CLASSES), np.int64)
    for place, row in enumerate(rows):
        image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        truth = np.asarray(Image.open(io.BytesIO(row["annotation"]["bytes"])))
        scale = LONG_SIDE / max(image.size)
        pixels = pixels_of(image, (round(image.width * scale), round(image.height * scale)))
        with torch.no_grad():
            logits = model(torch.from_numpy(pixels)[None])[0].numpy()
        # the map of each class is enlarged to the size of the truth
        maps = [Image.fromarray(one).resize(image.size, Image.Resampling.BILINEAR) for one in logits]
        found = np.stack([np.asarray(one) for one in maps]).argmax(0)
        for label in range(CLASSES):
            own, true = (found == label) & (truth != IGNORED), truth == label
            shared[place, label], either[place, label] = (own & true).sum(), (own | true).sum()

    def score(places: NDArray[np.int64]) -> float:
        union = either[places].sum(0)
        return float(np.mean(shared[places].sum(0)[union > 0] / union[union > 0]))

    return score


# ---- AP, as COCO defines it


def detection(rows: Sequence[Mapping[str, Any]], run: Path) -> Callable[[NDArray[np.int64]], float]:
    """The box AP of some of the images, as a function of their places."""
    model = create_model(f"run:{run}").eval()
    found, truth = [], []
    for row in rows:
        image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        scale = min(HEIGHT / image.height, WIDTH / image.width)
        width, height = round(image.width * scale), round(image.height * scale)
        padded = np.zeros((1, 3, HEIGHT, WIDTH), np.float32)
        padded[0, :, :height, :width] = pixels_of(image, (width, height))
        with torch.no_grad():
            output = {
                name: each.numpy() for name, each in model(torch.from_numpy(padded), [(height, width)])[0].items()
            }
        larger = np.array([image.width / width, image.height / height] * 2)
        boxes = np.clip(output["boxes"] * larger, 0, [image.width, image.height] * 2)
        found.append((boxes, output["scores"].astype(float), output["labels"]))
        x, y, w, h = np.array(row["objects"]["bbox"], float).reshape(-1, 4).T
        truth.append((np.stack([x, y, x + w, y + h], 1), np.array(row["objects"]["category"])))
    return average_precision(found, truth)


def average_precision(
    found: Sequence[tuple[Floats, Floats, NDArray[np.int64]]], truth: Sequence[tuple[Floats, NDArray[np.int64]]]
) -> Callable[[NDArray[np.int64]], float]:
    """The AP of some of the images, as a function of their places.

    Args:
        found: of each image boxes x1 y1 x2 y2, scores and labels.
        truth: of each image boxes and labels.
    """
    scores: list[list[Floats]] = [[] for _ in range(KINDS)]  # of a class and an image, the best detection first
    right: list[list[NDArray[np.bool_]]] = [[] for _ in range(KINDS)]  # (detections, thresholds)
    counts = np.zeros((KINDS, len(truth)), np.int64)
    for place, ((boxes, sure, labels), (true, true_labels)) in enumerate(zip(found, truth, strict=True)):
        for kind in range(KINDS):
            best = np.argsort(-sure, kind="stable")
            own = best[labels[best] == kind][:MOST]
            counts[kind, place] = (true_labels == kind).sum()
            scores[kind].append(sure[own])
            right[kind].append(matches(boxes[own], true[true_labels == kind]))

    def score(places: NDArray[np.int64]) -> float:
        values = []
        for kind in range(KINDS):
            if counts[kind, places].sum():
                order = np.argsort(-np.concatenate([scores[kind][one] for one in places]), kind="stable")
                hits = np.concatenate([right[kind][one] for one in places])[order]
                values += [precision(hits[:, column], counts[kind, places].sum()) for column in range(len(THRESHOLDS))]
        return float(np.mean(values))

    return score


def matches(predicted: Floats, true: Floats) -> NDArray[np.bool_]:
    """Every detection, the best first, takes the free true box that it overlaps most, if by at least the threshold."""
    hits = np.zeros((len(predicted), len(THRESHOLDS)), bool)
    for column, threshold in enumerate(THRESHOLDS):
        free = list(range(len(true)))
        for place, box in enumerate(predicted):
            overlaps = [overlap(box, true[one]) for one in free]
            if overlaps and max(overlaps) >= threshold:
                del free[int(np.argmax(overlaps))]
                hits[place, column] = True
    return hits


def overlap(one: Floats, other: Floats) -> float:
    """Intersection over union of two boxes x1 y1 x2 y2."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return float(shared / (sum(areas) - shared))


def precision(hits: NDArray[np.bool_], boxes: int) -> float:
    """Mean precision at 101 recalls: at each the best one that is reached at this recall or a higher one."""
    found = np.cumsum(hits)
    recall, share = found / boxes, found / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(share[::-1])[::-1]
    places = np.searchsorted(recall, RECALLS, side="left")
    return float(np.append(best, 0.0)[np.minimum(places, len(best))].mean())


if __name__ == "__main__":
    main()
