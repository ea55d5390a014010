"""Reference checkpoints: small models trained on real images with ``vitrim train``, shipped with the package.

    model = create_model("vitrim:cifar10_vit")     # of vitrim.loading

Each is a folder of this package with the weights (bfloat16 safetensors), the recipe that made them, the log of that run
and what was reached. `vitrim.training.references.export` makes such a folder of a finished run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitrim.errors import VitrimError, unknown
from vitrim.weights import RESULT, WEIGHTS_FILE

__all__ = ["folder", "reached", "references", "result"]

FOLDER = Path(__file__).parent


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
