"""Image classification datasets by name or path.

    dataset = load_images("cifar10-test.parquet")  # or a folder of parquet files, an image folder, "hfds/owner/name"
    dataset.transform = eval_transform(model)      # what the model was evaluated with
    for images, labels in batches(dataset, 32, limit=1000):
        ...                                        # (B, C, H, W) float32, (B,) int64

Parquet files and Hub datasets are read with the optional package `datasets` (`pip install 'vitrim[data]'`), which is
imported only when such a source is opened.
"""

from __future__ import annotations

import difflib
import glob
import importlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from vitrim.errors import MissingPackageError, VitrimError

if TYPE_CHECKING:
    from PIL import Image

    Transform = Callable[[Image.Image], Tensor]

__all__ = ["DataError", "ImageDataset", "batches", "eval_transform", "load_images", "to_tensor"]

T = TypeVar("T")

_HUB_PREFIX = "hfds/"  # timm's spelling
_IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_SPLIT_SPELLINGS = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}
_MODES = ("RGB", "L")


class DataError(VitrimError):
    """A dataset that cannot be read as asked; the message is one line and says what is valid.

    Example:
        >>> try:
        ...     load_images("no-such-folder")
        ... except DataError as error:
        ...     print(str(error).split(";")[0])
        no-such-folder does not exist: there is no 'no-such-folder' in .
    """

    def __init__(self, message: str) -> None:
        # from a worker process the message arrives as a whole traceback, which ends with the error itself
        super().__init__(message.rpartition(f"{__name__}.DataError: ")[2].strip())


