"""Reference checkpoints: small models trained on real images with ``vitrim train``, shipped with the package.

    model = create_model("vitrim:cifar10_vit")     # of vitrim.loading

Each is a folder of this package with the weights (bfloat16 safetensors), the recipe, the log and the result of their
run. `export` creates such a folder from a finished run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vitrim.checked import Stored
from vitrim.errors import VitrimError, check_known
from vitrim.files import read_json, read_yaml, save_file
from vitrim.weights import EVALUATIONS, RECIPE, RESULT, UPDATES, WEIGHTS_FILE

__all__ = ["CLASSES", "class_names", "export", "folder", "reached", "references", "result"]

FOLDER = Path(__file__).parent

CLASSES = "classes"
"""Key of the class names among a run's results."""

RECORDS = (RECIPE, RESULT, UPDATES, EVALUATIONS)
"""Files of a run that a reference checkpoint keeps besides the weights."""

STORAGE_DTYPE = torch.bfloat16


def references() -> dict[str, Path]:
    """Folders of the reference checkpoints by name.

    Example:
        >>> "cifar10_vit" in references()
        True
    """
    return {path.parent.name: path.parent for path in sorted(FOLDER.glob(f"*/{WEIGHTS_FILE}"))}


def folder(name: str) -> Path:
    """Folder of a reference checkpoint; `VitrimError` for an unknown name.

    Example:
        >>> folder("cifar10_vit").name
        'cifar10_vit'
    """
    known = references()
    if not known:
        raise VitrimError(f"no reference checkpoint '{name}': this copy of vitrim comes with none")
    check_known("reference checkpoint", name, known)
    return known[name]


def reached(name: str) -> dict[str, Any]:
    """Scores of a reference checkpoint's run: its last and its best evaluation, updates and seconds.

    Example:
        >>> reached("cifar10_vit")["last"]["top1"] > 50
        True
    """
    return result(folder(name))


def result(run: Path) -> dict[str, Any]:
    """Scores of the finished run in a folder."""
    return dict(read_json(run / RESULT))


class _Learned(Stored):
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
    return _Learned.of(read_json(run / RESULT), run / RESULT).classes


def export(run: Path, folder: Path, *, earlier: Sequence[Path] = ()) -> Path:
    """Create a reference checkpoint from a finished run of ``vitrim train``, and return its ``folder``.

    Args:
        run: the run's folder, with its weights, recipe, log and result.
        folder: a new folder, named like the checkpoint.
        earlier: the runs whose weights it started from, first one first; their recipes and logs are kept as well.

    Raises:
        VitrimError: a run is not finished, used a method or did not start from the one before it, or the folder exists.
            Then nothing is written.
    """
    parts = [*earlier, run]
    for number, part in enumerate(parts):
        for name in (WEIGHTS_FILE, *RECORDS):
            if not (part / name).is_file():
                raise VitrimError(f"{part} is not a finished run: it has no {name}")
        start, before = result(part).get("start"), str(parts[number - 1]) if number else None
        if start != before:
            raise VitrimError(
                f"{part} started from {start or 'nothing'}, and not from {before or 'nothing'}: see `earlier`"
            )
    if folder.exists():
        raise VitrimError(f"{folder} exists: name a new folder")
    recipe = read_yaml(run / RECIPE)
    model, method = recipe["model"], recipe["method"]
    if method != "none" or model == f"vitrim:{folder.name}":
        raise VitrimError(f"a reference is a dense model of its own, not {model} under {method}")
    weights = {
        key: (value.to(STORAGE_DTYPE) if value.is_floating_point() else value).contiguous()
        for key, value in load_file(run / WEIGHTS_FILE).items()
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / WEIGHTS_FILE)
    for number, part in enumerate(parts, 1):
        kept = folder if part is run else folder / f"part{number}"
        kept.mkdir(exist_ok=True)
        for name in RECORDS:
            shutil.copyfile(part / name, kept / name)
        # the part it started from, by its place here
        reached = {**result(part), "start": f"part{number - 1}" if number > 1 else None}
        (kept / RESULT).write_text(json.dumps(reached, indent=2) + "\n")
    return folder
