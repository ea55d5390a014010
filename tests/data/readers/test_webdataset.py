"""WebDataset archives."""

import json
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from image_files import encoded, labels, picture
from vitrim.data import DataError, load_images


def write_tar(path: Path, **files: bytes) -> Path:
    """An archive; names are written with two underscores for the dot."""
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    return path


def sample(name: str, label: object, level: int = 0, *, image: str = "png", kind: str = "cls") -> dict[str, bytes]:
    text = json.dumps(label) if kind == "json" else str(label)
    return {f"{name}__{image}": encoded(picture(level)), f"{name}__{kind}": text.encode()}


def test_reads_archives_in_the_order_of_a_range(tmp_path):
    for number in range(9, 12):
        write_tar(tmp_path / f"{number:03d}.tar", **sample("a", number, number), **sample("b", 0))
    dataset = load_images(f"webdataset:{tmp_path}/{{009..011}}.tar")
    assert (labels(dataset), dataset.class_names, dataset.split) == ([9, 0, 10, 0, 11, 0], None, None)
    assert dataset[4][0][0, 0, 0].item() == pytest.approx(11 / 255)
    assert len(load_images(f"webdataset:{tmp_path}/01{{0..1}}.tar")) == 4
    assert len(load_images(f"webdataset:{tmp_path}/*.tar")) == 6
    assert len(load_images(f"webdataset:{tmp_path}/010.tar")) == 2


def test_splits_of_a_folder(tmp_path):
    write_tar(tmp_path / "train-0.tar", **sample("a", 1), **sample("b", 2))
    write_tar(tmp_path / "val-0.tar", **sample("a", 3))
    assert labels(load_images(f"webdataset:{tmp_path}", split="train")) == [1, 2]
    assert labels(load_images(f"webdataset:{tmp_path}", split="validation")) == [3]
    with pytest.raises(DataError, match=r"several splits in webdataset:.*: train, validation; name one"):
        load_images(f"webdataset:{tmp_path}")


@pytest.mark.parametrize(
    ("label", "column", "expected"),
    [
        ({"label": 4, "width": 6}, None, 4),
        ({"kind": 5, "label": 4}, "json.kind", 5),
        (7, None, 7),
    ],
)
def test_labels_in_json(tmp_path, label, column, expected):
    path = write_tar(tmp_path / "x.tar", **sample("a", label, kind="json", image="jpg"))
    assert labels(load_images(f"webdataset:{path}", label_column=column)) == [expected]


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (sample("a", "cat"), {}, r"^cannot read webdataset:.*invalid literal for int"),
        (sample("a", -1), {}, r"label of image 0 of webdataset:.* is -1; valid: integers >= 0"),
        (sample("a", {"kind": 1}, kind="json"), {}, r"no field 'label' in the .json of .* \(kind\); name one as"),
        (sample("a", 1), {"label_column": "json"}, r"no .json in webdataset:"),
        (sample("a", 1) | sample("b", 1, image="bmp"), {}, r"^cannot read webdataset:"),
    ],
)
def test_what_does_not_serve(tmp_path, files, options, message):
    path = write_tar(tmp_path / "x.tar", **files)
    with pytest.raises(DataError, match=message):
        load_images(f"webdataset:{path}", **options)


def test_an_image_or_a_label_that_is_missing_later_on(tmp_path):
    first = {name: content for number in range(5) for name, content in sample(f"s{number}", 0).items()}
    path = write_tar(tmp_path / "x.tar", **first, **sample("t", 1, image="bmp"))
    with pytest.raises(DataError, match=r"'t' of webdataset:.* has no .png: images need one suffix throughout$"):
        load_images(f"webdataset:{path}")
    path = write_tar(tmp_path / "y.tar", **first, t__png=encoded(picture()))
    with pytest.raises(DataError, match=r"row 5 of webdataset:.* has no label in column 'cls'"):
        load_images(f"webdataset:{path}")


def test_archives_that_do_not_exist_or_are_none(tmp_path):
    write_tar(tmp_path / "0.tar", **sample("a", 0))
    with pytest.raises(DataError, match=r"^1 of the 2 archives of webdataset:.* are missing, the first is .*1.tar$"):
        load_images(f"webdataset:{tmp_path}/{{0..1}}.tar")
    with pytest.raises(DataError, match=r"no archives \(.tar\) in webdataset:"):
        load_images(f"webdataset:{tmp_path}/{{2..1}}.tar")
    with pytest.raises(DataError, match=r"no archives \(.tar\) in webdataset:"):
        load_images(f"webdataset:{tmp_path}/*.tgz")
    with pytest.raises(DataError, match="does not exist"):
        load_images(f"webdataset:{tmp_path}/9.tar")
    (tmp_path / "bad.tar").write_bytes(b"nonsense" * 200)
    with pytest.raises(DataError, match=r"^cannot read webdataset:.*bad.tar: "):
        load_images(f"webdataset:{tmp_path}/bad.tar")


def test_texts_are_numbered_by_the_train_split(tmp_path):
    write_tar(tmp_path / "train-0.tar", **sample("a", "ant", kind="json"), **sample("b", "bee", kind="json"))
    write_tar(tmp_path / "test-0.tar", **sample("a", "bee", kind="json"))
    dataset = load_images(f"webdataset:{tmp_path}", split="test")
    assert (labels(dataset), dataset.class_names) == ([1], ["ant", "bee"])
