"""NABirds: `nabirds:ROOT`, with the archive's text files and ROOT/images."""

from __future__ import annotations

from pathlib import Path

from vitrim.data.dataset import ImageDataset
from vitrim.data.paths import check_files, existing, pick_split, read_text
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
    classes = _of_every_image(root / "image_class_labels.txt", files, source)
    parts = _of_every_image(root / "train_test_split.txt", files, source)
    for image in files:
        if not classes[image].isdecimal() or len(classes[image]) > 18:
            raise DataError(f"the class of image {image} of {source} is {classes[image]!r}; expected a number")
        if parts[image] not in _PARTS:
            raise DataError(
                f"the split of image {image} of {source} is {parts[image]!r}; valid: 1 for train, 0 for test"
            )
    numbers = sorted({int(classes[image]) for image in files})
    names = _pairs(root / "classes.txt", source)
    for number in numbers:
        if str(number) not in names:
            raise DataError(f"class {number} has images but no name in {root / 'classes.txt'}")
    chosen = [image for image in files if _PARTS[parts[image]] == wanted]
    paths = [root / "images" / files[image] for image in chosen]
    check_files(paths, source)
    label_of = {number: label for label, number in enumerate(numbers)}
    labels = [label_of[int(classes[image])] for image in chosen]
    class_names = [names[str(number)] for number in numbers]
    return ImageDataset(paths, labels, class_names=class_names, source=source, split=wanted)


def _pairs(file: Path, source: str) -> dict[str, str]:
    """The lines of a file, each a key, a space and the rest."""
    pairs: dict[str, str] = {}
    for number, line in enumerate(read_text(file, source).splitlines(), start=1):
        key, _, value = line.strip().partition(" ")
        if not key:
            continue
        if not value:
            raise DataError(f"line {number} of {file} is {line!r}; expected two values with a space between them")
        if key in pairs:
            raise DataError(f"line {number} of {file} is the second of {key}")
        pairs[key] = value.strip()
    return pairs


def _of_every_image(file: Path, images: dict[str, str], source: str) -> dict[str, str]:
    """The lines of a file that has an entry for every image."""
    pairs = _pairs(file, source)
    missing = next((image for image in images if image not in pairs), None)
    if missing is not None:
        raise DataError(f"image {missing} ({images[missing]}) of {source} is not in {file.name}")
    return pairs
