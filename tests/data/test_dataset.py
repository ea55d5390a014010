"""Image classification datasets by name or path."""

import doctest
import importlib.util
import pickle
import sys
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import vitrim.data.dataset
from vitrim.data import DataError, ImageDataset, batches, eval_transform, load_images, to_tensor

CIFAR10_TEST = Path(__file__).parents[3] / "shared" / "data" / "cifar10-test.parquet"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keep what `datasets` writes out of the user's cache, and out of the folders the tests read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(level: int = 0, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new(mode, size, level if mode == "L" else (level, 0, 0))


def encoded(image: Image.Image, kind: str = "png") -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def write_table(path: Path, labels, *, label="label", feature=None, **columns) -> Path:
    """A parquet file as `datasets` writes it; pixel (0, 0) of row i has red = i."""
    images = [{"bytes": encoded(picture(i)), "path": None} for i in range(len(labels))]
    feature = feature or datasets.ClassLabel(names=["cat", "dog", "eel"])
    features = {"img": datasets.Image(), label: feature} | {name: value[0] for name, value in columns.items()}
    table = {"img": images, label: labels} | {name: value[1] for name, value in columns.items()}
    datasets.Dataset.from_dict(table, features=datasets.Features(features)).to_parquet(path)
    return path


def write_plain(path: Path, **columns) -> Path:
    """A parquet file without the features that `datasets` adds."""
    pq.write_table(pa.table(columns), path)
    return path


def plain_images(count: int) -> list[dict[str, object]]:
    return [{"bytes": encoded(picture(i)), "path": "x.png"} for i in range(count)]


def write_tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(7).save(root / name)
    return root


def labels(dataset: ImageDataset) -> list[int]:
    return [label for _, label in dataset]


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


def test_files_of_no_split(tmp_path):
    write_table(tmp_path / "b.parquet", [1])
    write_table(tmp_path / "a.parquet", [0])
    assert labels(load_images(tmp_path)) == [0, 1]
    with pytest.raises(DataError, match=r"no split 'test' in .*\(a.parquet, b.parquet\) name none; leave split out"):
        load_images(tmp_path, split="test")


def test_a_split_is_a_whole_word(tmp_path):
    write_table(tmp_path / "latest-train.parquet", [0])
    with pytest.raises(DataError, match="unknown split 'test'"):
        load_images(tmp_path, split="test")


def test_files_that_do_not_belong_together(tmp_path):
    write_table(tmp_path / "a.parquet", [0])
    write_table(tmp_path / "b.parquet", [0], feature=datasets.ClassLabel(names=["dog", "cat", "eel"]))
    with pytest.raises(DataError, match=r"do not belong together: a.parquet has img \(Image\).*b.parquet"):
        load_images(tmp_path)


def test_empty_table(tmp_path):
    with pytest.raises(DataError, match="no rows in"):
        load_images(write_table(tmp_path / "x.parquet", []))


def test_damaged_files(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"not parquet" * 9)
    with pytest.raises(DataError, match=r"cannot read .*x.parquet: Parquet magic bytes"):
        load_images(tmp_path / "x.parquet")
    good = write_table(tmp_path / "y.parquet", [0, 1, 2]).read_bytes()
    middle = good.index(b"PNG")
    (tmp_path / "y.parquet").write_bytes(good[:4] + b"\xff" * (middle - 4) + good[middle:])
    with pytest.raises(DataError, match=r"cannot read .*y.parquet: \w+"):
        load_images(tmp_path / "y.parquet")


def test_without_the_package(tmp_path, monkeypatch):
    file = write_table(tmp_path / "x.parquet", [0])
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (file, "hfds/owner/name"):
        with pytest.raises(ModuleNotFoundError, match=r"needs the package 'datasets': pip install 'vitrim\[data\]'$"):
            load_images(source)
    assert len(load_images(write_tree(tmp_path / "tree", "a/0.png"))) == 1


