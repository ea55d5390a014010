"""Datasets specified by one string: a reader and its path, a file, a folder, or a name on the Hub."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrim.checked import checked_call
from vitrim.data.dataset import ImageDataset
from vitrim.data.folders import from_folder, split_folders
from vitrim.data.paths import HUB_PREFIX, check_given, existing, read_text, splits_in_names
from vitrim.data.readers import TASKS, WITH_LABELS, AnyDataset, readers
from vitrim.data.tables import (
    boxes_from_table,
    class_texts,
    from_table,
    masks_from_table,
    open_table,
    pages_from_table,
    parquet_files,
)
from vitrim.errors import DataError, VitrimError, unknown

HOLD_OUT_SEED = 0
"""Seed of held-out images, which is not a recipe's: see `hold_out`."""


@checked_call
def load_data(
    source: str | Path,
    *,
    task: str | None = None,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    **options: Any,
) -> AnyDataset:
    """Open a dataset of images with labels, masks or boxes. Images are decoded later, one by one.

    Sources:

    * `reader:path`, a published layout: `imagenet:PATH`, `nabirds:PATH`, `coco:PATH`, `nus_wide:PATH`,
      `webdataset:PATTERN`, `ade20k:PATH`, `cityscapes:PATH`, `voc:PATH`, `masks:PATH`; see `vitrim.data.readers`. A
      reader takes precedence over a path of the same spelling.
    * a parquet file or a folder of them. A split is the files with it as a word in their name: `cifar10-test.parquet`.
    * a folder of images, `root/class/x.png` or `root/split/class/x.png`. Labels are indices in the sorted names of the
      train split, otherwise of all splits: a class missing from one does not shift the labels of the others.
    * `hfds/owner/name`: a dataset of the Hugging Face Hub.

    Args:
        task: `segmentation`, `detection`, `instances` (detection with outlines) or `retrieval` (pages with queries).
            None, `classification` and `multilabel` mean the source's labels of whole images.
        split: `val`, `valid` and `validation` are equivalent in files and folders. Optional if there is only one or, on
            the Hub, if there is a `validation` split. `0.1`, or `train:0.1` of a part, is the share that a training
            with ``eval_split=0.1`` holds out, see `hold_out`.
        image_column: the column of images in a table, unless it is the only one.
        label_column: the column of labels in a table, unless it is called `label`, `labels` or `fine_label`, or is the
            only one with class labels or integers. Strings become labels in sorted order: of the train split, or of all
            splits without one. For dense tasks the column of masks or boxes, for retrieval that of queries, `query`.
        options: of the reader, by name; for tables of dense tasks `num_classes` and `ignore`, see
            `SegmentationDataset`; for any source `class_names`, in the order of the labels: a list, or a file with a
            name per line.

    Returns:
        A dataset of ((C, H, W) float32 in [0, 1], int label), or ((C, H, W), (K,) float32 of 0 and 1), until its
            `transform` is replaced; for dense tasks a `SegmentationDataset` or a `DetectionDataset`, for retrieval a
            `PageDataset`.

    Raises:
        DataError: source, reader, split or column does not exist or is ambiguous; files are missing or damaged; labels
            are not integers >= 0; the data does not fit the task.
        VitrimError: an argument or an option of a wrong type, or that the reader does not have.
        MissingPackageError: the source needs the package `datasets`, which is not installed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     (Path(root) / "val" / "n02084071").mkdir(parents=True)
        ...     Image.new("RGB", (4, 2)).save(Path(root) / "val" / "n02084071" / "0.JPEG")
        ...     dataset = load_data(f"imagenet:{root}")
        >>> dataset.split, dataset.class_names, dataset.labels.tolist()
        ('val', ['n02084071'], [0])
    """
    columns = {"image_column": image_column, "label_column": label_column}
    check_given(source, split=split, **columns)
    names = options.pop("class_names", None)
    names = None if names is None else _names(names)
    of_images = task in (None, *WITH_LABELS)
    given = {key: value for key, value in columns.items() if value is not None} | options
    if names is not None and not of_images:
        given["class_names"] = names
    whole, share = _share(split, source)
    check_given(source, split=whole)
    dataset = _opened(str(source), task, whole, given)
    if share is not None:
        _, dataset = parted(dataset, share, f"split {split} of {source}")
        # The name that was asked for, so that a report says which images were scored.
        dataset.split = split
    return _named(dataset, names) if names is not None and of_images else dataset