class _Images(Protocol):
    """Where encoded images lie: a list of paths, or the rows of a table. None is a row without an image."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes | Path | None: ...


def to_tensor(image: Image.Image) -> Tensor:
    """The pixels of an image as a tensor: the transform of a dataset that was given no other.

    Args:
        image: an RGB or an L (grey) image of any size H, W.

    Returns:
        (C, H, W) float32 in [0, 1]; C is 3 for RGB and 1 for L.

    Example:
        >>> from PIL import Image
        >>> to_tensor(Image.new("RGB", (4, 2))).shape
        torch.Size([3, 2, 4])
    """
    pixels = np.array(image, dtype=np.float32) / 255
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous()


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images with class labels, decoded when they are read. Usually made by `load_images`.

    Orientation tags (EXIF) are ignored and transparency is dropped, as timm and torchvision do: published accuracies
    were measured that way. 16-bit grey images are scaled to 8 bits.

    Args:
        images: encoded images: a sequence of paths, or of the bytes of image files.
        labels: (len(images),) integers >= 0.
        class_names: the name of each label, or None if they have none.
        source: where the images are from; used in messages.
        split: the split they are, or None if the source has none.
        transform: from a PIL image of mode `mode` to a tensor, by default `to_tensor`.
        mode: "RGB", or "L" for a transform that wants one channel.

    Attributes:
        labels: (len(images),) int64 numpy array.
        class_names, source, split, transform, mode: as given; `transform` and `mode` may be replaced.

    Raises:
        DataError: no images, a label that is missing, negative or not an integer, fewer class names than labels need,
            or an unknown mode.

    Example:
        >>> from io import BytesIO
        >>> from PIL import Image
        >>> file = BytesIO()
        >>> Image.new("RGB", (4, 2)).save(file, "png")
        >>> dataset = ImageDataset([file.getvalue()], [0], class_names=["black"])
        >>> image, label = dataset[0]
        >>> image.shape, dataset.class_names[label]
        (torch.Size([3, 2, 4]), 'black')
    """

    def __init__(
        self,
        images: _Images,
        labels: Sequence[int] | np.ndarray[Any, Any],
        *,
        class_names: Sequence[str] | None = None,
        source: str = "memory",
        split: str | None = None,
        transform: Transform = to_tensor,
        mode: str = "RGB",
    ) -> None:
        self.images = images
        self.labels = _checked_labels(labels, len(images), class_names, source)
        self.class_names = None if class_names is None else list(class_names)
        self.source = source
        self.split = split
        self.transform = transform
        if mode not in _MODES:
            raise DataError(f"unknown image mode {mode!r}; valid: {', '.join(_MODES)}")
        self.mode = mode

    @property
    def num_classes(self) -> int:
        """The number of classes: of class names if there are any, otherwise the largest label + 1.

        Example:
            >>> ImageDataset([b"", b""], [0, 6]).num_classes
            7
        """
        return int(self.labels.max()) + 1 if self.class_names is None else len(self.class_names)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Read one image.

        Returns:
            What the transform makes of it, by default (C, H, W) float32 in [0, 1], and its label in [0, num_classes).

        Raises:
            DataError: the image cannot be read; the message names the row or file.
            IndexError: no such image.
        """
        label = int(self.labels[index])  # first: an index out of range must be an IndexError, whatever holds the images
        file = self.images[index]
        where = f"image {index} of {self.source}" + (f" ({file})" if isinstance(file, Path) else "")
        return self.transform(_decode(file, where).convert(self.mode)), label


def load_images(
    source: str | Path,
    *,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageDataset:
    """Open an image classification dataset. Images are decoded later, one by one.

    Sources:

    * a parquet file or a folder of parquet files. A split is the files that have it as a word in their name, such as
      `train-0000.parquet` or `cifar10-test.parquet`.
    * a folder with one folder of images per class, `root/class/x.png`, or `root/split/class/x.png`. Labels are the
      places of the sorted class names: those of the train split if there is one, otherwise of all splits together, so
      that a class that is absent from one split does not move the labels of the others.
    * `hfds/owner/name`: a dataset of the Hugging Face Hub.

    Args:
        source: one of the above.
        split: which part; `val`, `valid` and `validation` mean the same in files and folders. May be left out where
            there is only one, or, on the Hub, where there is a `validation` split.
        image_column: the column of images in a table, if it is not the only one.
        label_column: the column of labels in a table, if it is not `label`, `labels` or `fine_label` and not the only
            one of class labels or integers. A column of strings becomes labels in sorted order.

    Returns:
        A dataset of ((C, H, W) float32 in [0, 1], int label) until its `transform` is replaced.

    Raises:
        DataError: there is no such source, split or column, or several and none was asked for; no images; labels that
            are not integers >= 0.
        MissingPackageError: the source needs the package `datasets`, which is not installed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     for name in ("dog", "cat"):
        ...         (Path(root) / name).mkdir()
        ...         Image.new("RGB", (4, 2)).save(Path(root) / name / "0.png")
        ...     dataset = load_images(root)
        ...     image, label = dataset[1]
        >>> dataset.class_names, image.shape, label
        (['cat', 'dog'], torch.Size([3, 2, 4]), 1)
    """
    if str(source).startswith(_HUB_PREFIX):
        return _from_hub(str(source), split, image_column, label_column)
    path = _existing(Path(source).expanduser())
    files = _parquet_files(path)
    if files:
        return _from_parquet(files, str(source), split, image_column, label_column)
    if image_column is not None or label_column is not None:
        raise DataError(f"{source} is a folder of images and has no columns: leave image_column and label_column out")
    return _from_folder(path, str(source), split)


def eval_transform(model: nn.Module) -> Transform:
    """The preprocessing a model was evaluated with: timm's at the input size the model has now, that of the image
    processor saved with a Hugging Face model, or what the model has as ``eval_transform`` (from a PIL image).

    A timm model with one input channel gets grey images, normalised with the average over the channels of its mean and
    standard deviation (timm sums the weights of the three channels, which has no exact counterpart).

    Args:
        model: the model, also after `reduce_`.

    Returns:
        From a PIL image of any mode and size to (C, H, W) float32, normalised; can be pickled.

    Raises:
        DataError: the model does not say how its images are prepared, or it takes neither one nor three channels.

    Example:
        >>> import timm
        >>> from PIL import Image
        >>> transform = eval_transform(timm.create_model("test_vit", in_chans=1, img_size=64))
        >>> transform(Image.new("RGB", (300, 200))).shape
        torch.Size([1, 64, 64])
    """
    own = getattr(model, "eval_transform", None)
    if own is not None:
        return _Converted("RGB", own)
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    if isinstance(source, str):
        return _Converted("RGB", _Processed(source))
    if not _is_timm(model):
        raise DataError(
            f"{type(model).__name__} is not a timm model and does not say how its images are prepared: set the "
            "dataset's transform, for example to torchvision's weights.transforms() or a transformers image processor"
        )
    from timm.data.config import resolve_data_config
    from timm.data.transforms_factory import create_transform

    channels = _input_channels(model)
    if channels not in (1, 3):
        raise DataError(f"the model takes {channels} channels; an image has 1 or 3")
    config = resolve_data_config({}, model=model)
    config["input_size"] = (channels, *_input_size(model, config["input_size"]))
    if channels == 1:  # three means would silently broadcast one channel to three
        config["mean"] = (float(np.mean(config["mean"])),)
        config["std"] = (float(np.mean(config["std"])),)
    return _Converted("L" if channels == 1 else "RGB", create_transform(**config))


def batches(
    dataset: Dataset[T],
    batch_size: int,
    *,
    limit: int | None = None,
    workers: int = 0,
) -> DataLoader[T]:
    """Read a dataset in batches, in its own order, the same at every call.

    Args:
        dataset: any map-style dataset; for an `ImageDataset` the transform must give images of one size.
        batch_size: B, at least 1; the last batch may be smaller.
        limit: read at most this many items, spread evenly over the dataset (the first ones would be of few classes
            where a file is sorted by class); None for all.
        workers: processes that read, 0 for this one.

    Returns:
        An iterable, with a length, of batches; for an `ImageDataset` (B, C, H, W) float32 images and (B,) int64 labels.

    Raises:
        ValueError: batch_size or limit below 1, or workers below 0.
        DataError: while iterating, an image that cannot be read.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> [x.tolist() for (x,) in batches(TensorDataset(torch.arange(10)), 2, limit=4)]
        [[0, 3], [6, 9]]
    """
    _at_least(1, batch_size=batch_size, limit=limit)
    _at_least(0, workers=workers)
    count = len(cast(Sized, dataset))
    if limit is not None and limit < count:
        indices = np.unique(np.linspace(0, count - 1, limit).round().astype(np.int64))
        dataset = Subset(dataset, indices.tolist())
    # a generator of its own: otherwise every pass draws a seed from the global one and changes what follows it
    generator = torch.Generator().manual_seed(0)
    return DataLoader(dataset, batch_size, shuffle=False, num_workers=workers, generator=generator)


# ---- tables: parquet files and the Hub


class _Rows:
    """The encoded images in one column of a `datasets.Dataset`."""

    def __init__(self, table: Any, column: str) -> None:
        datasets = _import_datasets()
        self.table = table.select_columns([column])
        self.column = column
        if isinstance(table.features[column], datasets.Image):  # decoded here, so that an error can name the row
            self.table = self.table.cast_column(column, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> bytes | Path | None:
        value = self.table[index][self.column]
        if value is None:
            return None
        if value["bytes"] is not None:
            return cast(bytes, value["bytes"])
        return None if value["path"] is None else Path(value["path"])


def _import_datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        if error.name != "datasets":  # installed, but something it needs is not
            raise
        message = "reading parquet files and Hub datasets needs the package 'datasets': pip install 'vitrim[data]'"
        raise MissingPackageError(message) from error


def _load(read: Callable[[], Any], source: str) -> Any:
    """Call `read` and turn what it raises about the source into one line."""
    datasets = _import_datasets()
    try:
        return read()
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"cannot read {source}: {_first_line(error.__cause__ or error)}") from error


def _from_hub(source: str, split: str | None, image_column: str | None, label_column: str | None) -> ImageDataset:
    datasets = _import_datasets()
    name = source.removeprefix(_HUB_PREFIX)
    if split is None:  # asked for before anything is downloaded
        present = _load(partial(datasets.get_dataset_split_names, name), source)
        split = "validation" if "validation" in present else _pick_split(None, present, source)
    table = _load(partial(datasets.load_dataset, name, split=split), source)
    return _from_table(table, source, split, image_column, label_column)


def _from_parquet(
    files: list[Path], source: str, split: str | None, image_column: str | None, label_column: str | None
) -> ImageDataset:
    datasets = _import_datasets()
    files, split = _choose_files(files, split, source)
    _check_parquet(files)
    patterns = [glob.escape(str(file)) for file in files]  # datasets takes every path for a pattern
    table = _load(partial(datasets.Dataset.from_parquet, patterns), source)
    return _from_table(table, source, split, image_column, label_column)


def _from_table(
    table: Any, source: str, split: str | None, image_column: str | None, label_column: str | None
) -> ImageDataset:
    image = _image_column(table.features, image_column, source)
    label = _label_column(table.features, label_column, source)
    labels, class_names = _read_labels(table, label, source)
    return ImageDataset(_Rows(table, image), labels, class_names=class_names, source=source, split=split)


def _parquet_files(path: Path) -> list[Path]:
    """The file itself, or the parquet files directly in a folder; empty if the folder has none."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix.lower() == ".parquet")
    if path.suffix.lower() != ".parquet":
        raise DataError(
            f"{path} is neither a parquet file nor a folder; valid: a .parquet file, a folder of them, a folder with "
            f"one folder of images per class, or {_HUB_PREFIX}owner/name"
        )
    return [path]


