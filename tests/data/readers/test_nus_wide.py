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
        (ROWS, r"""begins with "images/a.jpg,.*; expected a header"""),
        (HEADER, r"no images in .*nus_wid_data.csv"),
        (HEADER + "images/a.jpg,['sky']\n", r"line 2 of .*csv is \"images/a.jpg,\['sky'\]\"; expected path, label"),
        (HEADER + ROWS + "images/a.jpg,['sky'],test\n", r"line 6 of .*csv is .*; expected path, label .* train or val"),
        (HEADER + "images/a.jpg,sky,train\n", r"the label in line 2 of .*csv is 'sky'; expected a list such as"),
        (HEADER + "images/a.jpg,[1],train\n", r"the label in line 2 of .*csv is '\[1\]'; expected a list such as"),
        (HEADER + "images/a.jpg,[],train\n", r"no row of .*csv has a label"),
        (HEADER + "images/a.jpg,['a'],train\nimages/e.jpg,['a'],train\n", r"1 of the 2 images of nus_wide:.*e.jpg$"),
    ],
)
def test_what_does_not_serve(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        load_data(write_nus_wide(tmp_path, text), split="train")
    assert "\n" not in str(caught.value)


def test_not_text(tmp_path):
    source = write_nus_wide(tmp_path)
    (tmp_path / "nus_wid_data.csv").write_bytes(b"filepath,label,split\n\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read .*csv: not text in UTF-8 \(.* at byte 21\)$"):
        load_data(source)


def test_no_csv_file(tmp_path):
    with pytest.raises(DataError, match=r"^nus_wide:.* has no nus_wid_data.csv: expected it at"):
        load_data(f"nus_wide:{tmp_path}")


def test_an_option_that_is_neither_true_nor_false(tmp_path):
    with pytest.raises(DataError, match=r"^empty_class is true or false, not 'no'$"):
        load_data(write_nus_wide(tmp_path), split="train", empty_class="no")
