"""Tables with a column of masks, or of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrim.data.boxes import from_corner_and_size
from vitrim.data.dense import IGNORED, DetectionDataset, SegmentationDataset
from vitrim.data.errors import DataError
from vitrim.data.tables import Rows, column_error, find_image_column, is_image, is_integer

_MASK_COLUMNS = ("annotation", "mask", "label", "segmentation")
_OBJECTS_COLUMN = "objects"
_BOX, _CATEGORY = "bbox", "category"
_SIZE_COLUMNS = ("height", "width")


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
    """Take the images and the masks of a `datasets.Dataset`: two columns of images; pixel values are the labels.

    Args:
        table: the rows.
        source, split: as of `SegmentationDataset`.
        image_column: the column of images, if it is not the only one that is left.
        label_column: the column of masks, if it is not `annotation`, `mask`, `label` or `segmentation`.
        ignore, class_names, num_classes: as of `SegmentationDataset`.

    Raises:
        DataError: no such columns, or as `SegmentationDataset`.
    """
    features = table.features
    found = [name for name, feature in features.items() if is_image(feature)]
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
    """Take the images and the boxes of a `datasets.Dataset`: a column of images, and one of structs.

    Args:
        table: the rows.
        source, split: as of `DetectionDataset`.
        image_column: the column of images, if it is not the only one.
        label_column: the column of structs with `bbox`, boxes x, y, width, height in pixels, and `category`, class
            labels or integers; by default `objects`.
        class_names, num_classes: of categories that have no names of their own.

    Raises:
        DataError: no such columns, or as `DetectionDataset`.
    """
    features = table.features
    image = find_image_column(features, image_column, source)
    column = label_column or _OBJECTS_COLUMN
    fields = features.get(column)
    valid = f"of structs with {_BOX} and {_CATEGORY}"
    if not isinstance(fields, dict) or not {_BOX, _CATEGORY} <= set(fields):
        raise column_error("label", valid, column, [], features, source)
    kind = getattr(fields[_CATEGORY], "feature", None)
    names = getattr(kind, "names", None)
    if names is None and not is_integer(kind):
        raise DataError(f"{_CATEGORY} of column {column!r} of {source} is neither class labels nor integers")
    rows = table.select_columns([column]).with_format("arrow")[:].column(0).to_pylist()
    boxes, labels = [], []
    for number, row in enumerate(rows):
        where = f"image {number} of {source}"
        if row is None or row[_BOX] is None or row[_CATEGORY] is None:
            raise DataError(f"{where} has no {_BOX} or no {_CATEGORY} in column {column!r}: an empty list means no box")
        boxes.append(from_corner_and_size(row[_BOX], where))
        labels.append([-1 if label is None else label for label in row[_CATEGORY]])
    return DetectionDataset(
        Rows(table, image),
        boxes,
        labels,
        sizes=_sizes(table, source),
        class_names=class_names or names,
        num_classes=num_classes,
        source=source,
        split=split,
    )


def _sizes(table: Any, source: str) -> list[tuple[int, int]] | None:
    """Height and width of every image, where the table has them as columns of integers."""
    if not all(is_integer(table.features.get(name)) for name in _SIZE_COLUMNS):
        return None
    columns = table.select_columns(list(_SIZE_COLUMNS)).with_format("arrow")[:]
    if any(columns.column(name).null_count for name in _SIZE_COLUMNS):
        return None
    heights, widths = (columns.column(name).to_pylist() for name in _SIZE_COLUMNS)
    sizes = list(zip(heights, widths, strict=True))
    for row, (height, width) in enumerate(sizes):
        if height < 1 or width < 1:
            raise DataError(
                f"image {row} of {source} has height {height} and width {width}; valid: whole numbers from 1"
            )
    return sizes