def _check_parquet(files: list[Path]) -> None:
    """Refuse files that are damaged, empty or do not belong together; reads only their footers."""
    datasets, parquet = _import_datasets(), importlib.import_module("pyarrow.parquet")
    footers = [_load(partial(parquet.read_metadata, file), str(file)) for file in files]
    features = [datasets.Features.from_arrow_schema(footer.schema.to_arrow_schema()) for footer in footers]
    for file, found in zip(files, features, strict=True):
        # also the class names: datasets would take those of the first file for all
        if found != features[0]:
            raise DataError(
                f"the parquet files do not belong together: {files[0].name} has {_describe(features[0])}; {file.name} "
                f"has {_describe(found)}, or other class names: give one file, or a split that selects like files"
            )
    if not any(footer.num_rows for footer in footers):
        raise DataError(f"no rows in {', '.join(map(str, files))}")


def _image_column(features: Any, asked: str | None, source: str) -> str:
    found: list[str] = [name for name, feature in features.items() if _is_image(feature)]
    if asked is None and len(found) == 1:
        return found[0]
    if asked is not None and asked in found:
        return asked
    raise _column_error("image", "of type Image or struct{bytes, path}", asked, found, features, source)


def _label_column(features: Any, asked: str | None, source: str) -> str:
    datasets = _import_datasets()
    if asked is None:
        asked = next((name for name in _LABEL_COLUMNS if name in features), None)
    if asked is not None and asked in features and _is_label(features[asked]):
        return asked
    classes: list[str] = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    found = classes or [name for name, feature in features.items() if _is_integer(feature)]
    if asked is None and len(found) == 1:
        return found[0]
    raise _column_error("label", "of class labels, integers or strings", asked, found, features, source)


