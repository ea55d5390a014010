"""NABirds: `nabirds:ROOT`, with the archive's text files and ROOT/images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vitrim.data.dataset import ImageDataset
from vitrim.data.paths import check_files, existing, pick_split, read_pairs
from vitrim.data.readers import register_reader
from vitrim.errors import DataError

_EVALUATION = ("test", "val", "valid", "validation", "eval")
_PARTS = {"1": "train", "0": "test"}


@register_reader("nabirds")
def read_nabirds(path: str, *, split: str | None = None) -> ImageDataset:
    """NABirds (Van Horn et al., 2015), in the order of images.txt.

    `classes.txt` numbers the nodes of a tree, of which 555 have images in either split. Labels are the indices of these
    numbers in ascending order, 0 to 554.

    Expects images.txt, image_class_labels.txt, train_test_split.txt, classes.txt and images/ below ``path``. Splits are
    `train` and `test`, also called `val`, because models are selected on it.
    """
    root, source = existing(path), f"nabirds:{path}"
    wanted = pick_split("test" if split in _EVALUATION else split, ["train", "test"], source)
    files = _pairs(root / "images.txt", source)
    classes = _pairs(root / "image_class_labels.txt", source, r"\d{1,18}", "the number of its class")
    parts = _pairs(root / "train_test_split.txt", source, "[01]", "1 for train or 0 for test")
    _check_all(files, classes, root / "image_class_labels.txt")
    _check_all(files, parts, root / "train_test_split.txt")
    # Over both splits: a class that one of them lacks must not shift the others.
    numbers = sorted({int(classes[image]) for image in files})
    names = _pairs(root / "classes.txt", source)
    _check_all(map(str, numbers), names, root / "classes.txt")
    chosen = [image for image in files if _PARTS[parts[image]] == wanted]
    paths = [root / "images" / files[image] for image in chosen]
    check_files(paths, source)
    label_of = {number: label for label, number in enumerate(numbers)}
    labels = [label_of[int(classes[image])] for image in chosen]
    class_names = [names[str(number)] for number in numbers]
    return ImageDataset(paths, labels, class_names=class_names, source=source, split=wanted)


def _pairs(file: Path, source: str, value: str = ".+", what: str = "the rest") -> dict[str, str]:
    """The lines of a file: a key, a space and a value of the pattern ``value``."""
    return read_pairs(file, source, rf"(\S+) +({value})", f"a key, a space and {what}")


def _check_all(keys: Iterable[str], pairs: dict[str, str], file: Path) -> None:
    missing = next((key for key in keys if key not in pairs), None)
    if missing is not None:
        raise DataError(f"{missing} is in no line of {file}")
