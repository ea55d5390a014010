"""COCO: `coco:ROOT`, with ROOT/train2014, ROOT/val2014 and ROOT/annotations, as several labels per image; for the tasks
detection and instances also of 2017.

An annotation file is checked as a whole before any image is read. What would give a wrong result is refused, with the
file, the entry and what is valid. Fields that nobody reads may hold anything, or be missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vitrim.data.dataset import MultiLabelDataset, multi_hot
from vitrim.data.dense import DetectionDataset
from vitrim.data.objects import SLACK, Outline, areas, examine, from_corner_and_size, misfit
from vitrim.data.paths import check_files, existing, pick_split, read_text
from vitrim.data.readers import register_reader
from vitrim.errors import DataError

_SPLITS = ("train", "val")
LONGEST_SIDE = 2**16
"""Most pixels of a side of an image: more than a JPEG file can have."""
LARGEST_FLOAT = sys.float_info.max

_ABSENT = object()
_OUTLINE = "segmentation"
_ID = frozenset({int, str})
_WHOLE = frozenset({int})
_NUMBER = frozenset({int, float})
_TRUTH = frozenset({int, bool})
_TEXT = frozenset({str})
_LIST = frozenset({list})
_VALID_ID = "a whole number or a text"
_VALID_BOX = "4 finite numbers x, y, width, height, neither width nor height negative"


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
    root, source = existing(path), f"coco:{path}"
    present = [name for name in _SPLITS if _annotations(root, name).is_file()]
    if not present:
        raise DataError(f"{source} has no {_annotations(Path(), 'train')} and no {_annotations(Path(), 'val')}")
    name = pick_split(split, present, source)
    file = _annotations(root, name)
    found, _ = _common(file, source, _without_outline)
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
    root, source = existing(path), f"coco:{path}"
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


# ---- annotation files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Annotations:
    """The content of a file.

    Attributes:
        file: where it was read.
        class_names: in the order of the file.
        images: the entry of every image by its id, in the order of the file.
        objects: for each image the entries of its objects, in the order of the file; of `read_objects` without those
            whose box has no area. There, `segmentation` is an `Outline`, or not there.
        place: the place of every category's id in ``class_names``.
    """

    file: Path
    class_names: list[str]
    images: dict[int | str, dict[str, Any]]
    objects: dict[int | str, list[dict[str, Any]]]
    place: dict[int | str, int]


def read_objects(file: Path, source: str, *, outlines: bool) -> Annotations:
    """Read the objects of every image.

    Args:
        file: in JSON.
        source: of the data, for messages.
        outlines: read them too.

    Raises:
        DataError: as `_common`; or a size, a box, an area, a truth or an outline that is missing, of another form, out
            of its range or beyond its image.
    """
    found, annotations = _common(file, source, _with_outline if outlines else _without_outline)
    images, valid = Entries(list(found.images.values()), "image", file), f"a whole number from 1 to {LONGEST_SIDE}"
    sides = []
    for field in ("height", "width"):
        side = images.column(field, _WHOLE, valid)
        images.require(field, (1 <= pixels <= LONGEST_SIDE for pixels in side), valid)
        sides.append(side)
    sizes = dict(zip(found.images, zip(*sides, strict=True), strict=True))
    sizes_of = [sizes[row["image_id"]] for row in annotations.rows]
    empty = _check_boxes(annotations, np.asarray(sizes_of, dtype=np.float64).reshape(-1, 2))
    if not set(annotations.column("iscrowd", _TRUTH, "0 or 1")) <= {0, 1}:
        annotations.require("iscrowd", (row["iscrowd"] in (0, 1) for row in annotations.rows), "0 or 1")
    valid = "a number from 0 to the pixels of its image"
    given = annotations.column("area", _NUMBER, valid)
    for number, (area, (height, width)) in enumerate(zip(given, sizes_of, strict=True)):
        if not 0 <= area <= (height + SLACK) * (width + SLACK):
            annotations.refuse(number, "area", valid)
    objects: dict[int | str, list[dict[str, Any]]] = {image: [] for image in found.images}
    for number, (row, size, without_area) in enumerate(zip(annotations.rows, sizes_of, empty, strict=True)):
        if without_area:
            continue
        objects[row["image_id"]].append(row)
        if not outlines:
            continue
        outline: Outline | None = row.get(_OUTLINE)
        if outline is not None:
            problem = outline.problem or misfit(outline, size)
            if problem:
                raise DataError(f"the outline of {annotations.where(number)} {problem}")
        elif row["iscrowd"]:  # a crowd without an outline gets that of its box
            x, y, width, height = row["bbox"]
            right, bottom = x + width, y + height
            row[_OUTLINE] = Outline(encoded=json.dumps([[x, y, right, y, right, bottom, x, bottom]]).encode())
        else:
            raise DataError(
                f"{annotations.where(number)} has no outline, which task instances needs; valid: a {_OUTLINE} of "
                "polygons or run lengths"
            )
    return Annotations(file, found.class_names, found.images, objects, found.place)


# ---- checks of columns -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entries:
    """The entries of one list of a file, checked column by column: the files of 2017 have 860,000 annotations.

    Attributes:
        rows: the entries.
        what: what one is called.
        file: where they were read, for messages.
    """

    rows: list[dict[str, Any]]
    what: str
    file: Path

    @classmethod
    def of(cls, content: dict[str, Any], name: str, what: str, file: Path) -> Entries:
        """Return the list ``name`` of a file.

        Raises:
            DataError: it is missing or no list, or an entry is no object.
        """
        rows = content.get(name, _ABSENT)
        if type(rows) is not list:
            found = f"has no {name}" if rows is _ABSENT else f"has {name} {_shown(rows)}"
            raise DataError(f"{file} is not of COCO's form: it {found}; valid: a list of objects")
        if not set(map(type, rows)) <= {dict}:
            number = next(number for number, row in enumerate(rows) if type(row) is not dict)
            raise DataError(f"{what} {number} in {file} is {_shown(rows[number])}; valid: an object")
        return cls(rows, what, file)

    def column(self, field: str, kinds: frozenset[type], valid: str) -> list[Any]:
        """Return a field of every entry, refused if it is missing or of another type."""
        values = [row.get(field, _ABSENT) for row in self.rows]
        if not set(map(type, values)) <= kinds:
            self.require(field, (type(value) in kinds for value in values), valid)
        return values

    def ids(self) -> list[Any]:
        """Return the ids, refused if two are the same."""
        values = self.column("id", _ID, _VALID_ID)
        self.unique("id", values)
        return values

    def unique(self, field: str, values: Sequence[Any]) -> None:
        """Refuse a value that an earlier entry has."""
        if len(set(values)) == len(values):
            return
        first: dict[Any, int] = {}
        for number, value in enumerate(values):
            if value in first:
                self.refuse(number, field, f"one of its own, {self.what} {first[value]} has this one")
            first[value] = number

    def require(self, field: str, fine: Iterable[bool], valid: str) -> None:
        """Refuse the first entry whose field is not fine."""
        for number, one in enumerate(fine):
            if not one:
                self.refuse(number, field, valid)

    def refuse(self, number: int, field: str, valid: str) -> NoReturn:
        """Raise the error of one entry."""
        row = self.rows[number]
        found = f"has {field} {_shown(row[field])}" if field in row else f"has no {field}"
        raise DataError(f"{self.where(number)} {found}; valid: {valid}")

    def where(self, number: int) -> str:
        """Name an entry by its place and by its id, which can be looked for in the file."""
        name = self.rows[number].get("id")
        known = f" (id {_shown(name)})" if type(name) in _ID else ""
        return f"{self.what} {number}{known} in {self.file}"


def _shown(value: Any) -> str:
    """A value as the file has it, cut off if it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deep"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