def _column_error(kind: str, valid: str, asked: str | None, found: list[str], features: Any, source: str) -> DataError:
    if asked is not None:
        problem = f"column {asked!r} of {source} is not {valid}" if asked in features else f"no {asked!r} in {source}"
    elif found:
        problem = f"several {kind} columns in {source} ({', '.join(found)})"
    else:
        problem = f"no {kind} column ({valid}) in {source}"
    return DataError(f"{problem}; its columns: {_describe(features)}; name one with {kind}_column=NAME")


def _is_image(feature: Any) -> bool:
    if isinstance(feature, dict):  # a struct, as files have that were not written by datasets
        return set(feature) == {"bytes", "path"}
    return isinstance(feature, _import_datasets().Image)


def _is_integer(feature: Any) -> bool:
    return isinstance(feature, _import_datasets().Value) and feature.dtype.startswith(("int", "uint"))


def _is_string(feature: Any) -> bool:
    return isinstance(feature, _import_datasets().Value) and feature.dtype in ("string", "large_string")


def _is_label(feature: Any) -> bool:
    return isinstance(feature, _import_datasets().ClassLabel) or _is_integer(feature) or _is_string(feature)


def _describe(features: Any) -> str:
    def kind(feature: Any) -> str:
        if isinstance(feature, _import_datasets().Value):
            return str(feature.dtype)
        return f"struct{{{', '.join(feature)}}}" if isinstance(feature, dict) else type(feature).__name__

    return ", ".join(f"{name} ({kind(feature)})" for name, feature in features.items())


