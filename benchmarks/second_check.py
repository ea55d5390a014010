"""A second, independent check of segmentation scores: mIoU of the shipped CamVid model, recomputed.

    python benchmarks/second_check.py camvid-test.parquet

Of vitrim this uses the model and its forward, and nothing else: the table is read by pyarrow, images are decoded and
resized by Pillow, normalised, scored and counted here, by loops over classes. The last line compares with
``vitrim eval vitrim:camvid_vit --data camvid-test.parquet``, if its record is given with --record.

Pillow resizes 8-bit images and rounds, vitrim float images: the scores may differ in the second decimal of a percent.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image

from vitrim.loading import create_model

CLASSES, IGNORED = 11, 11
LONG_SIDE = 320
MEAN = STD = 0.5
"""As the model was trained (its recipe.yaml, and timm's preprocessing of its backbone)."""


def main() -> None:
    """Recompute the scores of a parquet file with the columns image and annotation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--record", type=Path, help="of `vitrim eval --json`, to compare with")
    parser.add_argument("--limit", type=int, help="the first images only; then there is nothing to compare with")
    given = parser.parse_args()
    model = create_model("vitrim:camvid_vit").eval()
    table = pyarrow.parquet.read_table(given.data)
    intersections, unions = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    rows = table.slice(0, given.limit).to_pylist()
    for row in rows:
        image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        truth = np.asarray(Image.open(io.BytesIO(row["annotation"]["bytes"])))
        scale = LONG_SIDE / max(image.size)
        small = image.resize([round(side * scale) for side in image.size], Image.Resampling.BILINEAR)
        pixels = (np.asarray(small, dtype=np.float32) / 255 - MEAN) / STD
        with torch.no_grad():
            logits = model(torch.from_numpy(pixels.transpose(2, 0, 1))[None])[0].numpy()
        # the map of each class is enlarged to the size of the truth
        maps = [Image.fromarray(one).resize(image.size, Image.Resampling.BILINEAR) for one in logits]
        found = np.stack([np.asarray(one) for one in maps]).argmax(0)
        counted = truth != IGNORED
        for label in range(CLASSES):
            own, true = (found == label) & counted, truth == label
            intersections[label] += (own & true).sum()
            unions[label] += (own | true).sum()
    scores = 100 * intersections[unions > 0] / unions[unions > 0]
    print(f"{len(rows)} images, mIoU {scores.mean():.3f}")
    if given.record is not None:
        theirs = 100 * json.loads(given.record.read_text())["rows"][0]["mIoU"]
        print(f"vitrim eval: mIoU {theirs:.3f}, difference {scores.mean() - theirs:+.3f}")


if __name__ == "__main__":
    main()
