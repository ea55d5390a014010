"""Tables of images with labels, masks or boxes: parquet files and Hub datasets, read by the package `datasets`."""

from __future__ import annotations

import glob
import importlib
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from vitrim.data.dataset import ImageDataset
from vitrim.data.dense import IGNORED, DetectionDataset, SegmentationDataset
from vitrim.data.folders import numbered
from vitrim.data.objects import from_corner_and_size
from vitrim.data.pages import PageDataset
from vitrim.data.paths import HUB_PREFIX, check_regular, choose_files, listed, pick_split, train_files, visible
from vitrim.errors import DataError, check_installed, first_line

_BYTES, _PATHS = ("binary", "null"), ("string", "null")
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_MASK_COLUMNS = ("annotation", "mask", "label", "segmentation")
_OBJECTS_COLUMN = "objects"
_QUERY_COLUMN = "query"
_BOX, _CATEGORY = "bbox", "category"
_SIZE_COLUMNS = ("height", "width")

Texts = Callable[[str], Iterable[str | None]]
"""The texts of a column, in the splits that define the classes."""


class Rows:
    def __init__(self, table: Any, column: str) -> None:
        self.table = undecoded(table, column)
        self.column = column

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> bytes | Path | None:
        return encoded_image(self.table[index][self.column])

    def sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(rows,) int64: bytes of every image inside the table, 0 for others. Reads no image."""
        compute = importlib.import_module("pyarrow.compute")
        encoded = compute.struct_field(arrow_column(self.table, self.column), "bytes")
        lengths = compute.fill_null(compute.binary_length(encoded), 0)
        return np.asarray(lengths.to_numpy(), dtype=np.int64)

    def contents(self) -> Iterator[bytes]:
        """Yield all images as stored in the table: bytes, path, or nothing."""
        table = self.table.with_format("arrow")
        # Thousands at a time: single rows cost more than their bytes, all at once the memory.
        for start in range(0, len(table), 1000):
            for value in table[start : start + 1000].column(0).to_pylist():
                image = encoded_image(value)
                yield image if isinstance(image, bytes) else str(image or "").encode()


def arrow_column(table: Any, name: str) -> Any:
    """All values of a column, as an array of pyarrow."""
    return table.select_columns([name]).with_format("arrow")[:].column(0)


def undecoded(table: Any, image: str, *others: str) -> Any:
    """A column of images, not decoded yet, so that our errors name the row, and ``others`` of a table."""
    datasets = import_datasets()
    table = table.select_columns([image, *others])
    if isinstance(table.features[image], datasets.Image):
        table = table.cast_column(image, datasets.Image(decode=False))
    return table


def encoded_image(value: Any) -> bytes | Path | None:
    """An image from a table's struct of bytes and path: its bytes, else its path, else None."""
    if value is None:
        return None
    if value["bytes"] is not None:
        return cast(bytes, value["bytes"])
    return None if value["path"] is None else Path(value["path"])


def import_datasets() -> Any:
    check_installed("reading tables, archives and Hub datasets", "datasets")
    return importlib.import_module("datasets")


def escaped(files: list[Path]) -> list[str]:
    """File names for `datasets`, which treats every path as a pattern."""
    return [glob.escape(str(file)) for file in files]


