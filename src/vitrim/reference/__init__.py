"""Reference checkpoints: small models trained on real images with ``vitrim train``, shipped with the package.

    model = create_model("vitrim:cifar10_vit")     # of vitrim.loading

Each is a folder of this package with the weights (bfloat16 safetensors), the recipe that made them, the log of that run
and what was reached. `vitrim.training.references.export` makes such a folder of a finished run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitrim.errors import VitrimError, first_line, unknown
from vitrim.weights import RESULT, WEIGHTS_FILE

__all__ = ["CLASSES", "class_names", "folder", "reached", "references", "result"]

FOLDER = Path(__file__).parent

CLASSES = "classes"
"""Name of the list of classes' names among a run's results."""


def references() -> dict[str, Path]:
    """The reference checkpoints: their folders by name.

    Example:
        >>> "cifar10_vit" in references()
        True
    """
    return {path.parent.name: path.parent for path in sorted(FOLDER.glob(f"*/{WEIGHTS_FILE}"))}


def folder(name: str) -> Path:
    """The folder of a reference checkpoint.

    Raises:
        VitrimError: there is no such checkpoint.

    Example:
        >>> folder("cifar10_vit").name
        'cifar10_vit'
    """
    known = references()
    if not known:
        raise VitrimError(f"no reference checkpoint '{name}': this copy of vitrim comes with none")
    if name not in known:
        raise unknown("reference checkpoint", name, known)
    return known[name]


def reached(name: str) -> dict[str, Any]:
    """The scores of a reference checkpoint's run: its last and its best evaluation, updates and seconds.

    Raises:
        VitrimError: there is no such checkpoint.

    Example:
        >>> reached("cifar10_vit")["last"]["top1"] > 50
        True
    """
    return result(folder(name))


def result(run: Path) -> dict[str, Any]:
    """The scores of the finished run in a folder."""
    found: dict[str, Any] = json.loads((run / RESULT).read_text())
    return found


def class_names(checkpoint: Path) -> list[str] | None:
    """The names of the classes that a run learned, in order; None for weights of another origin, or classes without.

    Args:
        checkpoint: the folder of the run, or the file of weights in it.

    Raises:
        VitrimError: the results of the run cannot be read.

    Example:
        >>> class_names(folder("cifar10_vit"))[:2]
        ['airplane', 'automobile']
    """
    run = checkpoint.parent if checkpoint.name == WEIGHTS_FILE else checkpoint
    if not (run / RESULT).is_file():
        return None
    try:
        found = result(run)
    except (OSError, ValueError, RecursionError) as error:
        raise VitrimError(f"cannot read {run / RESULT}: {first_line(error)}") from None
    names = found.get(CLASSES) if isinstance(found, dict) else None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise VitrimError(f"cannot read {run / RESULT}: its {CLASSES} are no list of names")
    return names
