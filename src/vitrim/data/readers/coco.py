"""COCO: `coco:ROOT`, with ROOT/train2014, ROOT/val2014 and ROOT/annotations, as several labels per image; for the tasks
detection and instances also of 2017."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrim.data.boxes import from_corner_and_size
from vitrim.data.dataset import MultiLabelDataset, multi_hot
from vitrim.data.dense import DetectionDataset
from vitrim.data.errors import DataError
from vitrim.data.paths import check_files, existing, from_home, pick_split, read_text
from vitrim.data.readers import register_reader

_SPLITS = ("train", "val")
_OUTLINE = "segmentation"


@register_reader("coco", "multilabel")
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
    present = [name for name in _SPLITS if _annotations(root, name).is_file()]
    if not present:
        raise DataError(f"{source} has no {_annotations(Path(), 'train')} and no {_annotations(Path(), 'val')}")
    name = pick_split(split, present, source)
    file = _annotations(root, name)
    content = _read(file, source, _without_outline)
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


@register_reader("coco", "detection", "instances")
def read_coco_objects(path: str, *, split: str | None = None, task: str = "detection") -> DetectionDataset:
    """COCO 2017 or 2014, boxes and, for the task `instances`, outlines.

    Classes are in the order of the JSON file. Images without objects, or with crowds only, are left out of the train
    split and kept in others. Boxes without area, of which the published train files have a few, are left out.

    Args:
        path: the root, with annotations/instances_train2017.json, train2017/ and the same for val; 2014 is read where
            2017 is not there.
        split: `train` or `val` (also `validation`); may be left out where only one JSON file is on disk.
        task: `detection` or `instances`.

    Returns:
        A dataset in the order of the images in the JSON file. Areas are those of the JSON file, which are of outlines.

    Raises:
        DataError: a JSON file or an image that is missing, a file of another form, an annotation of an unknown image
            or class, one without an outline where outlines are asked for, a box beyond its image, or no such split.
        MissingPackageError: the task is instances and `pycocotools` is not installed.
    """
    root, source = existing(from_home(path)), f"coco:{path}"
    years = {name: year for year in (2014, 2017) for name in _SPLITS if _annotations(root, name, year).is_file()}
    if not years:
        raise DataError(
            f"{source} has no {_annotations(Path(), 'train', 2017)} and no {_annotations(Path(), 'val', 2017)}"
        )
    name = pick_split(split, sorted(years), source)
    file = _annotations(root, name, years[name])
    content = _read(file, source, _with_outline if task == "instances" else _without_outline)
    try:
        class_names = [category["name"] for category in content["categories"]]
        place = {category["id"]: number for number, category in enumerate(content["categories"])}
        images = {image["id"]: image for image in content["images"]}
        objects = _objects_of_images(content["annotations"], place, images, file)
        chosen = [image for image in images if name != "train" or any(not each["iscrowd"] for each in objects[image])]
        paths = [root / f"{name}{years[name]}" / images[image]["file_name"] for image in chosen]
        sizes = [(images[image]["height"], images[image]["width"]) for image in chosen]
        rows = [objects[image] for image in chosen]
        columns = {key: [[each[key] for each in row] for row in rows] for key in ("iscrowd", "area")}
        labels = [[place[each["category_id"]] for each in row] for row in rows]
        outlines = [_outlines(row, file) for row in rows] if task == "instances" else None
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} is not of COCO's form: {_problem(error)}") from error
    boxes = [[each["bbox"] for each in row] for row in rows]
    check_files(paths, source)
    return DetectionDataset(
        paths,
        [from_corner_and_size(each, f"image {row} of {source}") for row, each in enumerate(boxes)],
        labels,
        crowd=columns["iscrowd"],
        area=columns["area"],
        outlines=outlines,
        sizes=sizes,
        class_names=class_names,
        source=source,
        split=name,
    )


def _objects_of_images(
    annotations: list[dict[str, Any]], place: dict[int, int], images: dict[int, Any], file: Path
) -> dict[int, list[dict[str, Any]]]:
    """For each image its annotations but for those whose box has no area."""
    objects: dict[int, list[dict[str, Any]]] = {image: [] for image in images}
    for number, annotation in enumerate(annotations):
        _check_known(annotation, number, place, images, file)
        box = annotation["bbox"]
        if len(box) != 4 or not (box[2] == 0 or box[3] == 0):  # others are refused with the dataset
            objects[annotation["image_id"]].append(annotation)
    return objects


def _outlines(row: list[dict[str, Any]], file: Path) -> list[bytes]:
    for annotation in row:
        if annotation.get(_OUTLINE) in (None, b"null", b"[]"):
            raise DataError(f"annotation {annotation.get('id')} in {file} has no outline, which task instances needs")
    return [annotation[_OUTLINE] for annotation in row]


def _check_known(annotation: Any, number: int, place: dict[int, int], images: Any, file: Path) -> None:
    image, category = annotation["image_id"], annotation["category_id"]
    if image not in images:
        raise DataError(f"annotation {number} in {file} is of image {image}, which is not in its list of images")
    if category not in place:
        raise DataError(f"annotation {number} in {file} is of class {category}; valid: {len(place)} classes")


def _annotations(root: Path, split: str, year: int = 2014) -> Path:
    return root / "annotations" / f"instances_{split}{year}.json"


def _read(file: Path, source: str, hook: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    try:
        return json.loads(read_text(file, source), object_hook=hook)
    except json.JSONDecodeError as error:
        raise DataError(f"cannot read {file}: {error}") from error


def _without_outline(value: dict[str, Any]) -> dict[str, Any]:
    """Drop outlines while a file is read: they are most of it, and as Python lists they take several GB."""
    value.pop(_OUTLINE, None)
    return value


def _with_outline(value: dict[str, Any]) -> dict[str, Any]:
    """Keep outlines as bytes, which are much smaller."""
    if _OUTLINE in value:
        value[_OUTLINE] = json.dumps(value[_OUTLINE]).encode()
    return value


def _classes_of_images(
    annotations: list[dict[str, Any]], place: dict[int, int], names: dict[int, str], file: Path
) -> dict[int, list[int]]:
    """For each image that has annotations, the places of their classes."""
    classes: dict[int, list[int]] = defaultdict(list)
    for number, annotation in enumerate(annotations):
        _check_known(annotation, number, place, names, file)
        classes[annotation["image_id"]].append(place[annotation["category_id"]])
    return classes


def _problem(error: KeyError | TypeError) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
