"""ImageNet as it lies on disk."""

import numpy as np
import pytest
from scipy.io import savemat

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
        (["a/0.JPEG"], None, r"^imagenet:.* has no folder train and no folder val$"),
        (["train/n00000001/0.JPEG"], "test", r"unknown split 'test' in imagenet:.*; valid: train$"),
        (["val/ILSVRC2012_val_00000001.JPEG"], None, r"images lie directly in .*val: sort them into one folder per cl"),
        (["val/n00000001/0.JPEG", "val/cat/0.JPEG"], None, r"folders in .*val are not named by WordNet ids .*: cat$"),
        (["train/n00000001/0.JPEG", "val/n00000002/0.JPEG"], "val", r"class 'n00000002' of .* is not among the 1 of"),
    ],
)
def test_what_does_not_serve(tmp_path, files, split, message):
    write_tree(tmp_path, *files)
    with pytest.raises(DataError, match=message):
        load_images(f"imagenet:{tmp_path}", split=split)


FLAT = [f"val/ILSVRC2012_val_{number:08}.JPEG" for number in (1, 2, 3, 4)]
OF_IMAGE = ["n00000007", "n00000003", "n00000007", "n00000005"]  # sorted: 3, 5, 7


def write_flat(root, form):
    """Four validation images in one folder, and the file that says the classes of OF_IMAGE."""
    write_tree(root, *FLAT)
    match form:
        case "kaggle":  # in another order than the images, with several boxes
            rows = [
                f"{stem},{wnid} 1 2 30 40 {wnid} 5 6 7 8 "
                for stem, wnid in reversed([(name[4:-5], wnid) for name, wnid in zip(FLAT, OF_IMAGE, strict=True)])
            ]
            (root / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows, ""]))
        case "tensorflow":
            (root / "val" / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(OF_IMAGE) + "\n")
        case "devkit" | "map":  # the devkit's numbers are in no order of the ids
            data = root / "ILSVRC2012_devkit_t12" / "data"
            data.mkdir(parents=True)
            (data / "ILSVRC2012_validation_ground_truth.txt").write_text("2\n1\n2\n3\n")
            ids = ["n00000003", "n00000007", "n00000005", "n00000099"]  # the last is a class above others
            if form == "map":
                lines = [f"{wnid} {number} some_name" for number, wnid in enumerate(ids, start=1)]
                (data / "map_clsloc.txt").write_text("\n".join(lines))
            else:
                kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O")]
                rows = [(number, wnid, "some name") for number, wnid in enumerate(ids, start=1)]
                savemat(data / "meta.mat", {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    return f"imagenet:{root}"


@pytest.mark.parametrize("form", ["kaggle", "tensorflow", "devkit", "map"])
def test_validation_images_in_one_folder(tmp_path, form):
    dataset = load_images(write_flat(tmp_path, form))
    assert [path.name for path in dataset.images] == [name[4:] for name in FLAT]
    assert (labels(dataset), dataset.class_names) == ([2, 0, 2, 1], ["n00000003", "n00000005", "n00000007"])


def test_the_train_split_numbers_the_classes_of_one_folder(tmp_path):
    source = write_flat(tmp_path, "kaggle")
    write_tree(tmp_path, *(f"train/n0000000{number}/a.JPEG" for number in (1, 3, 5, 7)))
    (tmp_path / FLAT[0]).unlink()  # a file of labels may name more
    dataset = load_images(source, split="val")
    assert (labels(dataset), dataset.num_classes) == ([1, 3, 2], 4)
    assert labels(load_images(source, split="train")) == [0, 1, 2, 3]
    (tmp_path / "train" / "n00000005" / "a.JPEG").unlink()
    (tmp_path / "train" / "n00000005").rmdir()
    with pytest.raises(DataError, match=r"^class 'n00000005' of .*val is not among the 3 of the train split$"):
        load_images(source, split="val")


def test_a_file_of_labels_elsewhere(tmp_path):
    source = write_flat(tmp_path / "images", "kaggle")
    file = (tmp_path / "images" / "LOC_val_solution.csv").rename(tmp_path / "LOC_val_solution.csv")
    assert labels(load_images(source, labels=str(file))) == [2, 0, 2, 1]
    with pytest.raises(
        DataError, match=r"x.txt is no known file of labels; valid: LOC_val_solution.csv, imagenet_2012"
    ):
        load_images(source, labels=str(file.rename(tmp_path / "x.txt")))


@pytest.mark.parametrize(
    ("form", "break_it", "message"),
    [
        ("kaggle", lambda root: write_tree(root, "val/a.JPEG"), r"^1 of 5 images in .*val are in no line: a.JPEG$"),
        ("kaggle", lambda root: write_tree(root, "val/n00000001/a.JPEG"), r"val has images and folders \(n00000001\)"),
        (
            "kaggle",
            lambda root: (root / "LOC_val_solution.csv").write_text("a,b\nILSVRC2012_val_00000001,cat 1 2 3 4\n"),
            r"line 2 of .*csv is 'ILSVRC2012_val_00000001,cat 1 2 3 4'; expected an image and its boxes",
        ),
        (
            "devkit",
            lambda root: next(root.glob("*/data/meta.mat")).unlink(),
            r"own numbers: put its meta.mat beside it$",
        ),
        (
            "devkit",
            lambda root: savemat(next(root.glob("*/data/meta.mat")), {"synsets": [1.0]}),
            r"meta.mat has no table of synsets with ILSVRC2012_ID and WNID$",
        ),
        (
            "map",
            lambda root: next(root.glob("*/data/map*")).write_text("n00000003 1 a"),
            r"line 1 of .*ground_truth.txt is '2'; expected the number of a class of the devkit$",
        ),
    ],
)
def test_a_file_of_labels_that_does_not_serve(tmp_path, form, break_it, message):
    source = write_flat(tmp_path, form)
    break_it(tmp_path)
    with pytest.raises(DataError, match=message):
        load_images(source, split="val")