# ---- the file --------------------------------------------------------------------------------------------------------


def _common(file: Path, source: str, hook: Any) -> tuple[Annotations, Entries]:
    """Read a file and check what every task reads.

    Args:
        file: in JSON.
        source: of the data, for messages.
        hook: for each object of the file, changed in place.

    Raises:
        DataError: it is missing, not JSON or of another form; two entries of one id; an annotation of an image or a
            category that is not in its lists; two images of one file.
    """
    text = read_text(file, source)
    try:
        content = json.loads(text, object_hook=hook)
    except ValueError as error:  # not JSON, or a number of thousands of digits
        raise DataError(f"cannot read {file}: it is not JSON: {error}") from error
    except RecursionError as error:
        raise DataError(f"cannot read {file}: its lists are nested too deep for JSON") from error
    if type(content) is not dict:
        raise DataError(f"{file} is not of COCO's form: {_shown(content)}; valid: an object with images, annotations")
    categories = Entries.of(content, "categories", "category", file)
    if not categories.rows:
        raise DataError(f"{file} lists no categories; valid: at least one")
    place = {name: number for number, name in enumerate(categories.ids())}
    class_names = categories.column("name", _TEXT, "a text")
    categories.require("name", (bool(name.strip()) for name in class_names), "a text that is not empty")
    categories.unique("name", class_names)
    images = Entries.of(content, "images", "image", file)
    by_id = dict(zip(images.ids(), images.rows, strict=True))
    names = images.column("file_name", _TEXT, "the name of a file")
    fine = ("\0" not in name and Path(name).name.strip() not in ("", "..") for name in names)
    images.require("file_name", fine, "the name of a file")
    images.unique("file_name", names)
    annotations = Entries.of(content, "annotations", "annotation", file)
    if any("id" in row for row in annotations.rows):  # nobody reads them
        annotations.ids()
    objects: dict[int | str, list[dict[str, Any]]] = {image: [] for image in by_id}
    for field, known, what in (("image_id", by_id, "image"), ("category_id", place, "category")):
        values = annotations.column(field, _ID, f"the id of one, {_VALID_ID}")
        if not known.keys() >= set(values):
            number, value = next((number, value) for number, value in enumerate(values) if value not in known)
            given = f"{annotations.where(number)} is of {what} {_shown(value)}"
            raise DataError(f"{given}, which is not in its list; valid: the ids of {len(known)}")
    for row in annotations.rows:
        objects[row["image_id"]].append(row)
    return Annotations(file, class_names, by_id, objects, place), annotations