def test_importing_the_module_imports_nothing_optional(monkeypatch):
    for name in ("datasets", "pyarrow", "PIL", "timm"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("vitrim_data_again", vitrim.data.dataset.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


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
    with pytest.raises(DataError, match=r"no 'nme' in .*columns: img .*name one with image_column=NAME"):
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


def test_class_labels_before_integers(tmp_path):
    file = write_table(tmp_path / "x.parquet", [1], label="kind", id=(datasets.Value("int64"), [9]))
    assert labels(load_images(file)) == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": plain_images(1), "note": ["x"]}, r"no label column \(of class labels.*note \(string\); name one"),
        ({"image": plain_images(1), "a": [1], "b": [2]}, r"several label columns in .* \(a, b\)"),
        ({"image": plain_images(1), "label": [0.5]}, r"column 'label' of .* is not of class labels, integers or str"),
        ({"image": plain_images(1), "label": [[1, 2]]}, r"column 'label' of .* is not of class labels"),
        ({"label": [1], "note": ["x"]}, r"no image column .*columns: label \(int64\), note \(string\)"),
        ({"image": plain_images(2), "label": [0, None]}, r"row 1 of .* has no label in column 'label'"),
        ({"image": plain_images(2), "label": [0, -1]}, r"label of image 1 of .* is -1; valid: integers >= 0"),
    ],
)
def test_columns_that_do_not_serve(tmp_path, columns, message):
    with pytest.raises(DataError, match=message) as caught:
        load_images(write_plain(tmp_path / "x.parquet", **columns))
    assert "\n" not in str(caught.value)


def test_strings_become_sorted_class_names(tmp_path):
    file = write_plain(tmp_path / "x.parquet", image=plain_images(3), label=["dog", "cat", "dog"])
    dataset = load_images(file)
    assert (labels(dataset), dataset.class_names) == ([1, 0, 1], ["cat", "dog"])


# ---- folders


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
    with pytest.raises(DataError, match=r"several splits in .*: train, val; name one with split=NAME"):
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


def test_links_are_followed(tmp_path):
    write_tree(tmp_path / "all", "a/0.png")
    (tmp_path / "subset").mkdir()
    (tmp_path / "subset" / "a").symlink_to(tmp_path / "all" / "a")
    assert len(load_images(tmp_path / "subset")) == 1


@pytest.mark.parametrize(
    ("files", "split", "message"),
    [
        (["a/0.txt"], None, r"no images \(or parquet files\) in .*; expected one folder per class with images \(bmp"),
        (["0.png"], None, r"its images lie outside of class folders in"),
        (["a/0.png", "b/0.txt"], None, r"class folder .*b holds no images"),
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
    with pytest.raises(DataError, match="leave image_column and label_column out"):
        load_images(write_tree(tmp_path, "a/0.png"), image_column="image")


def test_paths_that_do_not_exist(tmp_path):
    write_tree(tmp_path, "flowers/a/0.png")
    with pytest.raises(DataError, match=r"does not exist: there is no 'flower' in .*; did you mean .*flowers\?$"):
        load_images(tmp_path / "flower" / "train")
    with pytest.raises(DataError, match=r"valid: a path, or hfds/owner/name$"):
        load_images(tmp_path / "zzz")


def test_other_files(tmp_path):
    (tmp_path / "x.csv").touch()
    with pytest.raises(DataError, match=r"x.csv is neither a parquet file nor a folder; valid: a .parquet file"):
        load_images(tmp_path / "x.csv")


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


def test_unknown_split_on_the_hub(hub):
    with pytest.raises(DataError, match=r"""cannot read hfds/o/n: Unknown split "dev". Should be one of .*\]\.$"""):
        load_images("hfds/o/n", split="dev")


def test_the_hub_without_a_validation_split(hub):
    hub[0][:] = ["train", "test"]
    with pytest.raises(DataError, match="several splits in hfds/o/n: train, test"):
        load_images("hfds/o/n")
    hub[0][:] = ["test"]
    assert load_images("hfds/o/n").split == "test"


def test_the_hub_does_not_have_it(monkeypatch):
    def missing(name):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "get_dataset_split_names", missing)
    with pytest.raises(DataError, match="cannot read hfds/o/n: Dataset 'o/n' doesn't exist"):
        load_images("hfds/o/n")


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


def test_unreadable_files_are_named_when_they_are_read(tmp_path):
    write_tree(tmp_path, "a/0.png", "a/1.png")
    (tmp_path / "a" / "1.png").write_bytes(b"")
    dataset = load_images(tmp_path)
    with pytest.raises(DataError, match=r"image 1 of .*a.1\.png\): not an image"):
        dataset[1]
    (tmp_path / "a" / "0.png").unlink()
    with pytest.raises(DataError, match=r"cannot read image 0 of .*No such file"):
        dataset[0]


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


def test_labels_without_class_names_and_unknown_modes():
    with pytest.raises(DataError, match="is 2; valid: 0 to 1, one per class name"):
        ImageDataset([b""], [2], class_names=["a", "b"])
    with pytest.raises(DataError, match="unknown image mode 'HSV'; valid: RGB, L"):
        ImageDataset([b""], [2], mode="HSV")


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


# ---- the model's preprocessing


def test_eval_transform_is_that_of_the_model():
    model = timm.create_model("test_vit")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8))
    expected = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))(image)
    torch.testing.assert_close(eval_transform(model)(image), expected, rtol=0, atol=0)
    assert eval_transform(timm.create_model("test_vit", img_size=(64, 96)))(image).shape == (3, 64, 96)
    assert eval_transform(model)(image.convert("RGBA")).shape == expected.shape


