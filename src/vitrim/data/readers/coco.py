"""COCO: `coco:ROOT`, with ROOT/train2014, ROOT/val2014 and ROOT/annotations; for objects also of 2017.

An annotation file is checked as a whole before any image is read; fields that are not read may hold anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vitrim.data.dataset import MultiLabelDataset, multi_hot
from vitrim.data.dense import DetectionDataset
from vitrim.data.objects import SLACK, Outline, examine, from_corner_and_size, misfit, outside, shown
from vitrim.data.paths import check_files, existing, pick_split, read_text
from vitrim.data.readers import register_reader
from vitrim.errors import DataError
from vitrim.files import parse_json

_SPLITS = ("train", "val")
LONGEST_SIDE = 2**16
"""Most pixels per side of an image, more than a JPEG file can have."""
LARGEST_FLOAT = sys.float_info.max

_OUTLINE = "segmentation"


@register_reader("coco", "multilabel")
def read_coco(path: str, *, split: str | None = None) -> MultiLabelDataset:
    """COCO 2014 with several labels per image: which of the 80 classes, in the order of the JSON file, it shows.

    An image has the class of each of its annotations, of any area, crowds included. (Published readers keep separate
    rows for small, medium and large areas and combine them, with the same result.) Images without annotations are left
    out.

    Expects annotations/instances_train2014.json and train2014/ below ``path``, and the same for val.
    """
    root, source = existing(path), f"coco:{path}"
    name, folder, file = _chosen(root, source, split, 2014)
    found = read_annotations(file, source, IMAGE, LABEL, _without_outline)
    # An image without annotations has no label to learn.
    rows = {image: objects for image, objects in found.by_image(found.entries.rows).items() if objects}
    paths = [folder / found.images[image]["file_name"] for image in rows]
    check_files(paths, source)
    classes = [[found.place[each["category_id"]] for each in objects] for objects in rows.values()]
    targets = multi_hot(classes, len(found.class_names))
    return MultiLabelDataset(paths, targets, class_names=found.class_names, source=source, split=name)


@register_reader("coco", "detection", "instances")
def read_coco_objects(path: str, *, split: str | None = None, task: str = "detection") -> DetectionDataset:
    """COCO 2017, or else 2014: boxes and, for the task `instances`, outlines, in the order of the JSON file.

    Images without objects, or with crowds only, are left out of the train split only. Boxes without area, of which the
    published train files have a few, are left out. Areas are the file's, which are those of outlines.

    Expects annotations/instances_train2017.json and train2017/ below ``path``, and the same for val.
    """
    root, source = existing(path), f"coco:{path}"
    name, folder, file = _chosen(root, source, split, 2014, 2017)
    outlines = task == "instances"
    found = read_annotations(file, source, SIZED_IMAGE, OBJECT, _with_outline if outlines else _without_outline)
    images, rows = [], []
    for image, objects in found.by_image(with_area(found, outlines=outlines)).items():
        # Nothing to learn there; evaluation keeps them, because a detection on them is wrong.
        if name != "train" or any(not each["iscrowd"] for each in objects):
            images.append(found.images[image])
            rows.append(objects)
    paths = [folder / image["file_name"] for image in images]
    check_files(paths, source)
    boxes = [[each["bbox"] for each in row] for row in rows]
    return DetectionDataset(
        paths,
        [from_corner_and_size(each, f"image {row} of {source}") for row, each in enumerate(boxes)],
        [[found.place[each["category_id"]] for each in row] for row in rows],
        crowd=[[each["iscrowd"] for each in row] for row in rows],
        area=[[each["area"] for each in row] for row in rows],
        outlines=[[each["segmentation"].encoded for each in row] for row in rows] if outlines else None,
        sizes=[(image["height"], image["width"]) for image in images],
        class_names=found.class_names,
        source=source,
        split=name,
    )


def _chosen(root: Path, source: str, split: str | None, *years: int) -> tuple[str, Path, Path]:
    """A split's name, its folder of images and its annotation file, of the latest of ``years`` that is on disk."""
    files = {(name, year): Path("annotations", f"instances_{name}{year}.json") for year in years for name in _SPLITS}
    present = {name: year for (name, year), file in files.items() if (root / file).is_file()}
    expected = " and no ".join(str(files[name, years[-1]]) for name in _SPLITS)
    name = pick_split(split, sorted(present), source, expected)
    return name, root / f"{name}{present[name]}", root / files[name, present[name]]