def _without_outline(value: dict[str, Any]) -> dict[str, Any]:
    """Drop outlines while a file is read: they are most of it, and as Python lists they take several GB."""
    value.pop(_OUTLINE, None)
    return value


def _with_outline(value: dict[str, Any]) -> dict[str, Any]:
    """Keep outlines as bytes, which are much smaller, and what a check of them found."""
    if value.get(_OUTLINE) not in (None, []):
        found = examine(value[_OUTLINE])
        value[_OUTLINE] = found if found.problem else found._replace(encoded=json.dumps(value[_OUTLINE]).encode())
    else:
        value.pop(_OUTLINE, None)  # null and [] say that there is none
    return value


# ---- objects ---------------------------------------------------------------------------------------------------------


def _check_boxes(annotations: Entries, sizes: np.ndarray[Any, Any]) -> list[bool]:
    """Check all boxes, and return which have no area.

    Args:
        annotations: n of them.
        sizes: (n, 2), height and width of the image of each.
    """
    given = annotations.column("bbox", _LIST, _VALID_BOX)
    if not set(map(len, given)) <= {4} or not set(map(type, chain.from_iterable(given))) <= _NUMBER:
        annotations.require("bbox", (len(box) == 4 and {*map(type, box)} <= _NUMBER for box in given), _VALID_BOX)
    try:
        boxes = np.array(given, dtype=np.float64).reshape(-1, 4)
    except OverflowError:  # a whole number that no float can hold
        boxes = np.array([[value if abs(value) <= LARGEST_FLOAT else inf for value in box] for box in given])
    fine = np.isfinite(boxes).all(axis=1) & (boxes[:, 2:] >= 0).all(axis=1)
    if not fine.all():
        annotations.refuse(int(fine.argmin()), "bbox", _VALID_BOX)
    corners = boxes.copy()
    corners[:, 2:] += corners[:, :2]
    stored = corners.astype(np.float32)
    empty = np.any(stored[:, 2:] <= stored[:, :2], axis=1)
    limits = sizes[:, ::-1]
    beyond = (corners[:, :2] < -SLACK).any(axis=1) | (corners[:, 2:] > limits + SLACK).any(axis=1)
    gone = areas(np.clip(stored, 0, np.tile(limits, 2))) <= 0
    wrong = beyond & (boxes[:, 2:] > 0).all(axis=1) | gone & ~empty
    if wrong.any():
        number = int(wrong.argmax())
        width, height = limits[number].astype(int)
        annotations.refuse(number, "bbox", f"one within its image of {width} x {height} pixels")
    found: list[bool] = empty.tolist()
    return found
