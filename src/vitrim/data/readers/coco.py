"""COCO 2014 as several labels per image: `coco:ROOT`, with ROOT/train2014, ROOT/val2014 and ROOT/annotations."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from vitrim.data.dataset import MultiLabelDataset, multi_hot
from vitrim.data.errors import DataError
from vitrim.data.paths import check_files, existing, from_home, pick_split, read_text
from vitrim.data.readers import register_reader


@register_reader("coco")
def read_coco(path: str, *, split: str | None = None) -> MultiLabelDataset:
    """COCO 2014: which of the 80 classes are in an image.

    An image is of a class if any of its annotations is, of whatever area and crowds included (published readers keep
    one row for small, medium and large areas and then take any of them, which is the same). Images without annotations
    are left out. Classes are in the order of the JSON file.

    Args:
        path: the root, with annotations/instances_train2014.json, train2014/ and the same for val.
        split: `train` or `val` (also `validation`); may be left out where only one JSON file is on disk.

    Returns:
        A dataset in the order of the images in the JSON file.

    Raises:
        DataError: a JSON file or an image that is missing, a file of another form, an annotation of an unknown image
            or class, or no such split.
    """
    root, source = existing(from_home(path)), f"coco:{path}"
    present = [name for name in ("train", "val") if _annotations(root, name).is_file()]
    if not present:
        raise DataError(f"{source} has no {_annotations(Path(), 'train')} and no {_annotations(Path(), 'val')}")
    name = pick_split(split, present, source)
    file = _annotations(root, name)
    content = _read(file, source)
    try:
        class_names = [category["name"] for category in content["categories"]]
        place = {category["id"]: number for number, category in enumerate(content["categories"])}
        names = {image["id"]: image["file_name"] for image in content["images"]}
        classes = _classes_of_images(content["annotations"], place, names, file)
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} is not of COCO's form: {_problem(error)}") from error
    images = [image for image in names if image in classes]
    paths = [root / f"{name}2014" / names[image] for image in images]
    check_files(paths, source)
    targets = multi_hot([classes[image] for image in images], len(class_names))
    return MultiLabelDataset(paths, targets, class_names=class_names, source=source, split=name)


def _annotations(root: Path, split: str) -> Path:
    return root / "annotations" / f"instances_{split}2014.json"


def _read(file: Path, source: str) -> Any:
    try:
        # outlines are most of the file, and as Python lists they take several GB: dropped while it is read
        return json.loads(read_text(file, source), object_hook=_without_outline)
    except json.JSONDecodeError as error:
        raise DataError(f"cannot read {file}: {error}") from error


def _without_outline(value: dict[str, Any]) -> dict[str, Any]:
    value.pop("segmentation", None)
    return value


def _classes_of_images(
    annotations: list[dict[str, Any]], place: dict[int, int], names: dict[int, str], file: Path
) -> dict[int, list[int]]:
    """For each image that has annotations, the places of their classes."""
    classes: dict[int, list[int]] = defaultdict(list)
    for number, annotation in enumerate(annotations):
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in names:
            raise DataError(f"annotation {number} in {file} is of image {image}, which is not in its list of images")
        if category not in place:
            raise DataError(f"annotation {number} in {file} is of class {category}; valid: {len(place)} classes")
        classes[image].append(place[category])
    return classes


def _problem(error: KeyError | TypeError) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
