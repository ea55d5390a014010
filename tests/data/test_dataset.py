"""Image datasets and their batches."""

import importlib.util
import pickle
import pkgutil
import sys
from importlib import import_module

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import vitrim.data
import vitrim.data.readers
from image_files import encoded, labels, picture, write_plain, write_table, write_tree
from vitrim.data import (
    DataError,
    ImageDataset,
    MultiLabelDataset,
    batches,
    eval_transform,
    load_images,
    to_tensor,
)

MODULES = ["vitrim.data", *(found.name for found in pkgutil.walk_packages(vitrim.data.__path__, "vitrim.data."))]


def test_importing_the_package_imports_nothing_optional(monkeypatch):
    files = {name: import_module(name).__file__ for name in MODULES}
    monkeypatch.setattr(vitrim.data.readers, "_READERS", {})  # a reader enters itself when its file is run
    for name in ("datasets", "pyarrow", "PIL", "timm"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, file in files.items():
        spec = importlib.util.spec_from_file_location(f"{name.replace('.', '_')}_again", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look
        spec.loader.exec_module(module)


# ---- images


def test_unreadable_images_are_named_when_they_are_read(tmp_path):
    good = encoded(picture())
    rows = [{"bytes": value, "path": None} for value in (good, b"nonsense", good[:-30], None)]
    dataset = load_images(write_plain(tmp_path / "x.parquet", image=rows, label=[0, 1, 2, 3]))
    dataset[0]
    with pytest.raises(DataError, match=r"cannot read image 1 of .*x.parquet: not an image of a known format$"):
        dataset[1]
    with pytest.raises(DataError, match=r"cannot read image 2 of .*x.parquet: \w+"):
        dataset[2]
    with pytest.raises(DataError, match=r"image 3 of .*x.parquet is missing"):
        dataset[3]


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("stored", ["RGB", "L", "RGBA", "P", "1"])
def test_modes(mode, channels, stored):
    dataset = ImageDataset([encoded(picture(255).convert(stored))], [0], mode=mode)
    assert dataset[0][0].shape == (channels, 4, 6)


def test_wide_pixels():
    ramp = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    image, _ = ImageDataset([encoded(Image.fromarray(ramp))], [0], mode="L")[0]
    assert (image * 255).round().tolist() == [[[0, 1, 128, 255]]]
    with pytest.raises(
        DataError, match=r"image 0 of memory: its pixels are 32-bit numbers of unknown range \(mode F\)"
    ):
        ImageDataset([encoded(Image.fromarray(ramp.astype(np.float32)), "tiff")], [0])[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "no images in memory"),
        (([b""], [0, 1]), r"labels of memory must be 1 integers, not int64 of shape \(2,\)"),
        (([b""], [0.0]), "must be 1 integers, not float64"),
        (([b""], [True]), "must be 1 integers, not bool"),
        (([b"", b""], [0, -1]), "label of image 1 of memory is -1; valid: integers >= 0"),
    ],
)
def test_wrong_datasets(arguments, message):
    with pytest.raises(DataError, match=message):
        ImageDataset(*arguments)


def test_pickles(tmp_path):
    transform = eval_transform(timm.create_model("test_vit"))
    for source in (write_table(tmp_path / "x.parquet", [2, 0]), write_tree(tmp_path / "tree", "a/0.png", "b/0.png")):
        dataset = load_images(source)
        dataset.transform = transform
        again = pickle.loads(pickle.dumps(dataset))
        assert (again.class_names, again.source, labels(again)) == (
            dataset.class_names,
            dataset.source,
            labels(dataset),
        )
        torch.testing.assert_close(again[1][0], dataset[1][0], rtol=0, atol=0)


# ---- several labels


def test_several_labels():
    files = [encoded(picture(level)) for level in (0, 255)]
    dataset = MultiLabelDataset(files, np.array([[1, 0, 1], [0, 0, 0]]), class_names=["cat", "dog", "eel"])
    assert (len(dataset), dataset.num_classes, dataset.targets.dtype) == (2, 3, np.bool_)
    image, target = dataset[1]
    assert (image.shape, image.max().item()) == ((3, 4, 6), 1)
    assert (target.dtype, target.tolist()) == (torch.float32, [0, 0, 0])
    images, targets = next(iter(batches(dataset, 2)))
    assert (images.shape, targets.dtype, targets.tolist()) == ((2, 3, 4, 6), torch.float32, [[1, 0, 1], [0, 0, 0]])
    with pytest.raises(IndexError):
        dataset[2]


def test_several_labels_share_the_reading_of_images():
    dataset = MultiLabelDataset([encoded(picture(255)), b"nonsense"], [[1], [0]], mode="L")
    assert dataset[0][0].shape == (1, 4, 6)
    with pytest.raises(DataError, match=r"cannot read image 1 of memory: not an image of a known format$"):
        dataset[1]


@pytest.mark.parametrize(
    ("targets", "names", "message"),
    [
        ([[1, 0]], None, r"targets of memory must be 2 rows of 0 and 1, one per class, not int64 of shape \(1, 2\)"),
        ([[0.5], [1.0]], None, r"must be 2 rows .* not float64"),
        ([[0, 1], [1, 2]], None, r"target 1 of image 1 of memory is 2; valid: 0 and 1"),
        ([[0, 1], [1, 0]], ["cat"], r"targets of memory are of 2 classes, but there are 1 names"),
    ],
)
def test_wrong_targets(targets, names, message):
    with pytest.raises(DataError, match=message):
        MultiLabelDataset([b"", b""], targets, class_names=names)


# ---- batches


def test_batches_are_in_order(tmp_path):
    dataset = load_images(write_table(tmp_path / "x.parquet", [0, 1, 2, 0, 1]))
    loader = batches(dataset, 2)
    assert len(loader) == 3
    images, first = next(iter(loader))
    assert (images.shape, images.dtype, first.dtype) == ((2, 3, 4, 6), torch.float32, torch.int64)
    assert [batch.tolist() for _, batch in loader] == [[0, 1], [2, 0], [1]]


@pytest.mark.parametrize("limit", [1, 2, 7, 99, 100, 1000])
def test_limit_spreads_evenly(limit):
    rows = [int(row) for (batch,) in batches(TensorDataset(torch.arange(100)), 8, limit=limit) for row in batch]
    again = [int(row) for (batch,) in batches(TensorDataset(torch.arange(100)), 3, limit=limit) for row in batch]
    assert rows == again == sorted(set(rows))
    assert len(rows) == min(limit, 100)
    if limit > 1:
        assert (rows[0], rows[-1]) == (0, 99)
        steps = np.diff(rows)
        assert steps.max() - steps.min() <= 1


def test_limit_reads_every_class_of_a_sorted_file():
    sorted_labels = TensorDataset(torch.arange(1000) // 100)
    assert [int(label) for (batch,) in batches(sorted_labels, 5, limit=10) for label in batch] == list(range(10))


def test_workers(tmp_path):
    dataset = load_images(write_table(tmp_path / "x.parquet", [0, 1, 2]))
    assert [batch.tolist() for _, batch in batches(dataset, 2, workers=1)] == [[0, 1], [2]]


# ---- the whole


def test_to_tensor_keeps_the_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    tensor = to_tensor(Image.fromarray(pixels))
    np.testing.assert_array_equal((tensor * 255).round().byte().permute(1, 2, 0).numpy(), pixels)
