"""Cityscapes: `cityscapes:ROOT`, with ROOT/leftImg8bit and ROOT/gtFine."""

from __future__ import annotations

from pathlib import Path

from vitrim.data.dense import IGNORED, SegmentationDataset, paired
from vitrim.data.folders import class_folders, subfolders
from vitrim.data.paths import existing, pick_split, visible
from vitrim.data.readers import register_reader
from vitrim.errors import DataError

CLASSES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
"""The 19 of 34 ids that the benchmark counts, and their names."""
IDS = 34
_IMAGE, _LABEL_IDS, _TRAIN_IDS = "_leftImg8bit.png", "_gtFine_labelIds.png", "_gtFine_labelTrainIds.png"


@register_reader("cityscapes", "segmentation")
def read_cityscapes(path: str, *, split: str | None = None) -> SegmentationDataset:
    """Cityscapes, finely annotated, with the 19 classes of its benchmark; other ids are ignored.

    Expects leftImg8bit/SPLIT/CITY/*_leftImg8bit.png and gtFine/SPLIT/CITY/*_gtFine_labelIds.png below ``path``, or else
    `labelTrainIds`. Splits are `train`, `val` and `test`, whose masks are empty.
    """
    root, source = existing(path), f"cityscapes:{path}"
    name = pick_split(split, subfolders(root / "leftImg8bit"), source, f"folders in {root / 'leftImg8bit'}")
    folder = root / "gtFine" / name
    images = _files(root / "leftImg8bit" / name, _IMAGE)
    masks, relabel = _files(folder, _LABEL_IDS), dict.fromkeys((*range(IDS), IGNORED), IGNORED)
    # Every id is ignored first, then those that count get their place in the benchmark's order.
    relabel |= {value: label for label, value in enumerate(CLASSES)}
    if not masks:
        masks, relabel = _files(folder, _TRAIN_IDS), {label: label for label in (*range(len(CLASSES)), IGNORED)}
    if images and not masks:
        raise DataError(f"{source} has no masks *{_LABEL_IDS} and no *{_TRAIN_IDS} in the folders of {folder}")
    return paired(images, masks, source, class_names=list(CLASSES.values()), relabel=relabel, split=name)


def _files(folder: Path, ending: str) -> dict[str, Path]:
    """The files of all cities, by city and name without its ending."""
    cities = class_folders(folder) if folder.is_dir() else []
    found = [file for city in cities for file in visible(city) if file.name.endswith(ending)]
    return {f"{file.parent.name}/{file.name.removesuffix(ending)}": file for file in found}