def read_source(read: Callable[[], Any], source: str) -> Any:
    """Call ``read``, and turn its errors about the source into one line."""
    datasets = import_datasets()
    try:
        return read()
    except (ValueError, OSError, tarfile.TarError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot read {source}: {first_line(error.__cause__ or error)}") from error


class OpenTable(NamedTuple):
    """A table, and what is known before its rows are read.

    Attributes:
        rows: a `datasets.Dataset`, or a `datasets.IterableDataset`.
        files: its parquet files; empty for the Hub.
        length: number of rows; None if unknown.
    """

    rows: Any
    split: str | None
    files: list[Path]
    length: int | None


def open_table(source: str, files: list[Path], split: str | None, *, stream: bool = False) -> OpenTable:
    """Open one split of parquet ``files``, checked to belong together, or of the Hub if there are none."""
    datasets = import_datasets()
    if files:
        chosen, named = choose_files(files, split, source)
        length = check_parquet(chosen)
        form = datasets.IterableDataset if stream else datasets.Dataset
        return OpenTable(read_source(partial(form.from_parquet, escaped(chosen)), source), named, chosen, length)
    name, of_hub = _hub_split(source, split)
    how = {"streaming": True} if stream else {}
    rows = read_source(partial(datasets.load_dataset, name, split=of_hub, **how), source)
    known = rows.info.splits or {}
    return OpenTable(rows, of_hub, [], known[of_hub].num_examples if of_hub in known else None)


def _hub_split(source: str, split: str | None) -> tuple[str, str]:
    """The name of a dataset on the Hub, and its split: as asked, else `validation` or the only one."""
    name = source.removeprefix(HUB_PREFIX)
    if not name:
        raise DataError(f"{source} names no dataset: write {HUB_PREFIX}owner/name")
    if split is not None:
        return name, split
    present = read_source(partial(import_datasets().get_dataset_split_names, name), source)
    return name, "validation" if "validation" in present else pick_split(None, present, source)


def from_table(
    table: Any,
    source: str,
    split: str | None,
    texts: Texts,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageDataset:
    """The dataset of a `datasets.Dataset`; ``texts`` gives the texts of the column of labels in all splits."""
    image = find_image_column(table.features, image_column, source)
    label = find_label_column(table.features, label_column, source)
    labels, class_names = read_labels(table, label, source, texts)
    return ImageDataset(Rows(table, image), labels, class_names=class_names, source=source, split=split)


def parquet_files(path: Path) -> list[Path]:
    """The file itself, or the parquet files directly in a folder; empty without any."""
    if path.is_dir():
        return [file for file in visible(path) if file.suffix.lower() == ".parquet"]
    if path.suffix.lower() != ".parquet":
        raise DataError(
            f"{path} is neither a parquet file nor a folder; valid: a .parquet file, a folder of them, a folder with "
            f"one folder of images per class, or {HUB_PREFIX}owner/name"
        )
    return [path]


def check_parquet(files: list[Path]) -> int:
    """Count the rows of all files; refuse damaged, empty or mismatched ones. Reads only footers."""
    parquet = importlib.import_module("pyarrow.parquet")
    for file in files:
        check_regular(file, str(file))
    footers = [read_source(partial(parquet.read_metadata, file), str(file)) for file in files]
    features = [_features(footer, file) for footer, file in zip(footers, files, strict=True)]
    for file, found in zip(files, features, strict=True):
        # class names, too: datasets would apply those of the first file to all
        if found != features[0]:
            raise DataError(
                f"the parquet files do not belong together: {files[0].name} has {describe(features[0])}; {file.name} "
                f"has {describe(found)}, or other class names: give one file, or a split that selects like files"
            )
    rows = int(sum(footer.num_rows for footer in footers))
    if not rows:
        raise DataError(f"no rows in {', '.join(map(str, files))}")
    return rows


def _features(footer: Any, file: Path) -> Any:
    """The columns of a parquet file, from the metadata that `datasets` leaves there, or else from the schema."""
    try:
        return import_datasets().Features.from_arrow_schema(footer.schema.to_arrow_schema())
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"cannot read {file}: its notes on its columns are damaged: {first_line(error)}") from error


def find_image_column(features: Any, asked: str | None, source: str) -> str:
    found: list[str] = [name for name, feature in features.items() if kind_of(feature) == "image"]
    if asked is None and len(found) == 1:
        return found[0]
    if asked is not None and asked in found:
        return asked
    raise column_error("image", "of type Image or struct{bytes, path}", asked, found, features, source)


def find_label_column(features: Any, asked: str | None, source: str) -> str:
    """The column of labels: the one asked for, one of the usual names, or the only candidate."""
    if asked is None:
        asked = next((name for name in _LABEL_COLUMNS if name in features), None)
    kinds = {name: kind_of(feature) for name, feature in features.items()}
    if asked is not None and kinds.get(asked) in ("classes", "integer", "text"):
        return asked
    # Class labels with names win over plain integers, of which a table may have others, such as heights.
    classes: list[str] = [name for name, kind in kinds.items() if kind == "classes"]
    found = classes or [name for name, kind in kinds.items() if kind == "integer"]
    if asked is None and len(found) == 1:
        return found[0]
    raise column_error("label", "of class labels, integers or strings", asked, found, features, source)


def column_error(kind: str, valid: str, asked: str | None, found: list[str], features: Any, source: str) -> DataError:
    if asked is not None:
        problem = f"column {asked!r} of {source} is not {valid}" if asked in features else f"no {asked!r} in {source}"
    elif found:
        problem = f"several {kind} columns in {source} ({', '.join(found)})"
    else:
        problem = f"no {kind} column ({valid}) in {source}"
    return DataError(f"{problem}; its columns: {describe(features)}; name one as the {kind} column")


def kind_of(feature: Any) -> str:
    """The kind of a column: `image`, `classes`, `integer` or `text`; else empty."""
    datasets = import_datasets()
    if isinstance(feature, dict):  # a struct, in files not written by datasets
        kinds = {name: getattr(kind, "dtype", "").removeprefix("large_") for name, kind in feature.items()}
        known = set(kinds) == {"bytes", "path"} and kinds["bytes"] in _BYTES and kinds["path"] in _PATHS
        return "image" if known else ""
    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.ClassLabel):
        return "classes"
    if isinstance(feature, datasets.Value) and feature.dtype.startswith(("int", "uint")):
        return "integer"
    return "text" if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string") else ""


