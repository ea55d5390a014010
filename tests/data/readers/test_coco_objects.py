"""COCO's boxes and outlines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dense_files import SIDE, photo, save
from vitrim.data import DataError, DetectionDataset, load_data

TRIANGLE = [[2.0, 2.0, 18.0, 2.0, 2.0, 12.0]]
RUNS = {"counts": [0, 32, 992], "size": [SIDE, SIDE]}
"""The first column."""


def content() -> dict[str, Any]:
    """An image with a polygon and a box without area, one with run lengths, a crowd alone, and an empty image."""
    return {
        "images": [{"id": 9 - row, "file_name": f"{row}.jpg", "height": SIDE, "width": SIDE} for row in range(4)],
        "categories": [{"id": 90, "name": "dog"}, {"id": 3, "name": "cat"}],
        "annotations": [
            annotation(1, 9, 3, [2, 2, 16, 10], 80.0, TRIANGLE),
            annotation(2, 8, 90, [0, 0, 1, 32], 32.0, RUNS),
            annotation(3, 7, 90, [0, 0, 1, 32], 32.0, RUNS) | {"iscrowd": 1},
            annotation(4, 9, 90, [4, 4, 2, 0], 0.0, TRIANGLE),
        ],
    }


def annotation(number: int, image: int, category: int, box: list[float], area: float, outline: Any) -> dict[str, Any]:
    values = {"id": number, "image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": 0}
    return values | {"segmentation": outline}


def write(root: Path, written: Any, split: str = "val", year: int = 2017) -> str:
    for row in range(4):
        save(root / f"{split}{year}" / f"{row}.jpg", photo(row))
    file = root / "annotations" / f"instances_{split}{year}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(written), encoding="utf-8")
    return f"coco:{root}"


def load(source: str, task: str = "detection", **options: Any) -> DetectionDataset:
    data = load_data(source, task=task, **options)
    assert isinstance(data, DetectionDataset)
    return data


def test_boxes_of_every_image(tmp_path: Path) -> None:
    data = load(write(tmp_path, content()))
    assert (len(data), data.class_names, data.split, data.outlines) == (4, ["dog", "cat"], "val", None)
    targets = [data[row][1] for row in range(4)]
    assert [target["boxes"].tolist() for target in targets] == [[[2, 2, 18, 12]], [[0, 0, 1, 32]], [[0, 0, 1, 32]], []]
    assert [target["labels"].tolist() for target in targets] == [[1], [0], [0], []]
    assert [target["iscrowd"].tolist() for target in targets] == [[0], [0], [1], []]
    assert [target["area"].tolist() for target in targets] == [[80], [32], [32], []]  # of outlines, as the file says
    assert "masks" not in targets[0]


def test_outlines_of_every_image(tmp_path: Path) -> None:
    data = load(write(tmp_path, content()), "instances")
    masks = [data[row][1]["masks"] for row in range(4)]
    assert [tuple(each.shape) for each in masks] == [(1, 32, 32), (1, 32, 32), (1, 32, 32), (0, 32, 32)]
    assert masks[1][0, :, 0].all()
    assert masks[1].sum() == 32
    assert abs(int(masks[0].sum()) - 80) < 12  # a triangle of 80 square pixels
    assert not masks[0][0, 12:].any()


def test_training_images_have_objects(tmp_path: Path) -> None:
    source = write(tmp_path, content(), "train")
    assert [file.name for file in load(source).images] == ["0.jpg", "1.jpg"]


def test_the_year_is_2017_where_both_are_there(tmp_path: Path) -> None:
    source = write(tmp_path, content(), year=2014)
    assert load(source).images[0].parent.name == "val2014"
    write(tmp_path, content())
    assert load(source).images[0].parent.name == "val2017"


@pytest.mark.parametrize(
    ("number", "changes", "task", "message"),
    [
        (0, {"image_id": 5}, "detection", "is of image 5, which is not in its list; valid: the ids of 4$"),
        (0, {"category_id": 5}, "detection", "is of category 5, which is not in its list; valid: the ids of 2$"),
        (0, {"segmentation": []}, "instances", "has no outline, which task instances needs"),
        (1, {"bbox": [1, 2, 3, 40]}, "detection", "valid: one within its image of 32 x 32 pixels$"),
        (1, {"bbox": [1, 2, -3, 4]}, "detection", "neither width nor height negative$"),
    ],
)
def test_annotations_that_are_refused(
    tmp_path: Path, number: int, changes: dict[str, Any], task: str, message: str
) -> None:
    written = content()
    written["annotations"][number] |= changes
    place = rf"annotation {number} \(id {number + 1}\) in .*instances_val2017.json "
    with pytest.raises(DataError, match=place + ".*" + message):
        load(write(tmp_path, written), task)


def test_a_train_image_with_a_crowd_and_an_object_stays(tmp_path: Path) -> None:
    """Only images of crowds alone, and empty ones, are left out of training."""
    made = content()
    made["annotations"].append(annotation(5, 9, 90, [0, 0, 1, 32], 32.0, RUNS) | {"iscrowd": 1})
    data = load(write(tmp_path, made, split="train"))
    assert [path.name for path in data.images] == ["0.jpg", "1.jpg"]
    assert [data[row][1]["iscrowd"].tolist() for row in range(2)] == [[0, 1], [0]]


def test_a_crowd_without_an_outline_has_its_whole_box(tmp_path: Path) -> None:
    made = content()
    made["annotations"][2] = annotation(3, 7, 90, [4, 6, 10, 8], 80.0, None) | {"iscrowd": 1}
    del made["annotations"][2]["segmentation"]
    [mask] = load(write(tmp_path, made), task="instances")[2][1]["masks"]
    expected = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    expected[6:14, 4:14] = True
    assert torch.equal(mask.bool(), expected)


WIDE = (20, 44)
"""Height and width of an image that is not square."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bbox": [26.0, 2.0, 16.0, 10.0]}, None),
        ({"bbox": [2.0, 4.0, 10.0, 20.0]}, "valid: one within its image of 44 x 20 pixels$"),
        ({"bbox": [26.0, 2.0, 22.0, 10.0]}, "valid: one within its image of 44 x 20 pixels$"),
        ({"area": 20.0 * 44.0}, None),
        ({"area": 24.0 * 48.0}, "has area 1152.0; valid: "),
    ],
)
def test_boxes_and_areas_are_within_an_image_that_is_not_square(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    written = content()
    written["images"][0] |= {"height": WIDE[0], "width": WIDE[1]}
    written["annotations"][0] |= changes
    source = write(tmp_path, written)
    save(tmp_path / "val2017" / "0.jpg", photo(0, WIDE))
    if message is not None:
        with pytest.raises(DataError, match=message):
            load(source)
        return
    x, y, width, height = written["annotations"][0]["bbox"]
    assert load(source)[0][1]["boxes"].tolist() == [[x, y, x + width, y + height]]
