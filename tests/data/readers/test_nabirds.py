"""NABirds as it lies on disk."""

from pathlib import Path

import pytest

from image_files import labels, write_tree
from vitrim.data import DataError, load_images


def write_nabirds(root: Path, **changes: str | None) -> str:
    """Four images of the raw classes 9, 100 and 20; class 9 is in the test split only."""
    texts = {
        "images": "a1 100/x.jpg\nb2 9/y.jpg\nc3 20/z.jpg\nd4 100/w.jpg\n",
        "image_class_labels": "d4 100\nc3 20\nb2 9\na1 100\n",
        "train_test_split": "a1 1\nb2 0\nc3 1\nd4 0\n",
        "classes": "0 Birds\n9 Mallard (Male)\n20 Common Eider\n100 Great Horned Owl\n",
    } | changes
    for name, text in texts.items():
        if text is not None:
            (root / f"{name}.txt").write_text(text, encoding="utf-8")
    write_tree(root / "images", "100/x.jpg", "9/y.jpg", "20/z.jpg", "100/w.jpg")
    return f"nabirds:{root}"


def test_raw_classes_become_labels_in_ascending_order(tmp_path):
    source = write_nabirds(tmp_path)
    train = load_images(source, split="train")
    assert train.class_names == ["Mallard (Male)", "Common Eider", "Great Horned Owl"]
    assert (labels(train), train.split, train.source) == ([2, 1], "train", source)
    assert [path.name for path in train.images] == ["x.jpg", "z.jpg"]
    for spelling in ("test", "val", "validation"):
        test = load_images(source, split=spelling)
        assert (labels(test), test.split, test.num_classes) == ([0, 2], "test", 3)


@pytest.mark.parametrize(
    ("changes", "split", "message"),
    [
        ({}, "dev", r"unknown split 'dev' in nabirds:.*; valid: train, test$"),
        ({"images": None}, "train", r"^nabirds:.* has no images.txt: expected it at .*images.txt$"),
        ({"classes": "9 A\n20 B\n"}, "train", r"^100 is in no line of .*classes.txt$"),
        ({"images": "a1\n"}, "train", r"line 1 of .*images.txt is 'a1'; expected a key, a space and the rest$"),
        ({"images": "a1 100/x.jpg\na1 9/y.jpg\n"}, "train", r"^.*images.txt has a1 twice$"),
        ({"train_test_split": "a1 1\n"}, "train", r"^b2 is in no line of .*train_test_split.txt$"),
        (
            {"image_class_labels": "a1 x\nb2 9\nc3 1\nd4 2\n"},
            "train",
            r"line 1 of .* 'a1 x'; expected .* class$",
        ),
        (
            {"train_test_split": "a1 2\nb2 0\nc3 1\nd4 0\n"},
            "train",
            r"line 1 of .* 'a1 2'; expected .* 1 for train",
        ),
    ],
)
def test_what_does_not_serve(tmp_path, changes, split, message):
    with pytest.raises(DataError, match=message):
        load_images(write_nabirds(tmp_path, **changes), split=split)


def test_an_image_of_the_index_that_is_missing(tmp_path):
    source = write_nabirds(tmp_path)
    (tmp_path / "images" / "9" / "y.jpg").unlink()
    assert len(load_images(source, split="train")) == 2
    with pytest.raises(DataError, match=r"^1 of the 2 images of nabirds:.* are missing, the first is .*9.y.jpg$"):
        load_images(source, split="test")