def describe(features: Any) -> str:
    said = []
    for name, feature in features.items():
        if isinstance(feature, import_datasets().Value):
            kind = str(feature.dtype)
        else:
            kind = f"struct{{{', '.join(feature)}}}" if isinstance(feature, dict) else type(feature).__name__
        said.append(f"{name} ({kind})")
    return ", ".join(said)


def class_texts(source: str, files: list[Path], column: str) -> Iterator[str | None]:
    """The texts in a column that define the classes: of the train split, or of all splits without one."""
    if not files:
        datasets = import_datasets()
        name = source.removeprefix(HUB_PREFIX)
        present = read_source(partial(datasets.get_dataset_split_names, name), source)
        for split in ["train"] if "train" in present else present:
            yield from read_source(partial(datasets.load_dataset, name, split=split), source).unique(column)
        return
    parquet = importlib.import_module("pyarrow.parquet")
    for file in train_files(files):
        if column in read_source(partial(parquet.read_schema, file), str(file)).names:
            table = read_source(partial(parquet.read_table, file, columns=[column]), str(file))
            yield from table.column(column).unique().to_pylist()


def read_labels(table: Any, name: str, source: str, texts: Texts) -> tuple[np.ndarray[Any, Any], list[str] | None]:
    """The labels in the column ``name``, int64 (rows,), and the class names if any; texts are numbered by ``texts``."""
    column = arrow_column(table, name)
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise DataError(f"row {row} of {source} has no label in column {name!r}")
    kind = kind_of(table.features[name])
    if kind != "text":
        return column.to_numpy(), None if kind == "integer" else list(table.features[name].names)
    values = column.to_pylist()
    # Numbered by all splits' texts, not by those of this one, which may lack a class.
    class_names = numbered({text for text in texts(name) if text is not None})
    index = {value: label for label, value in enumerate(class_names)}
    stray = next((row for row, value in enumerate(values) if value not in index), None)
    if stray is not None:
        raise DataError(
            f"row {stray} of {source} is of class {values[stray]!r}, which is not among the {len(class_names)} of the "
            f"train split: {listed(class_names)}"
        )
    return np.array([index[value] for value in values], dtype=np.int64), class_names


