"""Folders of images: one folder per class, optionally in one folder per split."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from vitrim.data.dataset import ImageDataset
from vitrim.data.decoding import is_readable
from vitrim.data.paths import existing, is_hidden, listed, pick_split, visible
from vitrim.errors import DataError

_SUFFIXES = "jpg png webp bmp tif gif avif ppm, and whatever else Pillow reads"

NOTES = frozenset({".txt", ".md", ".rst", ".csv", ".json", ".xml", ".yaml", ".yml", ".html", ".log"})
"""Suffixes of texts beside images, which nobody takes for images."""

MOST_OTHERS = 100_000
"""Entries without an image after which a folder is refused."""


def from_folder(root: Path, source: str, split: str | None) -> ImageDataset:
    """The dataset of a tree class/image, or split/class/image."""
    if root.resolve() == Path(root.resolve().anchor):
        raise DataError(f"{source} is the whole file system: name the folder of the images")
    classes = [folder for folder in class_folders(root) if has_images(folder)]
    splits = [root / name for name in split_folders(root)]
    named = listed(folder.name for folder in classes)
    if classes and splits:
        raise DataError(
            f"{source} mixes folders of images ({named}) and folders of folders of images "
            f"({listed(folder.name for folder in splits)}); expected class/image or split/class/image throughout"
        )
    if classes and split is not None:
        raise DataError(f"no split {split!r} in {source}: its folders are classes ({named}); leave split out")
    if classes:
        return read_classes(root, [root], source, None)
    if not splits:
        loose = has_images(root)
        found = "its images lie outside of class folders" if loose else "no images (or parquet files)"
        hint = f"; where labels do not count, one for all will do: {root / 'all'}" if loose else ""
        raise DataError(f"{found} in {source}; expected one folder per class with images ({_SUFFIXES}){hint}")
    name = pick_split(split, [folder.name for folder in splits], source)
    return read_classes(root / name, splits, source, name)


def split_folders(root: Path) -> list[str]:
    """The names of the folders in ``root`` that contain folders of images."""
    return [each.name for each in class_folders(root) if not has_images(each) and next(_walk(each), None)]


def read_classes(base: Path, splits: list[Path], source: str, split: str | None) -> ImageDataset:
    """The images of the class folders in ``base``, labelled by the sorted names of the classes in ``splits``.

    `train` gives the classes if it is among the splits, otherwise all do.
    """
    folders: dict[str, list[Path]] = defaultdict(list)
    for each in [folder for folder in splits if folder.name.lower() == "train"] or splits:
        for folder in class_folders(each):
            folders[folder.name].append(folder)
    for same in folders.values():  # an empty class is usually a stray folder, and would shift all labels after it
        other = Counter[str]()
        if not any(next(_walk(folder, other), None) for folder in same):
            but = f" but {_counted(other)}" if other else ""
            raise DataError(f"class folder {same[0]} holds no images{but}: remove it or fill it")
    class_names = numbered(folders)
    images: list[Path] = []
    labels: list[int] = []
    skipped = Counter[str]()
    # Within a class in the order of names, whatever the file system's.
    for folder in class_folders(base):
        if folder.name not in class_names:
            raise DataError(f"class {folder.name!r} of {base} is not among the {len(class_names)} of the train split")
        found = sorted(_walk(folder, skipped))
        images += found
        labels += [class_names.index(folder.name)] * len(found)
    _say_skipped(skipped, base)
    return ImageDataset(images, labels, class_names=class_names, source=source, split=split)


def numbered(names: Iterable[str]) -> list[str]:
    """Class names in the order of their labels, sorted as text like torchvision's; warns if numbers sort otherwise.

    Example:
        >>> numbered(["dog", "cat"])
        ['cat', 'dog']
    """
    ordered = sorted(names)
    by_number = sorted(ordered, key=_numbers)
    if ordered != by_number:
        place = next(place for place, pair in enumerate(zip(ordered, by_number, strict=True)) if pair[0] != pair[1])
        warnings.warn(
            f"class names are numbered in the order of text, as torchvision does: class {place} is {ordered[place]!r}; "
            f"timm, which counts the numbers in names, has {by_number[place]!r} there",
            stacklevel=2,
        )
    return ordered


def _numbers(name: str) -> list[tuple[int, str]]:
    """Sort key that compares numbers in names by value: '2' before '10'."""
    # Every second part is a number: pairs compare a number with a number, and a text with a text.
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]


def class_folders(path: Path) -> list[Path]:
    """The folders directly in ``path``, sorted, without hidden ones."""
    return [folder for folder in visible(path) if folder.is_dir()]


def subfolders(path: Path) -> list[str]:
    """The names of `class_folders`; none of a folder that is not there."""
    return [folder.name for folder in class_folders(path)] if path.is_dir() else []


def has_images(folder: Path) -> bool:
    """True if images are directly in ``folder``."""
    return any(is_readable(file.name) for file in visible(folder))


def loose_images(paths: Iterable[Path]) -> list[Path]:
    """The image files among ``paths`` and directly in folders among them, sorted within a folder."""
    found: list[Path] = []
    for path in paths:
        if existing(path).is_dir():
            files = [file for file in visible(path) if file.is_file()]
            inside = [file for file in files if is_readable(file.name)]
            if not inside:
                raise DataError(f"no images directly in {path}: name the files, or a folder that they lie in")
            found += inside
            _say_skipped(Counter(_not_read(file.name for file in files)), path)
        elif not is_readable(path.name):
            raise DataError(f"{path} is no image by its name; valid: {_SUFFIXES}")
        else:
            found.append(path)
    return found


def files_by_stem(folder: Path, source: str, suffixes: Iterable[str] | None = None) -> dict[str, Path]:
    """The images directly in a folder, of these ``suffixes`` or any, by their names without suffix, sorted."""
    if not folder.is_dir():
        raise DataError(f"{source} has no folder {folder}")
    found: dict[str, Path] = {}
    for file in visible(folder):
        if is_readable(file.name) if suffixes is None else file.suffix.lower() in suffixes:
            if file.stem in found:
                raise DataError(f"{found[file.stem]} and {file.name} have one name: whose the mask is cannot be known")
            found[file.stem] = file
    return found


def _walk(folder: Path, skipped: Counter[str] | None = None) -> Iterator[Path]:
    """Find all images below a folder, in no order, following links; counts in ``skipped`` the suffixes of other files.

    Refuses a link to a folder above it, and very many files without an image among them.
    """
    others, found = 0, False
    for base, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not is_hidden(name)]  # `os.walk` enters those that are left
        for name in folders:
            below = Path(base) / name
            if below.is_symlink() and Path(base).resolve().is_relative_to(below.resolve()):
                raise DataError(f"{below} is a link to a folder that it lies in: the images would be read without end")
        names = [name for name in names if not is_hidden(name)]
        images = [Path(base) / name for name in names if is_readable(name)]
        if skipped is not None:
            skipped.update(_not_read(names))
        yield from images
        found = found or bool(images)
        # A wrong folder, such as a home, has files without end: give up before it is walked.
        others += len(names) + len(folders)
        if not found and others > MOST_OTHERS:
            raise DataError(f"no images among the first {MOST_OTHERS} files and folders of {folder}")


def _not_read(names: Iterable[str]) -> Iterator[str]:
    """The suffixes of files that may be images and cannot be read."""
    suffixes = (Path(name).suffix.lower() for name in names if not is_readable(name))
    return (suffix for suffix in suffixes if suffix not in NOTES)


def _say_skipped(skipped: Counter[str], place: Path) -> None:
    if skipped:
        warnings.warn(
            f"skipped in {place}: {_counted(skipped)}; images are read by their suffix: {_SUFFIXES}", stacklevel=3
        )


def _counted(suffixes: Counter[str]) -> str:
    """Numbers of files, by their suffixes."""
    total = suffixes.total()
    most = sorted(suffixes.items(), key=lambda entry: (-entry[1], entry[0]))
    each = listed(f"{number} {suffix or 'without suffix'}" for suffix, number in most)
    return f"{total} file{'s' * (total > 1)} ({each})"
