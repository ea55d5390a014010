"""Datasets specified by one string: a reader and its path, a file, a folder, or a name on the Hub."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from vitrim.data.dataset import ImageDataset, MultiLabelDataset
from vitrim.data.errors import DataError
from vitrim.data.folders import from_folder
from vitrim.data.paths import HUB_PREFIX, check_given, existing, from_home
from vitrim.data.readers import Reader, readers
from vitrim.data.tables import from_hub, from_parquet, parquet_files
from vitrim.errors import unknown


def load_data(
    source: str | Path,
    *,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    **options: Any,
) -> ImageDataset | MultiLabelDataset:
    """Open a dataset of images with one label or with several. Images are decoded later, one by one.

    Sources:

    * `reader:path`, a dataset as its authors lay it out: `imagenet:PATH`, `nabirds:PATH`, `coco:PATH`, `nus_wide:PATH`,
      `webdataset:PATTERN`; see `vitrim.data.readers`. The reader wins over a path of the same spelling.
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
        options: of the reader, by name.

    Returns:
        A dataset of ((C, H, W) float32 in [0, 1], int label), or, where images have several classes, of ((C, H, W),
        (K,) float32 of 0 and 1), until its `transform` is replaced.

    Raises:
        DataError: there is no such source, reader, option, split or column, or several and none was asked for; no
            images; files that are missing or damaged; labels that are not integers >= 0.
        MissingPackageError: the source needs the package `datasets`, which is not installed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     for wnid in ("n02084071", "n02121808"):
        ...         (Path(root) / "val" / wnid).mkdir(parents=True)
        ...         Image.new("RGB", (4, 2)).save(Path(root) / "val" / wnid / "0.JPEG")
        ...     dataset = load_data(f"imagenet:{root}")
        ...     image, label = dataset[1]
        >>> dataset.split, dataset.class_names, label
        ('val', ['n02084071', 'n02121808'], 1)
    """
    check_given(source, split)
    name, colon, rest = str(source).partition(":")
    if colon and name in readers():
        columns = {"image_column": image_column, "label_column": label_column}
        given = {key: value for key, value in columns.items() if value is not None}
        return _checked_reader(name, given | options)(rest, split=split, **given, **options)
    if options:
        raise DataError(f"{source} has no options ({', '.join(options)}): they are of readers, e.g. nus_wide:PATH")
    if str(source).startswith(HUB_PREFIX):
        return from_hub(str(source), split, image_column, label_column)
    path = existing(_not_a_reader(str(source)))
    try:
        files = parquet_files(path)
        if files:
            return from_parquet(files, str(source), split, image_column, label_column)
        if image_column is not None or label_column is not None:
            raise DataError(f"{source} is a folder of images and has no columns: name none for images or labels")
        return from_folder(path, str(source), split)
    except OSError as error:  # a folder without permission, or one that goes away meanwhile
        raise DataError(f"cannot read {error.filename or source}: {error.strerror}") from error


def load_images(
    source: str | Path,
    *,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    **options: Any,
) -> ImageDataset:
    """Open an image classification dataset: `load_data`, where every image has one label.

    Args:
        source, split, image_column, label_column, options: as of `load_data`.

    Returns:
        A dataset of ((C, H, W) float32 in [0, 1], int label) until its `transform` is replaced.

    Raises:
        DataError: as `load_data`; or the images have several labels.
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
    dataset = load_data(source, split=split, image_column=image_column, label_column=label_column, **options)
    if isinstance(dataset, MultiLabelDataset):
        raise DataError(f"images of {source} have several labels each, where one is needed: it is of task multilabel")
    return dataset


def _checked_reader(name: str, options: dict[str, Any]) -> Reader:
    reader = readers()[name]
    parameters = inspect.signature(reader).parameters.values()
    valid = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "split"]
    for option in options:
        if option not in valid:
            raise DataError(f"{name} has no option {option!r}; valid: {', '.join(valid) or 'none'}")
    return reader


def _not_a_reader(source: str) -> Path:
    """Return the source as a path; refuse a misspelt reader with a message about readers rather than folders."""
    path = from_home(source)
    name, colon, _ = source.partition(":")
    if colon and len(name) > 1 and name.isidentifier() and not os.path.exists(path):  # one letter is a drive
        raise DataError(str(unknown("reader", name, readers())))
    return path
