"""Reference checkpoints: small models trained on real images with ``vitrim train``, shipped with the package.

Each is a folder with the weights (bfloat16 safetensors), the recipe, the log and the result of their run.
"""

from __future__ import annotations

from pathlib import Path

from vitrim.checked import Stored
from vitrim.errors import check_known
from vitrim.files import read_json
from vitrim.weights import RESULT, WEIGHTS_FILE

__all__ = ["CLASSES", "class_names", "folder", "references"]

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


def class_names(checkpoint: Path) -> list[str] | None:
    """Class names that a run learned, in order; None for other weights, or classes without names.

    ``checkpoint`` is the folder of the run, or its file of weights; `VitrimError` if its results cannot be read.

    Example:
        >>> class_names(folder("cifar10_vit"))[:2]
        ['airplane', 'automobile']
    """
    run = checkpoint.parent if checkpoint.name == WEIGHTS_FILE else checkpoint
    if not (run / RESULT).is_file():
        return None
    return _RunResult.of(read_json(run / RESULT), run / RESULT).classes