def test_eval_transform_of_a_class_called_directly():
    model = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=8, depth=1, num_heads=1)
    assert eval_transform(model)(picture()).shape == (3, 32, 32)


def test_eval_transform_of_one_channel():
    model = timm.create_model("test_vit", in_chans=1)
    dataset = ImageDataset([encoded(picture(255).convert("L"))], [0], transform=eval_transform(model))
    image, _ = dataset[0]
    mean, std = (np.mean(model.pretrained_cfg[name]) for name in ("mean", "std"))
    grey = picture(255).convert("L").getpixel((0, 0)) / 255
    torch.testing.assert_close(
        image, torch.full((1, 160, 160), (grey - mean) / std), rtol=0, atol=1e-5, check_dtype=False
    )


def test_models_that_do_not_say():
    with pytest.raises(DataError, match="Linear is not a timm model and does not say how its images are prepared"):
        eval_transform(nn.Linear(1, 1))
    with pytest.raises(DataError, match="takes 4 channels"):
        eval_transform(timm.create_model("test_vit", in_chans=4))


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


def test_batches_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    list(batches(TensorDataset(torch.arange(4)), 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_workers(tmp_path):
    dataset = load_images(write_table(tmp_path / "x.parquet", [0, 1, 2]))
    assert [batch.tolist() for _, batch in batches(dataset, 2, workers=1)] == [[0, 1], [2]]


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"limit": 0}, {"workers": -1}])
def test_wrong_batches(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"{name} must be at least {value + 1}, not {value}"):
        batches(TensorDataset(torch.arange(4)), **({"batch_size": 2} | wrong))


# ---- the whole


def test_examples():
    result = doctest.testmod(vitrim.data.dataset)
    assert result.attempted > 10
    assert result.failed == 0


def test_to_tensor_keeps_the_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    tensor = to_tensor(Image.fromarray(pixels))
    np.testing.assert_array_equal((tensor * 255).round().byte().permute(1, 2, 0).numpy(), pixels)


@pytest.mark.skipif(not CIFAR10_TEST.exists(), reason="needs ../shared/data/cifar10-test.parquet")
def test_cifar10():
    dataset = load_images(CIFAR10_TEST, split="test")
    assert (len(dataset), dataset.num_classes, dataset.class_names[0]) == (10_000, 10, "airplane")
    images, found = next(iter(batches(dataset, 100, limit=100)))
    assert images.shape == (100, 3, 32, 32)
    assert 0 <= images.min() < images.max() <= 1
    assert len(found.unique()) == 10
