"""ImageNet as it lies on disk."""

import pytest

from image_files import labels, write_tree
from vitrim.data import DataError, load_images


def test_labels_are_places_of_sorted_ids_of_the_train_split(tmp_path):
    write_tree(tmp_path, "train/n00000002/a.JPEG", "train/n00000001/b.JPEG", "train/n00000003/c.JPEG")
    write_tree(tmp_path, "val/n00000003/a.JPEG", "val/n00000001/b.JPEG")
    write_tree(tmp_path, "test/0.JPEG", "devkit/logo.png")
    train = load_images(f"imagenet:{tmp_path}", split="train")
    assert (labels(train), train.class_names) == ([0, 1, 2], ["n00000001", "n00000002", "n00000003"])
    for spelling in ("val", "validation", "valid"):
        dataset = load_images(f"imagenet:{tmp_path}", split=spelling)
        assert (labels(dataset), dataset.num_classes, dataset.split) == ([0, 2], 3, "val")
    assert dataset.source == f"imagenet:{tmp_path}"


def test_only_the_validation_images(tmp_path):
    write_tree(tmp_path, "val/n00000003/a.JPEG", "val/n00000001/b.JPEG")
    dataset = load_images(f"imagenet:{tmp_path}")
    assert (labels(dataset), dataset.split) == ([0, 1], "val")


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        (["a/0.JPEG"], None, r"^imagenet:.* has neither a folder train nor a folder val$"),
        (["train/n00000001/0.JPEG", "val/n00000001/0.JPEG"], None, r"several splits in imagenet:.*: train, val; name"),
        (["train/n00000001/0.JPEG"], "test", r"unknown split 'test' in imagenet:.*; valid: train$"),
        (["val/ILSVRC2012_val_00000001.JPEG"], None, r"images lie directly in .*val: sort them into one folder per cl"),
        (["val/n00000001/0.JPEG", "val/cat/0.JPEG"], None, r"folders in .*val are not named by WordNet ids .*: cat$"),
        (["train/n00000001/0.JPEG", "val/n00000002/0.JPEG"], "val", r"class 'n00000002' of .* is not among the 1 of"),
    ],
)
def test_what_does_not_serve(tmp_path, files, split, message):
    write_tree(tmp_path, *files)
    with pytest.raises(DataError, match=message) as caught:
        load_images(f"imagenet:{tmp_path}", split=split)
    assert "\n" not in str(caught.value)


def test_an_empty_class(tmp_path):
    write_tree(tmp_path, "train/n00000001/0.JPEG")
    (tmp_path / "train" / "n00000000").mkdir()
    with pytest.raises(DataError, match=r"class folder .*n00000000 holds no images"):
        load_images(f"imagenet:{tmp_path}")


def test_no_such_folder(tmp_path):
    with pytest.raises(DataError, match="does not exist: there is no 'imgnet'"):
        load_images(f"imagenet:{tmp_path / 'imgnet'}")
