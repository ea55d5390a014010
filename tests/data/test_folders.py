"""Trees of images."""

import numpy as np
import pytest
from PIL import Image
from timm.data.readers import reader_image_folder
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from image_files import labels, write_tree
from vitrim.data import DataError, folders, load_images
from vitrim.data.decoding import is_readable


def test_reads_a_tree(tmp_path):
    dataset = load_images(str(write_tree(tmp_path, "b/2.png", "b/1.JPG", "a/x.webp", "a/y.bmp", "b/sub/3.tiff")))
    assert (labels(dataset), dataset.class_names, dataset.split) == ([0, 0, 1, 1, 1], ["a", "b"], None)
    assert dataset[1][0].shape == (3, 4, 6)
    assert [path.name for path in dataset.images] == ["x.webp", "y.bmp", "1.JPG", "2.png", "3.tiff"]


def test_splits_of_a_tree(tmp_path):
    write_tree(tmp_path, "train/a/0.png", "train/b/0.png", "train/c/0.png", "val/c/0.png", "val/a/0.png")
    (tmp_path / "notes").mkdir()
    dataset = load_images(tmp_path, split="validation")
    # the absent class does not move the others
    assert (labels(dataset), dataset.class_names, dataset.split) == ([0, 2], ["a", "b", "c"], "val")
    with pytest.raises(DataError, match=r"several splits in .*: train, val; name one as the split$"):
        load_images(tmp_path)
    with pytest.raises(DataError, match=r"unknown split 'test' in .*; valid: train, val$"):
        load_images(tmp_path, split="test")


def test_without_a_train_split_classes_are_of_all(tmp_path):
    write_tree(tmp_path, "test/b/0.png", "other/a/0.png")
    assert labels(load_images(tmp_path, split="test")) == [1]


def test_class_that_train_does_not_have(tmp_path):
    write_tree(tmp_path, "train/a/0.png", "val/images/0.png")
    with pytest.raises(DataError, match=r"class 'images' of .*val is not among the 1 of the train split"):
        load_images(tmp_path, split="val")


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        (
            ["0.png"],
            None,
            r"lie outside of class folders in .*; where labels do not count, one for all will do: .*/all$",
        ),
        (["a/0.png", "b/0.heic"], None, r"class folder .*b holds no images but 1 file \(1 .heic\): remove it"),
        (["a/0.png", "b/c/0.png"], None, r"mixes folders of images \(a\) and folders of folders of images \(b\)"),
        (["a/0.png"], "test", r"no split 'test' in .*: its folders are classes \(a\); leave split out"),
        (["a.csv/x"], None, r"no images"),
    ],
)
def test_trees_that_do_not_serve(tmp_path, files, split, message):
    write_tree(tmp_path, *(name for name in files if name.endswith(".png")))
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        load_images(tmp_path, split=split)


def test_a_tree_has_no_columns(tmp_path):
    with pytest.raises(DataError, match="leave out image_column"):
        load_images(write_tree(tmp_path, "a/0.png"), image_column="image")


def test_paths_that_do_not_exist(tmp_path):
    write_tree(tmp_path, "flowers/a/0.png")
    with pytest.raises(DataError, match=r"does not exist: there is no 'flower' in .*; did you mean .*flowers\?$"):
        load_images(tmp_path / "flower" / "train")
    with pytest.raises(DataError, match=r"valid: a path, or hfds/owner/name$"):
        load_images(tmp_path / "zzz")


def test_a_link_in_a_circle_is_refused(tmp_path):
    write_tree(tmp_path, "a/0.png", "b/0.png")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    with pytest.raises(DataError, match=r"again is a link to a folder that it lies in"):
        load_images(tmp_path)


def test_very_many_files_without_an_image_are_not_searched_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MOST_OTHERS", 5)
    (tmp_path / "a").mkdir()
    for index in range(6):
        (tmp_path / "a" / f"{index}.txt").touch()
    with pytest.raises(DataError, match=r"no images among the first 5 files and folders of .*a"):
        load_images(tmp_path)
    write_tree(tmp_path, "a/0.png")
    assert len(load_images(tmp_path)) == 1


