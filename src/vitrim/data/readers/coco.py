"""COCO: `coco:ROOT`, with ROOT/train2014, ROOT/val2014 and ROOT/annotations, as several labels per image; for the tasks
detection and instances also of 2017."""

from __future__ import annotations

from pathlib import Path

from vitrim.data.annotations import read_classes_of_images, read_objects
from vitrim.data.boxes import from_corner_and_size
from vitrim.data.dataset import MultiLabelDataset, multi_hot
from vitrim.data.dense import DetectionDataset
from vitrim.data.errors import DataError
from vitrim.data.paths import check_files, existing, from_home, pick_split
from vitrim.data.readers import register_reader

_SPLITS = ("train", "val")


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
    found = read_classes_of_images(file, source)
    rows = {image: objects for image, objects in found.objects.items() if objects}
    paths = [root / f"{name}2014" / found.images[image]["file_name"] for image in rows]
    check_files(paths, source)
    classes = [[found.place[each["category_id"]] for each in objects] for objects in rows.values()]
    targets = multi_hot(classes, len(found.class_names))
    return MultiLabelDataset(paths, targets, class_names=found.class_names, source=source, split=name)


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
    found = read_objects(file, source, outlines=task == "instances")
    images, rows = [], []
    for image, objects in zip(found.images.values(), found.objects.values(), strict=True):
        if name != "train" or any(not each["iscrowd"] for each in objects):
            images.append(image)
            rows.append(objects)
    paths = [root / f"{name}{years[name]}" / image["file_name"] for image in images]
    check_files(paths, source)
    boxes = [[each["bbox"] for each in row] for row in rows]
    return DetectionDataset(
        paths,
        [from_corner_and_size(each, f"image {row} of {source}") for row, each in enumerate(boxes)],
        [[found.place[each["category_id"]] for each in row] for row in rows],
        crowd=[[each["iscrowd"] for each in row] for row in rows],
        area=[[each["area"] for each in row] for row in rows],
        outlines=[[each["segmentation"].encoded for each in row] for row in rows] if task == "instances" else None,
        sizes=[(image["height"], image["width"]) for image in images],
        class_names=found.class_names,
        source=source,
        split=name,
    )


def _annotations(root: Path, split: str, year: int = 2014) -> Path:
    return root / "annotations" / f"instances_{split}{year}.json"
