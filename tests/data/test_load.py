"""Which reader a source is for."""

from pathlib import Path

import pytest
from datasets import Value

from image_files import labels, write_table, write_tree
from vitrim.data import (
    DataError,
    ImageDataset,
    MultiLabelDataset,
    load_data,
    load_images,
    register_reader,
    stream_images,
)
from vitrim.data.load import hold_out
from vitrim.data.readers import readers
from vitrim.errors import VitrimError


@pytest.fixture
def echo(monkeypatch):
    """A reader that tells what it was called with, and another of several labels."""
    monkeypatch.setattr("vitrim.data.readers._READERS", dict(readers()))
    called = []

    @register_reader("echo")
    def read_echo(path, *, split=None, colour="red", image_column=None):
        called.append((path, split, colour, image_column))
        return ImageDataset([b""], [0])

    @register_reader("several")
    def read_several(path, *, split=None):
        return MultiLabelDataset([b""], [[1]])

    return called


def test_the_rest_of_the_text_is_for_the_reader(echo):
    load_images("echo:a:b", split="val")
    load_data("echo:", colour="blue", image_column="x")
    assert echo == [("a:b", "val", "red", None), ("", None, "blue", "x")]


def test_options_that_a_reader_does_not_have(echo):
    with pytest.raises(VitrimError, match=r"^unknown option of echo 'color'; did you mean 'colour'"):
        load_data("echo:x", color="blue")
    with pytest.raises(VitrimError, match=r"^unknown option of echo 'label_column'"):
        load_data("echo:x", label_column="y")
    with pytest.raises(VitrimError, match=r"^unknown option of several 'colour'"):
        load_data("several:x", colour="blue")
    assert echo == []


@pytest.mark.parametrize("read", [load_data, load_images, stream_images])
def test_arguments_that_are_no_names(read, echo, tmp_path):
    folder = write_tree(tmp_path, "a/0.png")
    for source in ("echo:x", folder, "hfds/owner/name"):
        for name in ("split", "image_column", "label_column"):
            for wrong in (5, ["train"], Path("train")):
                with pytest.raises(VitrimError, match=rf"{name}=.*: must be a text$"):
                    read(source, **{name: wrong})
    for wrong in (None, 5, ["x"]):
        with pytest.raises(VitrimError, match=r"source=.*: must be a text, or a path$"):
            read(wrong)
    assert echo == []


def test_classes_get_the_names_of_a_list_or_of_a_file(echo, tmp_path):
    root = write_tree(tmp_path, "data/a/0.png", "data/b/0.png", "data/b/1.png")
    (file := tmp_path / "names.txt").write_text("\ufeffgolden retriever\n Ente \n\n", encoding="utf-8")
    for given in (["golden retriever", "Ente"], str(file), file):
        data = load_data(root / "data", class_names=given)
        assert (data.class_names, data.num_classes, labels(data)) == (["golden retriever", "Ente"], 2, [0, 1, 1])
    part = load_data(root / "data", split="0.34", class_names=str(file))
    assert (len(part), part.class_names) == (1, ["golden retriever", "Ente"])
    numbered = write_table(tmp_path / "x.parquet", [4, 0], feature=Value("int64"))
    assert load_data(numbered, class_names=list("abcdefg")).num_classes == 7  # more than occur
    assert load_data("several:x", class_names=["cat"]).class_names == ["cat"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"], r"^1 class_names for the 2 classes of .*: give one for each$"),
        (["a", "a "], "^class_names has 'a' twice: "),
        ("a\n\nb", r"names.txt has an empty name: "),
        (b"\xff\xfe", r"names.txt: not text in UTF-8"),
        (Path("gone.txt"), "gone.txt does not exist"),
    ],
    ids=str,
)
def test_names_that_do_not_fit_are_refused(given, message, tmp_path):
    root = write_tree(tmp_path, "data/a/0.png", "data/b/0.png") / "data"
    if isinstance(given, str | bytes):
        content = given.encode() if isinstance(given, str) else given
        (file := tmp_path / "names.txt").write_bytes(content)
        given = file
    with pytest.raises(DataError, match=message):
        load_data(root, class_names=given)


def test_images_with_several_labels_are_not_given_where_one_is_needed(echo):
    assert isinstance(load_data("several:x"), MultiLabelDataset)
    with pytest.raises(DataError, match=r"^images of several:x have several labels each, where one is needed"):
        load_images("several:x")


def test_misspelt_reader(tmp_path):
    valid = ", ".join(readers())
    with pytest.raises(DataError, match=rf"^unknown reader 'nabrids'; did you mean 'nabirds'\? valid: {valid}$"):
        load_images("nabrids:x")
    with pytest.raises(DataError, match="does not exist"):
        load_images("c:x")  # a drive


def test_a_path_may_have_a_colon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path, "my:tree/a/0.png")
    assert len(load_images("my:tree")) == 1
    write_table(tmp_path / "x:1.parquet", [0, 1])
    assert len(load_images("x:1.parquet")) == 2


def test_a_split_may_be_the_share_that_training_holds_out(tmp_path):
    write_tree(
        tmp_path, *(f"{part}/{name}/{number}.png" for part in ("train", "test") for name in "ab" for number in range(6))
    )
    whole = load_data(tmp_path, split="train")
    part = load_data(tmp_path, split="train:0.25")
    kept, held_out = hold_out(12, 0.25)
    assert len(held_out) == 3
    assert set(kept) & set(held_out) == set()
    assert [part.images[place] for place in range(3)] == [whole.images[place] for place in held_out]
    assert (part.split, part.class_names) == ("train:0.25", whole.class_names)
    alone = load_data(tmp_path / "train", split="0.25")
    assert [alone.images[place] for place in range(3)] == [part.images[place] for place in range(3)]
    with pytest.raises(DataError, match=r"^split train:0.01 of .*: a share of 0.01 of 12 images leaves none to watch"):
        load_data(tmp_path, split="train:0.01")
    for name in ("1", "1.5", "nan", "train:x"):  # names of parts
        with pytest.raises(DataError, match="split"):
            load_data(tmp_path, split=name)


def test_a_share_of_data_in_parts_needs_the_name_of_one(tmp_path):
    write_tree(tmp_path, *(f"{part}/a/{number}.png" for part in ("train", "test") for number in range(4)))
    with pytest.raises(DataError, match=r" has the splits test, train: write train:0.25$"):
        load_data(tmp_path, split="0.25")
