"""WebDataset archives: `webdataset:PATTERN`, such as `webdataset:/data/train-{000000..000009}.tar`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vitrim.data.dataset import ImageDataset
from vitrim.data.paths import check_files, check_regular, choose_files, existing, train_files, visible
from vitrim.data.readers import register_reader
from vitrim.data.tables import (
    Rows,
    arrow_column,
    describe,
    escaped,
    find_image_column,
    find_label_column,
    import_datasets,
    read_labels,
    read_source,
)
from vitrim.errors import DataError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CLASS = "cls"
_JSON = ("json", "jsn")
_FIELD = "label"
_ALL = "archives"  # the name of the split for `datasets`, where "all" has another meaning


@register_reader("webdataset")
def read_webdataset(
    path: str,
    *,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageDataset:
    """Tar archives in which the files of one image share a name: `0001.jpg` and `0001.cls` or `0001.json`.

    Read by the package `datasets`, which first copies the archives into its cache (HF_DATASETS_CACHE). Text labels
    become integers in sorted order: of the train split, or of all archives without one.

    Args:
        path: a tar file, a folder of them, or a pattern with ranges, `{000000..000009}`, or `*`.
        split: the archives with it as a word in their name; optional if they name at most one.
        image_column: the suffix of the images, if there are several kinds.
        label_column: the suffix of the labels; by default `cls`, or `json` or `jsn`: its field `label`, or itself.
            Another field is `json.NAME`.
    """
    source = f"webdataset:{path}"
    archives = _archives(path, source)
    files, chosen = choose_files(archives, split, source)
    # The split alone is opened; the texts that define the classes may be of others.
    table = _table(files, source)
    image = find_image_column(table.features, image_column, source)
    rows = Rows(table, image)
    column = arrow_column(rows.table, image)
    if column.null_count:  # an archive with images of several suffixes
        row = int(column.is_null().to_numpy().argmax())
        raise DataError(f"{table[row]['__key__']!r} of {source} has no .{image}: images need one suffix throughout")
    label_table, label = _labels_of(table, label_column, source)
    find_label_column(label_table.features, label, source)

    def texts(name: str) -> Iterator[str | None]:
        yield from _labels_of(_table(train_files(archives), source), label_column, source)[0].unique(name)

    labels, class_names = read_labels(label_table, label, source, texts)
    return ImageDataset(rows, labels, class_names=class_names, source=source, split=chosen)


def _table(files: list[Path], source: str) -> Any:
    for file in files:
        check_regular(file, str(file))
    data_files = {_ALL: escaped(files)}
    return read_source(partial(import_datasets().load_dataset, "webdataset", data_files=data_files, split=_ALL), source)


def _archives(path: str, source: str) -> list[Path]:
    """The archives that a pattern matches, in its order: a{0..2} is a0, a1, a2; a{00..02} is a00, a01, a02."""
    pattern, names, end = os.path.expanduser(path), [""], 0
    # Every range multiplies the names found so far by its numbers, written as wide as its start.
    for found in _RANGE.finditer(pattern):
        start, stop = found.groups()
        numbers = [f"{number:0{len(start)}d}" for number in range(int(start), int(stop) + 1)]
        names = [name + pattern[end : found.start()] + number for name in names for number in numbers]
        end = found.end()
    names = [name + pattern[end:] for name in names]
    if len(names) == 1 and "*" in names[0]:
        files = sorted(map(Path, glob.iglob(names[0])))
    elif len(names) == 1 and existing(Path(names[0])).is_dir():
        files = [file for file in visible(Path(names[0])) if file.suffix == ".tar"]
    else:
        files = [Path(name) for name in names]
        check_files(files, source, "archives")
    if not files:
        raise DataError(f"no archives (.tar) in {source}")
    return files


def _labels_of(table: Any, asked: str | None, source: str) -> tuple[Any, str]:
    """The table with its labels as a column, and the column's name."""
    present = [name for name in (_CLASS, *_JSON) if name in table.features]
    name, _, field = (asked or (present[0] if present else _CLASS)).partition(".")
    if name not in table.features:
        raise DataError(f"no .{name} in {source}; its files: {describe(table.features)}; name one as the label column")
    if not isinstance(table.features[name], dict):
        return table, name
    fields = table.features[name]
    if (field or _FIELD) not in fields:
        raise DataError(
            f"no field {field or _FIELD!r} in the .{name} of {source} ({', '.join(fields)}); name one as the "
            f"label column, {name}.FIELD"
        )
    return table.select_columns([name]).flatten(), f"{name}.{field or _FIELD}"