def pages_from_table(
    table: Any, source: str, split: str | None, *, image_column: str | None = None, label_column: str | None = None
) -> PageDataset:
    """The dataset of a table with a column of images of pages, and one of texts, by default `query`.

    A row is a page and a query that it answers; a page without one has null there.
    """
    image = find_image_column(table.features, image_column, source)
    column = label_column or _QUERY_COLUMN
    if column not in table.features or kind_of(table.features[column]) != "text":
        raise column_error("label", "of queries (strings)", column, [], table.features, source)
    queries = arrow_column(table, column).to_pylist()
    return PageDataset(Rows(table, image), queries=queries, source=source, split=split)


# ---- masks and boxes -----------------------------------------------------------------------------------------------


def masks_from_table(
    table: Any,
    source: str,
    split: str | None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    ignore: int | Sequence[int] = IGNORED,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
) -> SegmentationDataset:
    """The dataset of a table with two columns of images; pixel values of the second are labels.

    Masks are in ``label_column``, by default `annotation`, `mask`, `label` or `segmentation`.
    """
    features = table.features
    found = [name for name, feature in features.items() if kind_of(feature) == "image"]
    mask = label_column or next((name for name in _MASK_COLUMNS if name in found), None)
    if mask is None or mask not in found:
        raise column_error("label", "of masks (images)", mask, [], features, source)
    left = {name: feature for name, feature in features.items() if name != mask}
    image = find_image_column(left, image_column, source)
    return SegmentationDataset(
        Rows(table, image),
        Rows(table, mask),
        class_names=class_names,
        num_classes=num_classes,
        ignore=ignore,
        source=source,
        split=split,
    ).check_occurring()


def boxes_from_table(
    table: Any,
    source: str,
    split: str | None,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
) -> DetectionDataset:
    """The dataset of a table with a column of images and one of structs, by default `objects`.

    A struct has `bbox`, boxes x, y, width, height in pixels, and `category`, class labels or integers, for which
    ``class_names`` or ``num_classes`` is needed.
    """
    image = find_image_column(table.features, image_column, source)
    column = label_column or _OBJECTS_COLUMN
    names = _category_names(table.features, column, source)
    boxes, labels = _objects(table, column, source)
    return DetectionDataset(
        Rows(table, image),
        boxes,
        labels,
        sizes=_sizes(table),
        class_names=class_names or names,
        num_classes=num_classes,
        source=source,
        split=split,
    )


def _category_names(features: Any, column: str, source: str) -> list[str] | None:
    """The class names of a column of structs of boxes and categories; None if categories are integers."""
    fields = features.get(column)
    fields = fields if isinstance(fields, dict) else {}
    kind = getattr(fields.get(_CATEGORY), "feature", None)
    names: list[str] | None = getattr(kind, "names", None)
    if _BOX not in fields or (names is None and kind_of(kind) != "integer"):
        valid = f"of structs with {_BOX} and a {_CATEGORY} of class labels or integers"
        raise column_error("label", valid, column, [], features, source)
    return names


def _objects(table: Any, column: str, source: str) -> tuple[list[np.ndarray[Any, Any]], list[list[int]]]:
    """Boxes x1, y1, x2, y2 and labels of every image; -1 for a box without a label."""
    boxes, labels = [], []
    for number, row in enumerate(arrow_column(table, column).to_pylist()):
        where = f"image {number} of {source}"
        if row is None or row[_BOX] is None or row[_CATEGORY] is None:
            raise DataError(f"{where} has no {_BOX} or no {_CATEGORY} in column {column!r}: an empty list means no box")
        # Tables of detection follow COCO: corner and size, in pixels.
        boxes.append(from_corner_and_size(row[_BOX], where))
        labels.append([-1 if label is None else label for label in row[_CATEGORY]])
    return boxes, labels


def _sizes(table: Any) -> list[tuple[int, int]] | None:
    """Height and width of every image, if the table has columns of them without a gap."""
    if any(kind_of(table.features.get(name)) != "integer" for name in _SIZE_COLUMNS):
        return None
    columns = [arrow_column(table, name) for name in _SIZE_COLUMNS]
    if any(column.null_count for column in columns):
        return None
    return list(zip(*(column.to_pylist() for column in columns), strict=True))
