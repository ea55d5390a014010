"""Reference checkpoints: small models trained on real images with ``vitrim train``, shipped with the package.

    model = load_reference("cifar10_vit")          # on the command line: vitrim:cifar10_vit

Each is a folder of this package with the weights (bfloat16 safetensors), the recipe that made them, the log of that run
and what was reached. `export` makes such a folder of a finished run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from vitrim.errors import VitrimError, unknown
from vitrim.files import save_file
from vitrim.training.log import EVALUATIONS, UPDATES
from vitrim.training.recipe import Recipe, load_recipe
from vitrim.training.runs import RECIPE, RESULT, load_run
from vitrim.weights import WEIGHTS_FILE

__all__ = ["export", "load_reference", "reached", "reference_recipe", "references"]

FOLDER = Path(__file__).parent
STORAGE_DTYPE = torch.bfloat16
RECORDS = (RECIPE, RESULT, UPDATES, EVALUATIONS)
"""What a run leaves besides weights."""


def references() -> dict[str, Path]:
    """The reference checkpoints: their folders by name.

    Example:
        >>> "cifar10_vit" in references()
        True
    """
    return {path.parent.name: path.parent for path in sorted(FOLDER.glob(f"*/{WEIGHTS_FILE}"))}


def load_reference(name: str, **options: Any) -> nn.Module:
    """A reference model with its weights, float32, in eval mode.

    Args:
        name: one of `references`.
        options: of the model, as of `load_run`.

    Raises:
        VitrimError: there is no such checkpoint, or the options change the names or shapes of its weights.

    Example:
        >>> model = load_reference("cifar10_vit")
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    return load_run(_folder(name), **options)


def reference_recipe(name: str) -> Recipe:
    """The recipe that made a reference checkpoint, with all its values.

    Raises:
        VitrimError: there is no such checkpoint.

    Example:
        >>> reference_recipe("cifar10_vit").task
        'classification'
    """
    return load_recipe(_folder(name) / RECIPE).recipe


def reached(name: str) -> dict[str, Any]:
    """What the run of a reference checkpoint reached: its last and its best evaluation, updates and seconds.

    Raises:
        VitrimError: there is no such checkpoint.

    Example:
        >>> reached("cifar10_vit")["last"]["top1"] > 50
        True
    """
    return _result(_folder(name))


def export(run: Path, folder: Path, *, earlier: Sequence[Path] = ()) -> Path:
    """Make a reference checkpoint of a finished run of ``vitrim train``.

    Args:
        run: the run's folder, with its weights, recipe, log and result.
        folder: a new folder, of the checkpoint's name.
        earlier: the runs whose weights it started from, first one first; their recipes and logs are kept as well.

    Returns:
        ``folder``.

    Raises:
        VitrimError: a run is not finished, was under a method or did not start from the one before it, or the folder
            exists. Nothing is written then.
    """
    parts = [*earlier, run]
    for number, part in enumerate(parts):
        for name in (WEIGHTS_FILE, *RECORDS):
            if not (part / name).is_file():
                raise VitrimError(f"{part} is not a finished run: it has no {name}")
        start, before = _result(part).get("start"), str(parts[number - 1]) if number else None
        if start != before:
            raise VitrimError(
                f"{part} started from {start or 'nothing'}, and not from {before or 'nothing'}: see `earlier`"
            )
    if folder.exists():
        raise VitrimError(f"{folder} exists: name a new folder")
    recipe = load_recipe(run / RECIPE).recipe
    if recipe.method != "none" or recipe.model == f"vitrim:{folder.name}":
        raise VitrimError(f"a reference is a dense model of its own, not {recipe.model} under {recipe.method}")
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
        # the part it started from, wherever that lay
        result = {**_result(part), "start": f"part{number - 1}" if number > 1 else None}
        (kept / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    return folder


def _result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return found


def _folder(name: str) -> Path:
    known = references()
    if not known:
        raise VitrimError(f"no reference checkpoint '{name}': this copy of vitrim comes with none")
    if name not in known:
        raise unknown("reference checkpoint", name, known)
    return known[name]
