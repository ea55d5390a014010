"""NUS-WIDE: `nus_wide:ROOT`, as published by the asymmetric-loss authors, with ROOT/nus_wid_data.csv and the images
it names, or as first published, with lists of images and a file of zeros and ones per concept."""

from __future__ import annotations

import ast
import csv
import re
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from vitrim.data.dataset import MultiLabelDataset, multi_hot
from vitrim.data.paths import check_files, existing, pick_split, read_rows, read_text
from vitrim.data.readers import register_reader
from vitrim.errors import DataError

_FILE = "nus_wid_data.csv"
_SPLITS = ("train", "val")
_LISTS = {"train": "TrainImagelist.txt", "test": "TestImagelist.txt"}
_LABELS = re.compile(r"Labels_(.+)_(Train|Test)\.txt")
_EVALUATION = ("test", "val", "valid", "validation")
_FORM = "path, label such as \"['clouds', 'sky']\", and train or val"
_NONE = ""


@dataclass(frozen=True)
class _ImageRow:
    path: str
    names: tuple[str, ...]
    split: str


@register_reader("nus_wide", "multilabel")
def read_nus_wide(path: str, *, split: str | None = None, empty_class: bool = False) -> MultiLabelDataset:
    """NUS-WIDE: the concepts in an image, in the order of the csv file or of the list.

    Classes are the sorted names of both splits. Images without a label are kept. The comparative study of Haurum et al.
    (2023) counts having no label as one more class, named '' and thus the first; ``empty_class`` does so, to load their
    weights or compare with their mAP.

    Without nus_wid_data.csv, expects the original distribution (Chua et al., 2009):

    * `ImageList/TrainImagelist.txt` and `TestImagelist.txt`: an image per line, as `actor\\0001_2124494179.jpg`;
    * `Groundtruth/TrainTestLabels/Labels_CONCEPT_Train.txt` and `..._Test.txt` (or `TrainTestLabels/` in the root): 0
      or 1 per line, for the images of the list in its order;
    * the images in `Flickr/`, `images/` or the root.

    Args:
        split: `train` or `val`; of the original distribution `train` or `test` (also `val`).
    """
    root, source = existing(path), f"nus_wide:{path}"
    if (root / _FILE).is_file():
        rows = _read(root / _FILE, source)
        name = pick_split(split, [each for each in _SPLITS if any(row.split == each for row in rows)], source, "images")
    elif (root / "ImageList").is_dir():
        name = pick_split("test" if split in _EVALUATION else split, list(_LISTS), source)
        rows = _original(root, source)
    else:
        raise DataError(f"{source} has neither {_FILE} nor ImageList/{_LISTS['train']}")
    labels = {row: (_NONE,) if empty_class and not row.names else row.names for row in rows}
    # Over both splits, so that all loaders agree on the order.
    class_names = sorted({label for names in labels.values() for label in names})
    if not class_names:
        raise DataError(f"no image of {source} has a label")
    chosen = [row for row in rows if row.split == name]
    paths = [root / row.path for row in chosen]
    check_files(paths, source)
    place = {label: number for number, label in enumerate(class_names)}
    targets = multi_hot([[place[label] for label in labels[row]] for row in chosen], len(class_names))
    return MultiLabelDataset(paths, targets, class_names=class_names, source=source, split=name)


def _original(root: Path, source: str) -> list[_ImageRow]:
    """The images of both lists, and the concepts whose files have a 1 in their line."""
    folder = next(
        (each for each in (root / "Groundtruth" / "TrainTestLabels", root / "TrainTestLabels") if each.is_dir()), None
    )
    if folder is None:
        raise DataError(f"{source} has no folder Groundtruth/TrainTestLabels")
    files = {tuple(found.groups()): each for each in folder.iterdir() if (found := _LABELS.fullmatch(each.name))}
    concepts = sorted({concept for concept, _ in files})
    if not concepts:
        raise DataError(f"{folder} has no file such as Labels_sky_Train.txt")
    # The folder of the photographs, which lists do not name; without one, paths count from the root.
    images = next((name for name in ("Flickr", "images") if (root / name).is_dir()), "")
    rows: list[_ImageRow] = []
    for split, name in _LISTS.items():
        listed = [line.strip().replace("\\", "/") for line in read_text(root / "ImageList" / name, source).splitlines()]
        paths = [line for line in listed if line]
        columns = []
        for concept in concepts:
            file = files.get((concept, split.title()), folder / f"Labels_{concept}_{split.title()}.txt")
            # One file per concept and split, a column of the table: line i is about image i of the list.
            values = [value for (value,) in read_rows(file, source, "([01])", "0 or 1")]
            if len(values) != len(paths):
                raise DataError(f"{file} has {len(values)} lines for the {len(paths)} images of {name}")
            columns.append(values)
        for path, marks in zip(paths, zip(*columns, strict=True), strict=True):
            names = tuple(concept for concept, mark in zip(concepts, marks, strict=True) if mark == "1")
            rows.append(_ImageRow(f"{images}/{path}" if images else path, names, split))
    return rows


def _read(file: Path, source: str) -> list[_ImageRow]:
    lines = csv.reader(StringIO(read_text(file, source)))
    rows: list[_ImageRow] = []
    try:
        header: list[str] = next(lines, [])
        if len(header) < 3 or header[1].strip() != "label":
            raise DataError(f"{file} begins with {','.join(header)!r}; expected a header of three columns: {_FORM}")
        for cells in filter(None, lines):
            names: Any = None
            with suppress(ValueError, SyntaxError):
                # literal_eval reads a list of texts and runs nothing; a cell of anything else leaves None.
                names = ast.literal_eval(cells[1]) if len(cells) > 2 and cells[0].strip() else None
            is_list = isinstance(names, list) and all(isinstance(name, str) and name for name in names)
            if not is_list or cells[2] not in _SPLITS:
                raise DataError(f"line {lines.line_num} of {file} is {','.join(cells)!r}; expected {_FORM}")
            rows.append(_ImageRow(cells[0], tuple(names), cells[2]))
    except csv.Error as error:
        raise DataError(f"cannot read {file}: {error} in line {lines.line_num}") from error
    return rows