def _opened(source: str, task: str | None, split: str | None, options: dict[str, Any]) -> AnyDataset:
    if task is not None and task not in TASKS:
        raise DataError(str(unknown("task of data", task, TASKS)))
    name, colon, rest = source.partition(":")
    if colon and name in readers():
        return _from_reader(name, rest, task, split, options)
    try:
        hub = source.startswith(HUB_PREFIX)
        if not hub and colon and len(name) > 1 and name.isidentifier() and not os.path.exists(source):  # else a drive
            raise DataError(str(unknown("reader", name, readers())))
        # a Hub dataset has no files here, and a folder of images has no parquet files
        files = [] if hub else parquet_files(existing(source))
        if hub or files:
            return _from_table(source, files, task, split, options)
        return _from_images(source, task, split, options)
    except OSError as error:  # a folder without permission, or deleted meanwhile
        raise DataError(f"cannot read {error.filename or source}: {error.strerror}") from error


def _from_reader(name: str, path: str, task: str | None, split: str | None, options: dict[str, Any]) -> AnyDataset:
    forms = readers()[name]
    kind = task or next((each for each in WITH_LABELS if each in forms), None)
    if kind is None:
        raise DataError(f"{name} has no labels of whole images: name a task, task={' or task='.join(forms)}")
    if kind not in forms:
        # A reader of several tasks takes the one that was asked for; one of a single task has no such parameter.
        raise DataError(f"reader {name} has no data of task {task}; it has data of: {', '.join(forms)}")
    reader = forms[kind]
    for_task = {"task": kind} if "task" in inspect.signature(reader).parameters else {}
    return checked_call(reader, name)(path, split=split, **for_task, **options)


def _from_table(
    source: str, files: list[Path], task: str | None, split: str | None, options: dict[str, Any]
) -> AnyDataset:
    if task in ("multilabel", "instances"):
        raise DataError(f"{source} is a table of one label, mask or list of boxes per image: no data of task {task}")
    table, chosen, _, _ = open_table(source, files, split)
    if task in (None, "classification"):
        texts = partial(class_texts, source, files)
        return checked_call(from_table, "a table of images")(table, source, chosen, texts, **options)
    forms: dict[str | None, Callable[..., AnyDataset]] = {
        "segmentation": masks_from_table,
        "retrieval": pages_from_table,
    }
    form: Callable[..., AnyDataset] = forms.get(task, boxes_from_table)
    return checked_call(form, f"a table for {task}")(table, source, chosen, **options)


def _from_images(source: str, task: str | None, split: str | None, options: dict[str, Any]) -> ImageDataset:
    if task not in (None, "classification"):
        raise DataError(f"{source} is a folder of one folder per class: it has no data of task {task}")
    if options:
        raise DataError(f"{source} is a folder of images, without columns and options: leave out {', '.join(options)}")
    return from_folder(existing(source), source, split)


@checked_call
def _names(given: str | Path | list[str] | tuple[str, ...]) -> list[str]:
    """Class names from a list, or from a file with one per line."""
    where = "class_names"
    if isinstance(given, str) and given.startswith("["):  # a list without quotes
        raise DataError(f'class_names={given} is no list of names; write e.g. class_names=\'["cat","dog"]\'')
    if isinstance(given, str | Path):
        where = str(given)
        given = read_text(existing(given), where).rstrip().splitlines()
    names = [name.strip() for name in given]
    twice = [name for name, count in Counter(names).items() if count > 1 or not name]
    if twice or not names:
        fault = "has no names" if not names else "has an empty name" if "" in names else f"has {twice[0]!r} twice"
        raise DataError(f"{where} {fault}: give every class a name of its own, one per line")
    return names


