"""NUS-WIDE as given out by the asymmetric-loss authors: `nus_wide:ROOT`, with ROOT/nus_wid_data.csv and the images."""

from __future__ import annotations

import ast
import csv
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from vitrim.data.dataset import MultiLabelDataset, multi_hot
from vitrim.data.paths import check_files, existing, pick_split, read_text
from vitrim.data.readers import register_reader
from vitrim.errors import DataError

_FILE = "nus_wid_data.csv"
_SPLITS = ("train", "val")
_FORM = "path, label such as \"['clouds', 'sky']\", and train or val"
_NONE = ""


@dataclass(frozen=True)
class _Row:
    path: str
    names: tuple[str, ...]
    split: str


@register_reader("nus_wide", "multilabel")
def read_nus_wide(path: str, *, split: str | None = None, empty_class: bool = False) -> MultiLabelDataset:
    """NUS-WIDE: which concepts are in an image.

    Classes are the sorted names of both splits. Images without a label are kept: none of their classes is present. The
    comparative study of Haurum et al. (2023) counts having no label as one more class, named '' and thus the first;
    that is not done here, as it is no concept, unless `empty_class` asks for it (to load their weights, or to compare
    with their mAP).

    Args:
        path: the root, with nus_wid_data.csv and the images it names, relative to the root.
        split: `train` or `val` (also `validation`).
        empty_class: count having no label as a class.

    Returns:
        A dataset in the order of the csv file.

    Raises:
        DataError: the csv file or an image is missing, a row of another form, or no such split.
    """
    if not isinstance(empty_class, bool):
        raise DataError(f"empty_class is true or false, not {empty_class!r:.60}")
    root, source = existing(path), f"nus_wide:{path}"
    file = root / _FILE
    rows = _read(file, source)
    present = [name for name in _SPLITS if any(row.split == name for row in rows)]
    name = pick_split(split, present, source)
    labels = {row: (_NONE,) if empty_class and not row.names else row.names for row in rows}
    class_names = sorted({label for names in labels.values() for label in names})
    if not class_names:
        raise DataError(f"no row of {file} has a label")
    chosen = [row for row in rows if row.split == name]
    paths = [root / row.path for row in chosen]
    check_files(paths, source)
    place = {label: number for number, label in enumerate(class_names)}
    targets = multi_hot([[place[label] for label in labels[row]] for row in chosen], len(class_names))
    return MultiLabelDataset(paths, targets, class_names=class_names, source=source, split=name)


def _read(file: Path, source: str) -> list[_Row]:
    """The rows below the header."""
    lines = csv.reader(StringIO(read_text(file, source)))
    rows: list[_Row] = []
    try:
        header: list[str] = next(lines, [])
        if len(header) < 3 or header[1].strip() != "label":
            raise DataError(f"{file} begins with {','.join(header)!r}; expected a header of three columns: {_FORM}")
        for cells in filter(None, lines):
            where = f"line {lines.line_num} of {file}"
            if len(cells) < 3 or not cells[0].strip() or cells[2] not in _SPLITS:
                raise DataError(f"{where} is {','.join(cells)!r}; expected {_FORM}")
            try:
                names = ast.literal_eval(cells[1])
            except (ValueError, SyntaxError):
                names = None
            if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
                raise DataError(f"the label in {where} is {cells[1]!r}; expected a list such as ['clouds', 'sky']")
            rows.append(_Row(cells[0], tuple(names), cells[2]))
    except csv.Error as error:
        raise DataError(f"cannot read {file}: {error} in line {lines.line_num}") from error
    if not rows:
        raise DataError(f"no images in {file}")
    return rows