def _read_labels(table: Any, name: str, source: str) -> tuple[np.ndarray[Any, Any], list[str] | None]:
    """The labels of all rows, int64 (rows,), and the class names if there are any."""
    if not len(table):
        raise DataError(f"no images in {source}")
    column = table.select_columns([name]).with_format("arrow")[:].column(0)
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy()))
        raise DataError(f"row {row} of {source} has no label in column {name!r}")
    feature = table.features[name]
    if not _is_string(feature):
        return column.to_numpy(), None if _is_integer(feature) else list(feature.names)
    values = column.to_pylist()
    class_names = sorted(set(values))
    index = {value: label for label, value in enumerate(class_names)}
    return np.array([index[value] for value in values], dtype=np.int64), class_names


# ---- folders of images


def _from_folder(root: Path, source: str, split: str | None) -> ImageDataset:
    base, splits = _choose_folder(root, source, split)
    class_names = _class_names(splits)
    images: list[Path] = []
    labels: list[int] = []
    for folder in _folders(base):
        if folder.name not in class_names:
            raise DataError(f"class {folder.name!r} of {base} is not among the {len(class_names)} of the train split")
        found = sorted(_walk(folder))
        images += found
        labels += [class_names.index(folder.name)] * len(found)
    return ImageDataset(
        images, labels, class_names=class_names, source=source, split=None if base == root else base.name
    )


def _choose_folder(root: Path, source: str, split: str | None) -> tuple[Path, list[Path]]:
    """The folder that holds the class folders, and all such folders of the tree."""
    classes = [folder for folder in _folders(root) if _has_images(folder)]
    splits = [folder for folder in _folders(root) if not _has_images(folder) and next(_walk(folder), None)]
    if not classes and not splits:
        loose = "its images lie outside of class folders" if _has_images(root) else "no images (or parquet files)"
        suffixes = " ".join(sorted(suffix[1:] for suffix in _IMAGE_SUFFIXES))
        raise DataError(f"{loose} in {source}; expected one folder per class with images ({suffixes})")
    if classes and splits:
        raise DataError(
            f"{source} mixes folders of images ({_names(classes)}) and folders of folders of images "
            f"({_names(splits)}); expected class/image or split/class/image throughout"
        )
    if classes and split is not None:
        raise DataError(f"no split {split!r} in {source}: its folders are classes ({_names(classes)}); leave split out")
    if classes:
        return root, [root]
    name = _pick_split(split, [folder.name for folder in splits], source)
    return root / name, splits


def _class_names(splits: list[Path]) -> list[str]:
    reference = [folder for folder in splits if folder.name.lower() == "train"] or splits
    folders: dict[str, list[Path]] = defaultdict(list)
    for base in reference:
        for folder in _folders(base):
            folders[folder.name].append(folder)
    for same in folders.values():  # an empty class is more often a stray folder, and would move all labels after it
        if not any(next(_walk(folder), None) for folder in same):
            raise DataError(f"class folder {same[0]} holds no images: remove it or fill it")
    return sorted(folders)


def _folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _has_images(folder: Path) -> bool:
    return any(_is_image_file(file.name) for file in folder.iterdir())


def _walk(folder: Path) -> Iterator[Path]:
    """All images below a folder, in no order; through links, as datasets are often subsets made of them."""
    for base, _, names in os.walk(folder, followlinks=True):
        yield from (Path(base) / name for name in names if _is_image_file(name))


def _is_image_file(name: str) -> bool:
    # files that start with a dot are what some systems write beside the real ones
    return not name.startswith(".") and Path(name).suffix.lower() in _IMAGE_SUFFIXES


def _names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders[:5]) + (", ..." if len(folders) > 5 else "")


# ---- splits and paths


def _spellings(split: str) -> tuple[str, ...]:
    return next((words for words in _SPLIT_SPELLINGS.values() if split.lower() in words), (split.lower(),))