HIDDEN = (".ipynb_checkpoints", ".thumbnails", "__MACOSX", "@eaDir")


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("place", ["{}/0.png", "a/{}/0.png", "a/sub/{}/0.png", "a/{}/sub/0.png"])
def test_hidden_folders_are_not_read_at_any_depth(tmp_path, recwarn, place, hidden):
    write_tree(tmp_path, "a/0.png", "a/sub/1.png", "b/1.png", place.format(hidden))
    dataset = load_images(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in dataset.images] == ["a/0.png", "a/sub/1.png", "b/1.png"]
    assert dataset.class_names == ["a", "b"]
    assert not recwarn.list


def test_files_that_systems_leave_are_neither_read_nor_counted(tmp_path, recwarn):
    write_tree(tmp_path, "a/1.png", "a/._1.png")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
        (tmp_path / "a" / name).touch()
    assert len(load_images(tmp_path)) == 1
    assert not recwarn.list


def test_a_folder_in_a_hidden_one_is_read(tmp_path):
    assert len(load_images(write_tree(tmp_path / ".cache" / "set", "a/0.png"))) == 1


def formats():
    """Suffix and name of every format that Pillow both writes and reads by itself, which opens it in this test."""
    stubs = {"BUFR", "GRIB", "HDF5", "WMF"}
    Image.init()
    return {
        suffix: name
        for suffix, name in Image.registered_extensions().items()
        if name in Image.SAVE and name in Image.OPEN and name not in stubs | {"EPS"}
    }


@pytest.mark.parametrize("suffix", sorted(formats()))
def test_every_format_of_pillow_is_read(tmp_path, recwarn, suffix):
    mode = {"MSP": "1", "XBM": "1", "BLP": "P"}.get(formats()[suffix], "RGB")
    (tmp_path / "a").mkdir()
    Image.new("RGB", (32, 32), (200, 30, 60)).convert(mode).save(tmp_path / "a" / f"0{suffix}", formats()[suffix])
    with Image.open(tmp_path / "a" / f"0{suffix}") as image:
        expected = np.asarray(image.convert("RGB"))
    found, label = load_images(tmp_path)[0]
    assert label == 0
    assert np.array_equal(found.permute(1, 2, 0).mul(255).round().numpy(), expected)
    assert not recwarn.list


@pytest.mark.parametrize("suffix", sorted({*IMG_EXTENSIONS, *reader_image_folder.get_img_extensions()}))
def test_what_torchvision_and_timm_read_is_read(suffix):
    assert is_readable(f"0{suffix}")


def test_what_is_skipped_is_counted_in_a_line(tmp_path):
    write_tree(tmp_path, "a/0.png", "b/0.png")
    for name in ("a/1.heic", "a/sub/2.HEIC", "b/3.eps", "b/notes", "b/notes.txt", "b/.hidden.heic"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match="^skipped in") as warned:
        assert len(load_images(tmp_path)) == 2
    (line,) = (str(one.message) for one in warned)
    assert line.startswith(f"skipped in {tmp_path}: 4 files (2 .heic, 1 without suffix, 1 .eps); images are read by")


@pytest.mark.parametrize("source", ["~no-such-user/x", "coco:~no-such-user/x"])
def test_a_home_folder_that_is_not_there(source):
    with pytest.raises(DataError, match="~no-such-user/x does not exist"):
        load_images(source)


def test_folders_with_numbers_are_those_of_torchvision_and_a_warning_says_so(tmp_path):
    write_tree(tmp_path, *(f"{number}/{number}.png" for number in range(12)))
    theirs = ImageFolder(tmp_path)
    with pytest.warns(UserWarning, match=r"as torchvision does: class 2 is '10'; timm, .* has '2' there"):
        dataset = load_images(tmp_path)
    assert dataset.class_names == theirs.classes
    assert labels(dataset) == theirs.targets
    assert (
        reader_image_folder.ReaderImageFolder(str(tmp_path)).class_to_idx["2"] == 2
    )  # timm's: what the warning is about


def test_folders_that_sort_alike_either_way_give_no_warning(tmp_path, recwarn):
    write_tree(tmp_path, *(f"{name}/0.png" for name in ("n01440764", "n02123045", "b2", "b3", "002.dog", "010.cat")))
    load_images(tmp_path)
    assert not recwarn.list
