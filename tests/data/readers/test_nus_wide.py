"""NUS-WIDE as it lies on disk."""

from pathlib import Path

import pytest

from image_files import write_tree
from vitrim.data import DataError, load_data

HEADER = "filepath,label,split_name\n"
ROWS = (
    "images/a.jpg,\"['sky', 'clouds']\",train\n"
    "images/b.jpg,[],train\n"
    "images/c.jpg,['water'],val\n"
    "images/d.jpg,['sky'],val\n"
)


def write_nus_wide(root: Path, text: str = HEADER + ROWS) -> str:
    (root / "nus_wid_data.csv").write_text(text, encoding="utf-8")
    write_tree(root / "images", "a.jpg", "b.jpg", "c.jpg", "d.jpg")
    return f"nus_wide:{root}"


def test_classes_are_of_both_splits_and_images_without_labels_are_kept(tmp_path):
    source = write_nus_wide(tmp_path)
    train, val = (load_data(source, split=split) for split in ("train", "validation"))
    assert train.class_names == val.class_names == ["clouds", "sky", "water"]
    assert [target.tolist() for _, target in train] == [[1, 1, 0], [0, 0, 0]]
    assert [target.tolist() for _, target in val] == [[0, 0, 1], [0, 1, 0]]
    assert train.images[0] == tmp_path / "images" / "a.jpg"


def test_the_empty_class_of_the_comparative_study(tmp_path):
    train = load_data(write_nus_wide(tmp_path), split="train", empty_class=True)
    assert train.class_names == ["", "clouds", "sky", "water"]
    assert [target.tolist() for _, target in train] == [[0, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"nus_wid_data.csv begins with ''; expected a header of three columns: path, label such as"),
        (HEADER, r"^nus_wide:.* has no images$"),
        (HEADER + "images/a.jpg,['sky']\n", r"line 2 of .*csv is \"images/a.jpg,\['sky'\]\"; expected path, label"),
        (HEADER + "images/a.jpg,sky,train\n", r"line 2 of .*csv is 'images/a.jpg,sky,train'; expected path, label"),
        (HEADER + "images/a.jpg,[],train\n", r"^no image of nus_wide:.* has a label$"),
        (HEADER + "images/a.jpg,['a'],train\nimages/e.jpg,['a'],train\n", r"1 of the 2 images of nus_wide:.*e.jpg$"),
    ],
)
def test_what_does_not_serve(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        load_data(write_nus_wide(tmp_path, text), split="train")


def test_not_text(tmp_path):
    source = write_nus_wide(tmp_path)
    (tmp_path / "nus_wid_data.csv").write_bytes(b"filepath,label,split\n\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read .*csv: not text in UTF-8 \(.* at byte 21\)$"):
        load_data(source)


def write_original(root: Path, folder: str = "Groundtruth/TrainTestLabels", images: str = "Flickr") -> str:
    """Three images to train on and two to test on, of the concepts sky and bear."""
    files = {
        "ImageList/TrainImagelist.txt": "sky\\\\a.jpg\r\nbear\\\\b.jpg\r\nsky\\\\c.jpg\r\n",
        "ImageList/TestImagelist.txt": "bear\\\\d.jpg\r\nsky\\\\e.jpg\r\n",
        f"{folder}/Labels_sky_Train.txt": "1\n0\n0\n",
        f"{folder}/Labels_bear_Train.txt": "1 \n1 \n0 \n",
        f"{folder}/Labels_sky_Test.txt": "0\n1\n",
        f"{folder}/Labels_bear_Test.txt": "1\n0\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace("\\\\", "\\"), newline="")
    write_tree(root / images, "sky/a.jpg", "bear/b.jpg", "sky/c.jpg", "bear/d.jpg", "sky/e.jpg")
    return f"nus_wide:{root}"


@pytest.mark.parametrize(
    ("folder", "images"),
    [("Groundtruth/TrainTestLabels", "Flickr"), ("TrainTestLabels", "images"), ("TrainTestLabels", "")],
)
def test_the_original_distribution(tmp_path, folder, images):
    source = write_original(tmp_path, folder, images)
    train = load_data(source, split="train")
    assert train.class_names == ["bear", "sky"]
    assert [target.tolist() for _, target in train] == [[1, 1], [1, 0], [0, 0]]
    assert train.images[1] == tmp_path / images / "bear" / "b.jpg"
    for spelling in ("test", "val", "validation"):
        test = load_data(source, split=spelling, empty_class=True)
        assert test.class_names == ["", "bear", "sky"]  # of both splits
        assert [target.tolist() for _, target in test] == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "Groundtruth/TrainTestLabels/Labels_sky_Test.txt",
            "1\n",
            r"sky_Test.txt has 1 lines for the 2 images of TestI",
        ),
        (
            "Groundtruth/TrainTestLabels/Labels_sky_Test.txt",
            "1\n01",
            r"^line 2 of .*Test.txt is '01'; expected 0 or 1$",
        ),
        ("Groundtruth/TrainTestLabels/Labels_sea_Test.txt", "1\n0", r"has no Labels_sea_Train.txt: expected it at"),
    ],
)
def test_an_original_distribution_that_does_not_serve(tmp_path, file, text, message):
    source = write_original(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message):
        load_data(source, split="test")
