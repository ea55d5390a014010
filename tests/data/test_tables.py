"""Parquet files and the Hub."""

from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import torch

from image_files import encoded, labels, picture, plain_images, write_plain, write_table, write_tree
from vitrim.data import DataError, load_images

# ---- parquet


def test_reads_a_parquet_file(tmp_path):
    dataset = load_images(write_table(tmp_path / "x.parquet", [2, 0, 1]))
    assert len(dataset) == 3
    assert labels(dataset) == [2, 0, 1]
    assert (dataset.class_names, dataset.num_classes, dataset.split) == (["cat", "dog", "eel"], 3, None)
    assert dataset.source == str(tmp_path / "x.parquet")
    image, label = dataset[2]
    assert (image.shape, image.dtype, type(label)) == ((3, 4, 6), torch.float32, int)
    assert image[0, 0, 0].item() == pytest.approx(2 / 255)
    with pytest.raises(IndexError):
        dataset[3]


def test_paths_may_have_the_letters_of_patterns(tmp_path):
    folder = tmp_path / ".a[1]*"
    folder.mkdir()
    assert len(load_images(write_table(folder / "x.parquet", [0, 1]))) == 2


def test_images_are_found_without_features(tmp_path):
    file = write_plain(tmp_path / "x.parquet", pixels=plain_images(3), labels=[4, 0, 1])
    dataset = load_images(file)
    assert (labels(dataset), dataset.class_names, dataset.num_classes) == ([4, 0, 1], None, 5)


def test_images_may_be_paths(tmp_path):
    write_tree(tmp_path, "a.png")
    column = pa.array(
        [{"bytes": None, "path": str(tmp_path / "a.png")}], pa.struct([("bytes", "binary"), ("path", "string")])
    )
    image, _ = load_images(write_plain(tmp_path / "x.parquet", image=column, label=[0]))[0]
    assert image[0, 0, 0].item() == pytest.approx(7 / 255)


def test_splits_of_files(tmp_path):
    write_table(tmp_path / "train-00000-of-2.parquet", [0, 1])
    write_table(tmp_path / "train-00001-of-2.parquet", [2])
    write_table(tmp_path / "pets-val.parquet", [1])
    assert labels(load_images(tmp_path, split="train")) == [0, 1, 2]
    for spelling in ("val", "validation", "valid"):
        assert labels(load_images(tmp_path, split=spelling)) == [1]
    with pytest.raises(DataError, match=r"several splits in .*: train, validation; name one"):
        load_images(tmp_path)
    with pytest.raises(DataError, match=r"unknown split 'test' in .*; valid: train, validation$"):
        load_images(tmp_path, split="test")


def test_the_only_split_of_files_need_not_be_named(tmp_path):
    write_table(tmp_path / "cifar10-test.parquet", [0, 1])
    assert load_images(tmp_path).split == "test"
    with pytest.raises(DataError, match=r"unknown split 'train' in .*valid: test"):
        load_images(tmp_path / "cifar10-test.parquet", split="train")


@pytest.mark.parametrize(
    ("name", "split"),
    [("birds-val2", "validation"), ("valley", None), ("eval", None), ("interval", None), ("train-and-val", None)],
)
def test_a_single_file_is_read_whole(tmp_path, name, split):
    write_table(tmp_path / f"{name}.parquet", [0, 1])
    dataset = load_images(tmp_path / f"{name}.parquet")
    assert (labels(dataset), dataset.split) == ([0, 1], split)


def test_files_of_no_split(tmp_path):
    write_table(tmp_path / "b.parquet", [1])
    write_table(tmp_path / "a.parquet", [0])
    assert labels(load_images(tmp_path)) == [0, 1]
    with pytest.raises(DataError, match=r"no split 'test' in .*\(a.parquet, b.parquet\) name none; leave split out"):
        load_images(tmp_path, split="test")


def test_files_that_do_not_belong_together(tmp_path):
    write_table(tmp_path / "a.parquet", [0])
    write_table(tmp_path / "b.parquet", [0], feature=datasets.ClassLabel(names=["dog", "cat", "eel"]))
    with pytest.raises(DataError, match=r"do not belong together: a.parquet has img \(Image\).*b.parquet"):
        load_images(tmp_path)


def test_damaged_files(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"not parquet" * 9)
    with pytest.raises(DataError, match=r"cannot read .*x.parquet: Parquet magic bytes"):
        load_images(tmp_path / "x.parquet")
    good = write_table(tmp_path / "y.parquet", [0, 1, 2]).read_bytes()
    middle = good.index(b"PNG")
    (tmp_path / "y.parquet").write_bytes(good[:4] + b"\xff" * (middle - 4) + good[middle:])
    with pytest.raises(DataError, match=r"cannot read .*y.parquet: \w+"):
        load_images(tmp_path / "y.parquet")


# ---- columns


