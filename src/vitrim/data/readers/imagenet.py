"""ImageNet: `imagenet:ROOT`, with ROOT/train/WNID/*.JPEG, and ROOT/val/WNID/*.JPEG or all in ROOT/val."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vitrim.data.dataset import ImageDataset
from vitrim.data.folders import class_folders, files_by_stem, has_images, read_classes
from vitrim.data.paths import check_regular, existing, listed, pick_split, read_pairs, read_rows
from vitrim.data.readers import register_reader
from vitrim.errors import DataError, check_installed, first_line

_SPLITS = ("train", "val", "validation")
_WNID = r"n\d{8}"
_STEM = r"ILSVRC2012_val_\d{8}"
_KAGGLE = "LOC_val_solution.csv"
_DEVKIT = "ILSVRC2012_validation_ground_truth.txt"
_SYNSETS = "imagenet_2012_validation_synset_labels.txt"
_FORMS = (_KAGGLE, _SYNSETS, _DEVKIT)


@register_reader("imagenet")
def read_imagenet(path: str, *, split: str | None = None, labels: str | None = None) -> ImageDataset:
    """ImageNet, or a subset of its classes, in folders named by WordNet ids, which are the class names.

    Labels are indices in the sorted ids of the train split, or of the validation split if it is alone on disk. With all
    1000 classes they equal those of every published model. Other folders and files in the root are ignored.

    Validation images may also be in one folder, as published, beside a file with their classes, in the root, in the
    folder of the images, or in `data` of a folder in the root (the devkit). It may name images that are missing.

    * `LOC_val_solution.csv` (Kaggle): image id, then boxes, each after its WordNet id;
    * `ILSVRC2012_validation_ground_truth.txt` (the devkit): in line i the class number of image i. These numbers differ
      from those of published models; `meta.mat` or `map_clsloc.txt` beside it has their WordNet ids;
    * `imagenet_2012_validation_synset_labels.txt` (TensorFlow): in line i the WordNet id of image i.

    Args:
        split: `train` or `val`.
        labels: such a file elsewhere.
    """
    root, source = existing(path), f"imagenet:{path}"
    present = [name for name in _SPLITS if (root / name).is_dir()]
    name = pick_split(split, present, source, "folder train and no folder val")
    folders = [root / each for each in present]
    flat = [folder for folder in folders if has_images(folder)]
    if "train" in [folder.name for folder in flat]:
        raise DataError(f"images lie directly in {root / 'train'}: sort them into one folder per class, by WordNet ids")
    for folder in folders:
        inside = [entry.name for entry in class_folders(folder)]
        if folder in flat and inside:
            raise DataError(f"{folder} has images and folders ({listed(inside)}); expected one or the other")
        strange = [name for name in inside if not re.fullmatch(_WNID, name)]
        if strange:
            raise DataError(f"folders in {folder} are not named by WordNet ids such as n01440764: {listed(strange)}")
    if root / name not in flat:
        return read_classes(root / name, [folder for folder in folders if folder not in flat], source, name)
    return _flat(root, root / name, source, name, None if labels is None else existing(labels))


def _flat(root: Path, folder: Path, source: str, split: str, file: Path | None) -> ImageDataset:
    of_stem = _wnids(file or _label_file(root, folder), source)
    images = files_by_stem(folder, source)
    unknown = [images[stem].name for stem in images if stem not in of_stem]
    if unknown:
        raise DataError(f"{len(unknown)} of {len(images)} images in {folder} are in no line: {listed(unknown)}")
    train = [entry.name for entry in class_folders(root / "train")] if (root / "train").is_dir() else []
    # The train split has all classes; a part of the validation images may lack some.
    class_names = sorted(train or set(of_stem.values()))
    place = {wnid: number for number, wnid in enumerate(class_names)}
    strange = sorted({of_stem[stem] for stem in images} - set(place))
    if strange:
        raise DataError(f"class {strange[0]!r} of {folder} is not among the {len(place)} of the train split")
    labels = [place[of_stem[stem]] for stem in images]
    return ImageDataset(list(images.values()), labels, class_names=class_names, source=source, split=split)


def _label_file(root: Path, folder: Path) -> Path:
    places = [root, folder, *(each / "data" for each in class_folders(root))]
    found = [place / name for name in _FORMS for place in places if (place / name).is_file()]
    if not found:
        raise DataError(
            f"images lie directly in {folder}: sort them into one folder per class, named by WordNet ids, or put "
            f"{', '.join(_FORMS[:-1])} or {_FORMS[-1]} into {root}"
        )
    return found[0]


def _wnids(file: Path, source: str) -> dict[str, str]:
    """The WordNet id of each image, by its name without suffix."""
    if file.name not in _FORMS:
        raise DataError(f"{file} is no known file of labels; valid: {', '.join(_FORMS)}")
    if file.name == _KAGGLE:
        # after the name of an image its boxes, an id and four numbers each, all of one class
        form, expected = rf"({_STEM}),({_WNID})(?: .*)?", "an image and its boxes, each after a WordNet id"
        return read_pairs(file, source, form, expected, first=2)
    # the others have no names of images: line i is of image i
    if file.name == _DEVKIT:
        ids = _ids_of_devkit(file.parent, source)
        numbers = read_rows(file, source, f"({'|'.join(map(re.escape, ids))})", "the number of a class of the devkit")
        words = [ids[number] for (number,) in numbers]
    else:
        words = [wnid for (wnid,) in read_rows(file, source, f"({_WNID})", "a WordNet id such as n01440764")]
    return {f"ILSVRC2012_val_{number:08}": word for number, word in enumerate(words, start=1)}


def _ids_of_devkit(folder: Path, source: str) -> dict[str, str]:
    mapped, meta = folder / "map_clsloc.txt", folder / "meta.mat"
    if mapped.is_file():
        form, expected = rf"({_WNID})\s+(\d+)(?:\s.*)?", "a WordNet id and the number of its class"
        return {number: wnid for wnid, number in read_rows(mapped, source, form, expected)}
    if not meta.is_file():
        raise DataError(f"{folder / _DEVKIT} has the devkit's own numbers: put its meta.mat beside it")
    check_regular(meta, str(meta))
    synsets = _matlab(meta)
    return {str(number): str(wnid) for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)}


def _matlab(meta: Path) -> Any:
    check_installed(str(meta), "scipy")
    from scipy.io import loadmat

    try:
        synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
    except Exception as error:  # a damaged file: scipy raises errors of many kinds
        raise DataError(f"cannot read {meta}: {first_line(error)}") from error
    names = getattr(synsets, "dtype", None) and synsets.dtype.names
    if not names or not {"ILSVRC2012_ID", "WNID"} <= set(names):
        raise DataError(f"{meta} has no table of synsets with ILSVRC2012_ID and WNID")
    return synsets
