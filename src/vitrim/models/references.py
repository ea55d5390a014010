"""Reference checkpoints: small models trained on real images with ``vitrim train``, shipped with the package.

Each is a folder with the weights (bfloat16 safetensors), the recipe, the log and the result of their run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrim.checked import Stored
from vitrim.errors import check_known
from vitrim.files import read_json
from vitrim.weights import RESULT, WEIGHTS_FILE

__all__ = ["CLASSES", "class_names", "folder", "references", "source_of", "trained_on"]

FOLDER = Path(__file__).parent

CLASSES = "classes"
"""Key of the class names among a run's results."""


def references() -> dict[str, Path]:
    """Folders of the reference checkpoints by name."""
    return {path.parent.name: path.parent for path in sorted(FOLDER.glob(f"*/{WEIGHTS_FILE}"))}


def folder(name: str) -> Path:
    """Folder of a reference checkpoint; `VitrimError` for an unknown name."""
    known = references()
    check_known("reference checkpoint", name, known)
    return known[name]


class _RunResult(Stored):
    classes: list[str] | None = None
    trained_on: list[str | None] | None = None


def class_names(checkpoint: Path) -> list[str] | None:
    """Class names that a run learned, in order; None for other weights, or classes without names.

    ``checkpoint`` is the folder of the run, or its file of weights; `VitrimError` if its results cannot be read.

    Example:
        >>> class_names(folder("cifar10_vit"))[:2]
        ['airplane', 'automobile']
    """
    found = _result(checkpoint.parent if checkpoint.name == WEIGHTS_FILE else checkpoint)
    return None if found is None else found.classes


def trained_on(name: str, dataset: Any) -> list[str]:
    """A sentence if a model learned from the images of ``dataset``; none for models that are no ``run:FOLDER``.

    Source and split are compared: of a split of which the run held out a part, most images were trained on.
    """
    library, _, folder = name.partition(":")
    found = _result(Path(folder).expanduser()) if library == "run" else None
    if found is None or found.trained_on is None or dataset is None or found.trained_on != source_of(dataset):
        return []
    return [
        f"{name} was trained on these images, or most of them, so accuracy is too good and losses are too small: "
        "give images that it has not seen"
    ]


def _whole(source: Any) -> str:
    """A source whose folder is absolute."""
    layout, colon, place = str(source).rpartition(":")
    return f"{layout}{colon}{Path(place).expanduser().resolve()}"


def source_of(dataset: Any) -> list[str | None]:
    """Source and split, which `trained_on` compares and a run keeps; a split that is a folder belongs to the source."""
    source, split = _whole(dataset.source), getattr(dataset, "split", None)
    return [f"{source}/{split}", None] if split and Path(source, split).is_dir() else [source, split]


def _result(run: Path) -> _RunResult | None:
    return _RunResult.of(read_json(run / RESULT), run / RESULT) if (run / RESULT).is_file() else None
