"""Pairs of folders: `masks:ROOT`, with ROOT/images/SPLIT/* and ROOT/masks/SPLIT/*.png."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrim.data.dense import IGNORED, SegmentationDataset, paired
from vitrim.data.folders import files_by_stem, subfolders
from vitrim.data.paths import existing, pick_split
from vitrim.data.readers import register_reader


@register_reader("masks", "segmentation")
def read_masks(
    path: str,
    *,
    split: str | None = None,
    ignore: int | Sequence[int] = IGNORED,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
) -> SegmentationDataset:
    """Images and masks with equal names but for the suffix.

    Expects images/SPLIT/ and masks/SPLIT/ below ``path``; masks are PNG files whose pixel values are labels. ``split``
    is the folders' name; ``ignore``, ``class_names`` and ``num_classes`` are as in `SegmentationDataset`.
    """
    root, source = existing(path), f"masks:{path}"
    name = pick_split(split, subfolders(root / "images"), source, f"folders in {root / 'images'}")
    images = files_by_stem(root / "images" / name, source)
    masks = files_by_stem(root / "masks" / name, source, (".png",))
    options: dict[str, Any] = {"class_names": class_names, "num_classes": num_classes, "ignore": ignore}
    return paired(images, masks, source, **options, split=name).check_occurring()