def _named(dataset: AnyDataset, names: list[str]) -> AnyDataset:
    count = dataset.num_classes
    # Labels without names may lack the last classes: more names than labels are fine there.
    if len(names) != count and (dataset.class_names is not None or len(names) < count):
        raise DataError(f"{len(names)} class_names for the {count} classes of {dataset.source}: give one for each")
    dataset.class_names, dataset.num_classes = names, len(names)
    return dataset


def hold_out(count: int, share: float) -> tuple[list[int], list[int]]:
    """Split the indices of ``count`` images into those to train on and a ``share`` to hold out, both in order.

    The split is the same in every run on the same data, whatever its recipe's seed, so a run that starts from another's
    weights evaluates on no image that the other was trained on. A larger share contains a smaller one.

    Example:
        >>> kept, held_out = hold_out(10, 0.2)
        >>> len(kept), len(held_out), sorted(kept + held_out) == list(range(10))
        (8, 2, True)
    """
    watched = round(share * count)
    if not 0 < watched < count:
        raise VitrimError(f"a share of {share:g} of {count} images leaves none to {'train on' if watched else 'watch'}")
    # The first `watched` of one order: a larger share holds out the same images, and more.
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(count)
    return sorted(order[watched:].tolist()), sorted(order[:watched].tolist())


def parted(dataset: AnyDataset, share: float, where: str) -> tuple[AnyDataset, AnyDataset]:
    """A dataset in two, by `hold_out`: to train on, and the ``share`` to hold out; ``where`` begins the error."""
    try:
        kept, held_out = hold_out(len(dataset), share)
    except VitrimError as error:
        raise DataError(f"{where}: {error}") from None
    return dataset.part(kept), dataset.part(held_out)


def _share(split: str | None, source: str | Path) -> tuple[str | None, float | None]:
    """Part and share of a split `train:0.1` or `0.1`; otherwise the split itself and None."""
    part, colon, last = (split or "").rpartition(":")
    try:
        share = float(last)
    except ValueError:
        return split, None
    if not 0 < share < 1:  # a part may be called "1"
        return split, None
    parts = None if colon else splits_of(source)
    if parts and len(parts) > 1:
        named = "train" if "train" in parts else parts[0]
        raise DataError(f"{source} has the splits {', '.join(parts[:10])}: write {named}:{share:g}")
    return part if colon else None, share


def splits_of(source: str | Path) -> list[str] | None:
    """The splits of a folder, as spelled there; empty if it has none, or for a single file; None for a reader or the
    Hub.
    """
    name, colon, _ = str(source).partition(":")
    if str(source).startswith(HUB_PREFIX) or (colon and name in readers()):
        return None
    path = existing(source)
    files = parquet_files(path)
    if files:
        return [] if len(files) == 1 else splits_in_names(files)
    return [] if path.is_file() else split_folders(path)


@checked_call
def load_images(
    source: str | Path,
    *,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    **options: Any,
) -> ImageDataset:
    """Open an image classification dataset: `load_data`, where every image has one label.

    Arguments and errors as of `load_data`; also a `DataError` if images have several labels.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as root:
        ...     (Path(root) / "cat").mkdir()
        ...     Image.new("RGB", (4, 2)).save(Path(root) / "cat" / "0.png")
        ...     image, label = load_images(root)[0]
        >>> image.shape, label
        (torch.Size([3, 2, 4]), 0)
    """
    columns = {"image_column": image_column, "label_column": label_column}
    dataset = load_data(source, split=split, **columns, **options)
    if not isinstance(dataset, ImageDataset):
        raise DataError(f"images of {source} have several labels each, where one is needed: it is of task multilabel")
    return dataset