# ---- annotation files ------------------------------------------------------------------------------------------------

Id = int | str
Fields = dict[str, tuple[Callable[[Any], bool], str]]
"""Fields of an entry by name: a check, and what is valid in words."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST_FLOAT


def _is_file(value: Any) -> bool:
    return type(value) is str and "\0" not in value and Path(value).name.strip() not in ("", "..")


def _is_box(value: Any) -> bool:
    return type(value) is list and len(value) == 4 and all(map(_is_number, value)) and min(value[2:]) >= 0


_IS_ID = (lambda value: type(value) in (int, str), "a whole number or a text")
_IS_ID_OF_ONE = (_IS_ID[0], f"the id of one, {_IS_ID[1]}")
_IS_SIDE = (lambda value: type(value) is int and 1 <= value <= LONGEST_SIDE, f"a whole number from 1 to {LONGEST_SIDE}")
_IS_AREA = (lambda value: _is_number(value) and value >= 0, "a number from 0 to the pixels of its image")

ID: Fields = {"id": _IS_ID}
CATEGORY: Fields = {"name": (lambda value: type(value) is str and value.strip() != "", "a text that is not empty")}
IMAGE: Fields = {"file_name": (_is_file, "the name of a file")}
SIZED_IMAGE: Fields = {**IMAGE, "height": _IS_SIDE, "width": _IS_SIDE}
LABEL: Fields = {"image_id": _IS_ID_OF_ONE, "category_id": _IS_ID_OF_ONE}
OBJECT: Fields = {
    **LABEL,
    "bbox": (_is_box, "4 finite numbers x, y, width, height, neither width nor height negative"),
    "iscrowd": (lambda value: type(value) in (int, bool) and value in (0, 1), "0 or 1"),
    "area": _IS_AREA,
}


@dataclass(frozen=True)
class Entries:
    """The entries of one list of a file: ``rows``, called ``what`` in messages, from ``file``."""

    rows: list[dict[str, Any]]
    what: str
    file: Path

    @classmethod
    def of(cls, content: Any, name: str, what: str, file: Path) -> Entries:
        """The list ``name`` of a file."""
        rows = content.get(name) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{file} is not of COCO's form: it has no {name} that are a list of objects")
        return cls(rows, what, file)

    def check(self, fields: Fields, *unique: str) -> None:
        """Refuse an entry with an invalid value in one of ``fields``, or a repeated one in a ``unique`` field."""
        for number, row in enumerate(self.rows):
            for field, (is_right, valid) in fields.items():
                if field not in row or not is_right(row[field]):
                    self.refuse(number, field, valid)
        for field in unique:
            first: dict[Any, int] = {}
            for number, row in enumerate(self.rows):
                earlier = first.setdefault(row[field], number)
                if earlier != number:
                    self.refuse(number, field, f"one of its own, {self.what} {earlier} has this one")

    def refuse(self, number: int, field: str, valid: str) -> NoReturn:
        row = self.rows[number]
        found = f"has {field} {shown(row[field])}" if field in row else f"has no {field}"
        raise DataError(f"{self.where(number)} {found}; valid: {valid}")

    def where(self, number: int) -> str:
        """The name of an entry: its index, and its id to search for in the file."""
        name = self.rows[number].get("id")
        known = f" (id {shown(name)})" if type(name) in (int, str) else ""
        return f"{self.what} {number}{known} in {self.file}"


@dataclass(frozen=True)
class Annotations:
    """The content of a file.

    Attributes:
        class_names: in the order of the file.
        place: the index in ``class_names`` of every category id.
        images: the entry of every image by id, in the order of the file.
        entries: the annotations; after `_with_outline`, ``segmentation`` is an `Outline`, or missing.
    """

    class_names: list[str]
    place: dict[Id, int]
    images: dict[Id, dict[str, Any]]
    entries: Entries

    def by_image(self, rows: Iterable[dict[str, Any]]) -> dict[Id, list[dict[str, Any]]]:
        """``rows`` of annotations grouped by image, in the order of the file."""
        found: dict[Id, list[dict[str, Any]]] = {image: [] for image in self.images}
        for row in rows:
            found[row["image_id"]].append(row)
        return found


def read_annotations(file: Path, source: str, image: Fields, annotation: Fields, hook: Any) -> Annotations:
    """Read and check an annotation file: the fields of each ``image`` and ``annotation``; ``hook`` changes objects in
    place.
    """
    content = parse_json(read_text(file, source), file, DataError, hook=hook)
    categories = Entries.of(content, "categories", "category", file)
    categories.check({**ID, **CATEGORY}, "id", "name")
    if not categories.rows:
        raise DataError(f"{file} lists no categories; valid: at least one")
    images = Entries.of(content, "images", "image", file)
    images.check({**ID, **image}, "id", "file_name")
    annotations = Entries.of(content, "annotations", "annotation", file)
    if any("id" in row for row in annotations.rows):  # they are not read
        annotations.check(ID, "id")
    annotations.check(annotation)
    place = {row["id"]: number for number, row in enumerate(categories.rows)}
    by_id = {row["id"]: row for row in images.rows}
    for number, row in enumerate(annotations.rows):
        for known, what in ((by_id, "image"), (place, "category")):
            if row[f"{what}_id"] not in known:
                given = f"{annotations.where(number)} is of {what} {shown(row[f'{what}_id'])}"
                raise DataError(f"{given}, which is not in its list; valid: the ids of {len(known)}")
    return Annotations([row["name"] for row in categories.rows], place, by_id, annotations)


def _without_outline(value: dict[str, Any]) -> dict[str, Any]:
    """Drop outlines while parsing: they are most of a file, several GB as Python lists."""
    value.pop(_OUTLINE, None)
    return value


def _with_outline(value: dict[str, Any]) -> dict[str, Any]:
    """Keep outlines as bytes, which are much smaller, with the result of their check."""
    if value.get(_OUTLINE) not in (None, []):
        found = examine(value[_OUTLINE])
        value[_OUTLINE] = found if found.problem else found._replace(encoded=json.dumps(value[_OUTLINE]).encode())
    else:
        value.pop(_OUTLINE, None)  # null and [] mean none
    return value


def with_area(annotations: Annotations, *, outlines: bool) -> list[dict[str, Any]]:
    """The annotations whose box has an area, each with its `Outline` if ``outlines``; a crowd without one has its
    box's.
    """
    entries, kept = annotations.entries, list[dict[str, Any]]()
    owners = (annotations.images[row["image_id"]] for row in entries.rows)
    sizes: list[tuple[int, int]] = [(image["height"], image["width"]) for image in owners]
    empty = _check_boxes(entries, np.array(sizes).reshape(-1, 2))
    for number, (row, (height, width), without_area) in enumerate(zip(entries.rows, sizes, empty, strict=True)):
        if row["area"] > (height + SLACK) * (width + SLACK):
            entries.refuse(number, "area", _IS_AREA[1])
        if without_area:
            continue
        kept.append(row)
        outline: Outline | None = row.get(_OUTLINE)
        if outlines and outline is not None:
            problem = outline.problem or misfit(outline, (height, width))
            if problem:
                raise DataError(f"the outline of {entries.where(number)} {problem}")
        elif outlines and row["iscrowd"]:
            x, y, wide, tall = row["bbox"]
            # Clockwise from the top left.
            corners = [x, y, x + wide, y, x + wide, y + tall, x, y + tall]
            row[_OUTLINE] = Outline(encoded=json.dumps([corners]).encode())
        elif outlines:
            raise DataError(
                f"{entries.where(number)} has no outline, which task instances needs; valid: a {_OUTLINE} of polygons "
                "or run lengths"
            )
    return kept


def _check_boxes(annotations: Entries, sizes: np.ndarray[Any, Any]) -> list[bool]:
    """Check that all boxes lie in their images, of ``sizes`` (n, 2) heights and widths; return which have no area."""
    boxes = np.array([row["bbox"] for row in annotations.rows], dtype=np.float64).reshape(-1, 4)
    corners = boxes.copy()
    corners[:, 2:] += corners[:, :2]
    # Empty in float32, in which boxes are stored: a sliver may have an area in float64 alone.
    # Boxes are kept in float32, in which a sliver may have no area.
    stored = corners.astype(np.float32)
    empty = np.any(stored[:, 2:] <= stored[:, :2], axis=1)
    beyond, gone = outside(corners, sizes)
    # A box without area may lie anywhere, it is left out; one with an area must have some of it in its image.
    wrong = beyond & (boxes[:, 2:] > 0).all(axis=1) | gone & ~empty
    if wrong.any():
        number = int(wrong.argmax())
        height, width = sizes[number]
        annotations.refuse(number, "bbox", f"one within its image of {width} x {height} pixels")
    found: list[bool] = empty.tolist()
    return found
