"""ImageNet: `imagenet:ROOT`, with ROOT/train/WNID/*.JPEG and ROOT/val/WNID/*.JPEG."""

from __future__ import annotations

import re

from vitrim.data.dataset import ImageDataset
from vitrim.data.folders import class_folders, has_images, read_classes
from vitrim.data.paths import existing, listed, pick_split
from vitrim.data.readers import register_reader
from vitrim.errors import DataError

_SPLITS = ("train", "val", "validation")
_WNID = re.compile(r"n\d{8}")


@register_reader("imagenet")
def read_imagenet(path: str, *, split: str | None = None) -> ImageDataset:
    """ImageNet, or a subset of its classes, in folders named by WordNet ids.

    Labels are places in the sorted ids of the train split, or of the validation split where there is no other on disk.
    A folder with all 1000 classes thus has the labels of every published model; one with fewer has labels of its own.
    Other folders and files in the root (devkit, test, meta.bin) are left alone.

    Args:
        path: the root.
        split: `train` or `val` (also `validation`); may be left out where only one is on disk.

    Returns:
        A dataset whose class names are the WordNet ids.

    Raises:
        DataError: no such folder or split, or class folders that are not named by WordNet ids.
    """
    root, source = existing(path), f"imagenet:{path}"
    present = [name for name in _SPLITS if (root / name).is_dir()]
    if not present:
        raise DataError(f"{source} has neither a folder train nor a folder val")
    name = pick_split(split, present, source)
    for each in present:
        folder = root / each
        if has_images(folder):
            raise DataError(
                f"images lie directly in {folder}: sort them into one folder per class, named by WordNet ids"
            )
        strange = [entry.name for entry in class_folders(folder) if not _WNID.fullmatch(entry.name)]
        if strange:
            raise DataError(f"folders in {folder} are not named by WordNet ids such as n01440764: {listed(strange)}")
    return read_classes(root / name, [root / each for each in present], source, name)