def test_column_is_asked_for(tmp_path):
    other = (datasets.Value("int32"), [5, 6])
    thumbnail = (datasets.Image(), [{"bytes": encoded(picture(99)), "path": None}] * 2)
    file = write_table(tmp_path / "x.parquet", [0, 1], other=other, thumbnail=thumbnail)
    with pytest.raises(
        DataError, match=r"several image columns in .* \(img, thumbnail\); its columns: img \(Image\), "
    ):
        load_images(file)
    dataset = load_images(file, image_column="thumbnail", label_column="other")
    assert labels(dataset) == [5, 6]
    assert dataset[0][0][0, 0, 0].item() == pytest.approx(99 / 255)
    with pytest.raises(DataError, match=r"no 'nme' in .*columns: img .*name one as the image column$"):
        load_images(file, image_column="nme")
    with pytest.raises(DataError, match=r"column 'other' of .* is not of type Image or struct"):
        load_images(file, image_column="other")
    with pytest.raises(DataError, match=r"column 'img' of .* is not of class labels, integers or strings"):
        load_images(file, image_column="img", label_column="img")


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        ({"fine_label": [1], "coarse_label": [0]}, 1),
        ({"label": [1], "other": [0]}, 1),
        ({"what": [3], "note": ["x"]}, 3),
    ],
)
def test_label_column_is_found(tmp_path, columns, chosen):
    assert labels(load_images(write_plain(tmp_path / "x.parquet", image=plain_images(1), **columns))) == [chosen]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": plain_images(1), "note": ["x"]}, r"no label column \(of class labels.*note \(string\); name one"),
        ({"image": plain_images(1), "a": [1], "b": [2]}, r"several label columns in .* \(a, b\)"),
        ({"image": plain_images(1), "label": [0.5]}, r"column 'label' of .* is not of class labels, integers or str"),
        ({"label": [1], "note": ["x"]}, r"no image column .*columns: label \(int64\), note \(string\)"),
        ({"image": plain_images(2), "label": [0, -1]}, r"label of image 1 of .* is -1; valid: integers >= 0"),
    ],
)
def test_columns_that_do_not_serve(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        load_images(write_plain(tmp_path / "x.parquet", **columns))


def test_strings_become_sorted_class_names(tmp_path):
    file = write_plain(tmp_path / "x.parquet", image=plain_images(3), label=["dog", "cat", "dog"])
    dataset = load_images(file)
    assert (labels(dataset), dataset.class_names) == ([1, 0, 1], ["cat", "dog"])


# ---- the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one dataset; the result is what was asked of it."""
    table = datasets.Dataset.from_parquet(str(write_table(tmp_path / "hub.parquet", [1, 2])))
    splits = ["train", "validation"]
    asked = []

    def load_dataset(name, *, split):
        asked.append((name, split))
        if split not in splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {splits}.\nmore')
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: splits)
    asked.append(splits)
    return asked


def test_reads_from_the_hub(hub):
    dataset = load_images("hfds/owner/name")
    assert (labels(dataset), dataset.split, dataset.source) == ([1, 2], "validation", "hfds/owner/name")
    assert load_images(Path("hfds/owner/name"), split="train").split == "train"
    assert hub[1:] == [("owner/name", "validation"), ("owner/name", "train")]


def test_the_hub_without_a_validation_split(hub):
    hub[0][:] = ["train", "test"]
    with pytest.raises(DataError, match="several splits in hfds/o/n: train, test"):
        load_images("hfds/o/n")
    hub[0][:] = ["test"]
    assert load_images("hfds/o/n").split == "test"


# ---- labels that are text: the same numbers in every split


def test_texts_are_numbered_by_the_train_split(tmp_path):
    write_plain(tmp_path / "train.parquet", image=plain_images(3), label=["cow", "ant", "bee"])
    write_plain(tmp_path / "test.parquet", image=plain_images(2), label=["cow", "ant"])
    write_plain(tmp_path / "other.parquet", image=plain_images(1))  # without labels
    for split, found in (("train", [2, 0, 1]), ("test", [2, 0])):
        dataset = load_images(tmp_path, split=split)
        assert (labels(dataset), dataset.class_names) == (found, ["ant", "bee", "cow"])


def test_texts_are_numbered_by_all_splits_where_none_is_train(tmp_path):
    write_plain(tmp_path / "val.parquet", image=plain_images(1), label=["bee"])
    write_plain(tmp_path / "test.parquet", image=plain_images(2), label=["cow", "ant"])
    dataset = load_images(tmp_path, split="test")
    assert (labels(dataset), dataset.class_names) == ([2, 0], ["ant", "bee", "cow"])


def test_a_text_that_the_train_split_does_not_have_is_refused(tmp_path):
    write_plain(tmp_path / "train.parquet", image=plain_images(2), label=["ant", "bee"])
    write_plain(tmp_path / "test.parquet", image=plain_images(2), label=["ant", "yak"])
    with pytest.raises(
        DataError, match=r"^row 1 of .* is of class 'yak', .* among the 2 of the train split: ant, bee$"
    ):
        load_images(tmp_path, split="test")


def test_texts_of_the_hub_are_numbered_by_its_train_split(tmp_path, monkeypatch):
    tables = {
        name: datasets.Dataset.from_parquet(
            str(write_table(tmp_path / f"{name}.parquet", texts, feature=datasets.Value("string")))
        )
        for name, texts in (("train", ["cow", "bee", "ant"]), ("test", ["cow", "ant"]))
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: tables[split])
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: list(tables))
    assert labels(load_images("hfds/owner/pets", split="test")) == [2, 0]


def test_numbers_that_are_texts_sort_as_text_and_a_warning_says_so(tmp_path):
    texts = [str(number) for number in range(12)]
    write_plain(tmp_path / "x.parquet", image=plain_images(12), label=texts)
    with pytest.warns(UserWarning, match="class 2 is '10'"):
        dataset = load_images(tmp_path / "x.parquet")
    assert [dataset.class_names[label] for label in labels(dataset)] == texts
