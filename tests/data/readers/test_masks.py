"""Layouts of images with masks: ADE20K, Cityscapes, VOC, and pairs of folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dense_files import COUNT, mask, photo, save
from vitrim.data import DataError, SegmentationDataset, load_data
from vitrim.errors import VitrimError


def ade20k(root: Path) -> str:
    for split in ("training", "validation"):
        for number in range(COUNT):
            save(root / "images" / split / f"{number}.jpg", photo(number))
            save(root / "annotations" / split / f"{number}.png", mask([0, number + 1, 150]))
    return f"ade20k:{root}"


def cityscapes(root: Path, ending: str = "labelIds", values: tuple[int, ...] = (0, 7, 33, 255)) -> str:
    for number in range(COUNT):
        stem = f"city{number % 2}/city{number % 2}_{number}"
        save(root / "leftImg8bit" / "train" / f"{stem}_leftImg8bit.png", photo(number))
        save(root / "gtFine" / "train" / f"{stem}_gtFine_{ending}.png", mask(values))
        save(root / "gtFine" / "train" / f"{stem}_gtFine_color.png", photo(number))
    return f"cityscapes:{root}"


def voc(root: Path) -> str:
    for number in range(COUNT):
        save(root / "JPEGImages" / f"{number}.jpg", photo(number))
        save(root / "SegmentationClass" / f"{number}.png", mask([0, 20, 255], "P"))
    for split, lines in (("train", "2\n0\n"), ("val", "3\n1\n")):
        file = root / "ImageSets" / "Segmentation" / f"{split}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines, encoding="utf-8")
    return f"voc:{root}"


def folders(root: Path) -> str:
    for number in range(COUNT):
        save(root / "images" / "train" / f"{number}.{('jpg', 'png')[number % 2]}", photo(number))
        save(root / "masks" / "train" / f"{number}.png", mask([0, 1, 9]))
    return f"masks:{root}"


def load(source: str, **options: Any) -> SegmentationDataset:
    data = load_data(source, task="segmentation", **options)
    assert isinstance(data, SegmentationDataset)
    return data


@pytest.mark.parametrize(
    ("write", "options", "classes", "values"),
    [
        (ade20k, {"split": "train"}, 150, [0, 149, 255]),
        (cityscapes, {}, 19, [0, 18, 255]),
        (lambda root: cityscapes(root, "labelTrainIds", (0, 18, 255)), {}, 19, [0, 18, 255]),
        (voc, {"split": "train"}, 21, [0, 20, 255]),
        (folders, {"num_classes": 2, "ignore": 9}, 2, [0, 1, 255]),
    ],
)
def test_labels_and_classes(
    tmp_path: Path, write: Callable[[Path], str], options: dict[str, Any], classes: int, values: list[int]
) -> None:
    data = load(write(tmp_path), **options)
    assert data.num_classes == classes
    image, target = data[0]
    assert image.shape == (3, 32, 32)
    assert target.unique().tolist() == values
    assert str(data.source).endswith(str(tmp_path))


def test_pairs_are_by_name(tmp_path: Path) -> None:
    data = load(ade20k(tmp_path), split="val")
    assert [file.stem for file in data.images] == [file.stem for file in data.masks] == ["0", "1", "2", "3"]
    assert data.split == "validation"
    assert data[2][1].unique().tolist() == [2, 149, 255]
    data = load(cityscapes(tmp_path))
    assert [file.name for file in data.masks] == [f"city{n % 2}_{n}_gtFine_labelIds.png" for n in (0, 2, 1, 3)]
    assert data.class_names is not None
    assert data.class_names[13] == "car"
    assert [file.stem for file in load(voc(tmp_path), split="val").images] == ["3", "1"]


def test_values_beyond_the_classes(tmp_path: Path) -> None:
    source = ade20k(tmp_path)
    save(tmp_path / "annotations" / "training" / "0.png", mask([151]))
    with pytest.raises(DataError, match=r"^mask 0 of ade20k:.*0.png\) has a pixel of value 151; valid: 0 to 150$"):
        load(source, split="train")[0]


@pytest.mark.parametrize(
    ("write", "image", "label"),
    [
        (ade20k, "images/training/1.jpg", "annotations/training/1.png"),
        (folders, "images/train/0.jpg", "masks/train/0.png"),
        (
            cityscapes,
            "leftImg8bit/train/city0/city0_2_leftImg8bit.png",
            "gtFine/train/city0/city0_2_gtFine_labelIds.png",
        ),
    ],
)
def test_images_and_masks_that_are_alone(tmp_path: Path, write: Callable[[Path], str], image: str, label: str) -> None:
    source = write(tmp_path)
    options = {"num_classes": 2} if source.startswith("masks") else {}
    split = "training" if source.startswith("ade") else "train"
    (tmp_path / label).rename(tmp_path / "kept.png")
    with pytest.raises(DataError, match=rf"^image .*{Path(image).name} of .* has no mask \(1 have none\)$"):
        load(source, split=split, **options)
    (tmp_path / "kept.png").rename(tmp_path / label)
    (tmp_path / image).unlink()
    with pytest.raises(DataError, match=rf"^mask .*{Path(label).name} of .* has no image \(1 have none\)$"):
        load(source, split=split, **options)


def test_a_mask_of_voc_that_is_missing(tmp_path: Path) -> None:
    source = voc(tmp_path)
    (tmp_path / "SegmentationClass" / "0.png").unlink()
    with pytest.raises(DataError, match=r"^1 of the 2 masks of voc:.* are missing, the first is .*0.png$"):
        load(source, split="train")
    assert len(load(source, split="val")) == 2


def test_two_images_of_one_name(tmp_path: Path) -> None:
    source = folders(tmp_path)
    save(tmp_path / "images" / "train" / "0.png", photo(0))
    with pytest.raises(DataError, match=r"0.jpg and 0.png have one name"):
        load(source, num_classes=2)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        ("ade20k", "has no folders in .*images$"),
        ("voc", r"has no lists ImageSets/Segmentation/\*.txt"),
    ],
)
def test_nothing_there(tmp_path: Path, reader: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(f"{reader}:{tmp_path}")


def test_masks_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no masks \*_gtFine_labelIds.png and no \*_gtFine_labelTrainIds.png"):
        load(cityscapes(tmp_path, "polygons"))


def test_pairs_need_a_number_of_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give num_classes=K or class_names="):
        load(folders(tmp_path))
    with pytest.raises(VitrimError, match="unknown option of masks 'classes'; did you mean 'num_classes'"):
        load(folders(tmp_path), classes=2)


def test_images_of_one_name_in_two_cities(tmp_path: Path) -> None:
    for city, label in (("aachen", 7), ("bonn", 8)):
        save(tmp_path / "leftImg8bit" / "val" / city / "x_leftImg8bit.png", photo(label))
        save(tmp_path / "gtFine" / "val" / city / "x_gtFine_labelIds.png", mask(label))
    data = load_data(f"cityscapes:{tmp_path}", task="segmentation")
    assert [data[row][1].unique().tolist() for row in range(len(data))] == [[0], [1]]


# ---- classes that never occur


def _pairs(root: Path, *masks: list[int]) -> str:
    for number, values in enumerate(masks):
        save(root / "images" / "val" / f"{number}.jpg", photo(number))
        save(root / "masks" / "val" / f"{number}.png", mask(values))
    return f"masks:{root}"


def test_masks_of_0_and_255_without_a_second_class_are_refused(tmp_path: Path) -> None:
    told = (
        "is of class 0 or ignored \\(value 255\\), though there are 2 classes: where 255 means the second class, write"
    )
    with pytest.raises(DataError, match=told):
        load_data(_pairs(tmp_path, [0, 255], [0, 255]), task="segmentation", num_classes=2)
    with pytest.raises(DataError, match=r"is ignored \(value 7\), though there are 2"):
        load_data(_pairs(tmp_path / "b", [7]), task="segmentation", num_classes=2, ignore=7)


@pytest.mark.parametrize("masks", [([0, 255], [0, 1]), ([0], [0]), ([1, 255], [0, 255])])
def test_masks_whose_second_class_occurs_or_that_ignore_nothing_are_taken(tmp_path: Path, masks: Any) -> None:
    assert len(load_data(_pairs(tmp_path, *masks), task="segmentation", num_classes=2)) == 2
