"""Tables of masks and of boxes, and which task a source has data for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from damaged_data import HEIGHT, WIDTH, parquet, png
from dense_files import write_boxes_table, write_masks_table
from image_files import write_table, write_tree
from vitrim.data import DataError, DetectionDataset, ImageDataset, SegmentationDataset, load_data, load_images
from vitrim.errors import VitrimError

OBJECTS: list[dict[str, list[Any]]] = [
    {"bbox": [[1, 2, 10, 20], [0, 0, 32, 32]], "category": [2, 0]},
    {"bbox": [], "category": []},
]


@pytest.mark.parametrize("column", ["annotation", "mask", "label", "segmentation", "other"])
def test_a_column_of_masks(tmp_path: Path, column: str) -> None:
    file = write_masks_table(tmp_path / "x.parquet", [[0, 3], [1, 2]], column)
    named = {"label_column": column} if column == "other" else {}
    data = load_data(file, task="segmentation", num_classes=3, ignore=3, **named)
    assert isinstance(data, SegmentationDataset)
    assert [target.unique().tolist() for _, target in (data[0], data[1])] == [[0, 255], [1, 2]]
    if column == "other":
        with pytest.raises(DataError, match=r"^no label column \(of masks \(images\)\) in .*; its columns: image"):
            load_data(file, task="segmentation", num_classes=3)


@pytest.mark.parametrize("names", [None, ["a", "b", "c"]])
def test_a_column_of_boxes(tmp_path: Path, names: list[str] | None) -> None:
    file = write_boxes_table(tmp_path / "x.parquet", OBJECTS, names)
    options = {} if names else {"num_classes": 3}
    data = load_data(file, task="detection", **options)
    assert isinstance(data, DetectionDataset)
    assert data.class_names == names
    assert data[0][1]["boxes"].tolist() == [[1, 2, 11, 22], [0, 0, 32, 32]]
    assert [len(target["labels"]) for _, target in (data[0], data[1])] == [2, 0]
    if names is None:
        with pytest.raises(DataError, match="does not say how many classes"):
            load_data(file, task="detection")


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"bbox": [[1, 2, 10]], "category": [0]}, r"box 0 of image 0 of .* expected 4 numbers"),
        ({"bbox": [[1, 2, 10, 3]], "category": [3]}, "box 0 of image 0 of .* has label 3; valid: 0 to 2"),
        ({"bbox": [[1, 2, 10, 3]], "category": [0, 1]}, "image 0 of .* has 1 boxes, but labels of 2"),
        ({"bbox": None, "category": []}, "image 0 of .* has no bbox or no category in column 'objects'"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, objects: Any, message: str) -> None:
    file = write_boxes_table(tmp_path / "x.parquet", [objects])
    with pytest.raises(DataError, match=message):
        load_data(file, task="detection", num_classes=3)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    labels = write_table(tmp_path / "labels.parquet", [0, 1])
    with pytest.raises(DataError, match=r"^no label column \(of masks \(images\)\) in .*; its columns: img \(Image\)"):
        load_data(labels, task="segmentation", num_classes=3)
    with pytest.raises(DataError, match=r"^no 'objects' in .*; its columns: img"):
        load_data(labels, task="detection", num_classes=3)
    with pytest.raises(DataError, match=r"^column 'label' of .* is not of structs with bbox and a category"):
        load_data(labels, task="detection", num_classes=3, label_column="label")
    with pytest.raises(DataError, match=r"^several image columns"):
        load_images(write_masks_table(tmp_path / "masks.parquet", [0]))


def test_each_source_says_what_it_is_for(tmp_path: Path) -> None:
    table = write_table(tmp_path / "x.parquet", [0, 1])
    tree = write_tree(tmp_path / "tree", "a/0.png")
    assert isinstance(load_data(table, task="classification"), ImageDataset)
    assert isinstance(load_data(tree, task="classification"), ImageDataset)
    refused = {
        (table, "instances"): "is a table of one label, mask or list of boxes per image: no data of task instances$",
        (table, "multilabel"): "no data of task multilabel$",
        (tree, "segmentation"): "is a folder of one folder per class: it has no data of task segmentation$",
        ("imagenet:x", "detection"): "^reader imagenet has no data of task detection; it has data of: classification$",
        ("coco:x", "segmentation"): "^reader coco has no data of task segmentation; it has data of: multilabel, detec",
        ("ade20k:x", None): "^ade20k has no labels of whole images: name a task, task=segmentation$",
        (table, "segmentaton"): r"^unknown task of data 'segmentaton'; did you mean 'segmentation'\? valid: ",
    }
    for (source, task), message in refused.items():
        with pytest.raises(DataError, match=message):
            load_data(source, task=task)


def test_options_of_tables(tmp_path: Path) -> None:
    file = write_masks_table(tmp_path / "x.parquet", [0])
    with pytest.raises(
        VitrimError, match="unknown option of a table for segmentation 'names'; did you mean 'class_names'"
    ):
        load_data(file, task="segmentation", names=["a"])
    with pytest.raises(VitrimError, match="unknown option of a table of images 'ignore'"):
        load_data(write_table(tmp_path / "y.parquet", [0]), ignore=3)


# ---- the real data ---------------------------------------------------------------------------------------------------


def test_the_columns_height_and_width(tmp_path: Path) -> None:
    objects: list[dict[str, Any]] = [{"bbox": [[55.0, 2.0, 9.0, 40.0]], "category": [1]}]
    columns = {"image": [{"bytes": png(), "path": None}], "height": [HEIGHT], "width": [WIDTH]}
    file = tmp_path / "x.parquet"
    file.write_bytes(parquet(**columns, objects=objects))
    data = load_data(file, task="detection", num_classes=2)
    assert isinstance(data, DetectionDataset)
    assert data.sizes == [(HEIGHT, WIDTH)]
    assert data[0][1]["boxes"].tolist() == [[55, 2, 64, 42]]
    objects[0] = {"bbox": 2 * objects[0]["bbox"], "category": [1, None]}
    file.write_bytes(parquet(**columns, objects=objects))
    with pytest.raises(DataError, match=r"^box 1 of image 0 of .* has label -1; valid: 0 to 1$"):
        load_data(file, task="detection", num_classes=2)
