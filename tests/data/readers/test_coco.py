"""COCO 2014 as it lies on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from image_files import write_tree
from vitrim.data import DataError, MultiLabelDataset, load_data

SMALL, LARGE = 10.0, 90_000.0


def content() -> dict[str, Any]:
    """Three images, of which the second has no annotation; the ids of classes are neither dense nor ascending."""
    return {
        "info": {},
        "images": [{"id": 7, "file_name": "x.jpg"}, {"id": 3, "file_name": "y.jpg"}, {"id": 5, "file_name": "z.jpg"}],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
        "annotations": [
            {"id": 1, "image_id": 5, "category_id": 18, "area": SMALL, "iscrowd": 0, "segmentation": [[1.0, 2.0]]},
            {"id": 2, "image_id": 7, "category_id": 1, "area": SMALL, "iscrowd": 1, "segmentation": {"counts": [1]}},
            {"id": 3, "image_id": 7, "category_id": 1, "area": LARGE, "iscrowd": 0, "segmentation": []},
            {"id": 4, "image_id": 7, "category_id": 90, "area": LARGE, "iscrowd": 0, "segmentation": []},
        ],
    }


def write_coco(root: Path, written: Any, split: str = "val") -> str:
    (root / "annotations").mkdir(exist_ok=True)
    text = written if isinstance(written, str) else json.dumps(written)
    (root / "annotations" / f"instances_{split}2014.json").write_text(text, encoding="utf-8")
    write_tree(root / f"{split}2014", "x.jpg", "y.jpg", "z.jpg")
    return f"coco:{root}"


def test_targets_are_of_every_area_and_only_of_images_with_annotations(tmp_path):
    dataset = load_data(write_coco(tmp_path, content()))
    assert isinstance(dataset, MultiLabelDataset)
    assert (dataset.class_names, dataset.split) == (["toothbrush", "person", "dog"], "val")
    assert [path.name for path in dataset.images] == ["x.jpg", "z.jpg"]
    assert [target.tolist() for _, target in dataset] == [[1, 1, 0], [0, 0, 1]]


def test_splits(tmp_path):
    write_coco(tmp_path, content(), "train")
    source = write_coco(tmp_path, content(), "val")
    assert load_data(source, split="train").images[0] == tmp_path / "train2014" / "x.jpg"
    assert load_data(source, split="validation").images[0] == tmp_path / "val2014" / "x.jpg"
    with pytest.raises(DataError, match=r"several splits in coco:.*: train, val"):
        load_data(source)


def changed(key: str, value: Any) -> dict[str, Any]:
    return content() | {key: value}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{", r"^cannot read .*instances_val2014.json: it is not valid JSON .*line 1"),
        ({"images": []}, r"is not of COCO's form: it has no categories that are a list of objects$"),
        (
            changed("images", [{"id": 7, "file_name": "x.jpg"}]),
            r"^annotation 0 \(id 1\) in .* is of image 5, which is not in its list; valid: the ids of 1$",
        ),
        (changed("annotations", []), r"no images in coco:"),
    ],
)
def test_what_does_not_serve(tmp_path, written, message):
    with pytest.raises(DataError, match=message):
        load_data(write_coco(tmp_path, written))


def test_an_image_that_is_missing(tmp_path):
    source = write_coco(tmp_path, content())
    (tmp_path / "val2014" / "y.jpg").unlink()  # has no annotation
    assert len(load_data(source)) == 2
    (tmp_path / "val2014" / "z.jpg").unlink()
    with pytest.raises(DataError, match=r"^1 of the 2 images of coco:.* are missing, the first is .*z.jpg$"):
        load_data(source)