def _has_word(name: str, words: tuple[str, ...]) -> bool:
    # whole words only: "test" must not select "latest-train"
    return any(re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", name.lower()) for word in words)


def _choose_files(files: list[Path], split: str | None, source: str) -> tuple[list[Path], str | None]:
    """The files of one split, and its name (None if no file names one)."""
    chosen = [] if split is None else [file for file in files if _has_word(file.stem, _spellings(split))]
    if chosen:
        return chosen, split
    known = {name: [f for f in files if _has_word(f.stem, words)] for name, words in _SPLIT_SPELLINGS.items()}
    present = [name for name, found in known.items() if found]
    others = [file for file in files if not any(file in found for found in known.values())]
    if not present and split is None:
        return files, None
    if not present:
        raise DataError(f"no split {split!r} in {source}: its file names ({_names(files)}) name none; leave split out")
    return files, _pick_split(split, present + [file.stem for file in others], source)


def _pick_split(asked: str | None, present: list[str], source: str) -> str:
    if asked is None and len(present) == 1:
        return present[0]
    valid = ", ".join(present[:10]) + (", ..." if len(present) > 10 else "")
    if asked is None:
        raise DataError(f"several splits in {source}: {valid}; name one with split=NAME")
    for spelling in (asked, *_spellings(asked)):
        if spelling in present:
            return spelling
    raise DataError(f"unknown split {asked!r} in {source}; valid: {valid}")


def _existing(path: Path) -> Path:
    if path.exists():
        return path
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    entries = missing.parent.iterdir() if missing.parent.is_dir() else ()
    names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    close = difflib.get_close_matches(missing.name, names, n=1)
    hint = f"did you mean {missing.parent / close[0]}?" if close else f"valid: a path, or {_HUB_PREFIX}owner/name"
    raise DataError(f"{path} does not exist: there is no {missing.name!r} in {missing.parent}; {hint}")


# ---- images and labels


def _decode(file: bytes | Path | None, where: str) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if file is None:
        raise DataError(f"{where} is missing")
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.load()
    except UnidentifiedImageError as error:  # its own message shows a memory address
        raise DataError(f"cannot read {where}: not an image of a known format") from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read {where}: {_first_line(error)}") from error
    return _eight_bit(image, where)


def _eight_bit(image: Image.Image, where: str) -> Image.Image:
    """PIL clips wider pixels when it converts them, which would turn most of a 16-bit image white."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"cannot read {where}: its pixels are 32-bit numbers of unknown range (mode {image.mode})")
    return image


def _checked_labels(
    labels: Sequence[int] | np.ndarray[Any, Any], count: int, class_names: Sequence[str] | None, source: str
) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = np.asarray(labels)
    if count == 0:
        raise DataError(f"no images in {source}")
    if array.shape != (count,) or array.dtype.kind not in "iu":
        raise DataError(f"labels of {source} must be {count} integers, not {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64)
    end = np.iinfo(np.int64).max if class_names is None else len(class_names)
    wrong = (array < 0) | (array >= end)
    if wrong.any():
        row = int(np.argmax(wrong))
        valid = "integers >= 0" if class_names is None else f"0 to {end - 1}, one per class name"
        raise DataError(f"the label of image {row} of {source} is {array[row]}; valid: {valid}")
    return array


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---- the model's side


class _Converted:
    """A transform that converts the mode first, so that the dataset need not know what the model wants."""

    def __init__(self, mode: str, transform: Transform) -> None:
        self.mode = mode
        self.transform = transform

    def __call__(self, image: Image.Image) -> Tensor:
        return self.transform(image.convert(self.mode))


class _Processed:
    """The image processor saved in a folder, or on the Hub, next to a Hugging Face model."""

    def __init__(self, source: str) -> None:
        from transformers import AutoImageProcessor

        try:
            self.processor = AutoImageProcessor.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot read how images are prepared from '{source}' (preprocessor_config.json): {_first_line(error)}"
            ) from error

    def __call__(self, image: Image.Image) -> Tensor:
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def _is_timm(model: nn.Module) -> bool:
    # pretrained_cfg is set by create_model, also on models of our own; classes called directly do not have it
    inherited = any(kind.__module__.startswith("timm.") for kind in type(model).__mro__)
    return inherited or hasattr(model, "pretrained_cfg")


def _input_channels(model: nn.Module) -> int:
    # pretrained_cfg says 3 whatever in_chans was
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels


def _input_size(model: nn.Module, configured: tuple[int, ...]) -> tuple[int, int]:
    # pretrained_cfg keeps the size of training whatever img_size was
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = configured[-2:] if size is None else (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _at_least(minimum: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, not {value}")
