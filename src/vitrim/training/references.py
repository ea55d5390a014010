"""Creation of reference checkpoints from finished runs, and the recipes that made them.

export(Path("runs/cifar10_vit"), Path("src/vitrim/reference/cifar10_vit"))
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from vitrim import reference
from vitrim.errors import VitrimError
from vitrim.files import save_file
from vitrim.training.log import EVALUATIONS, UPDATES
from vitrim.training.recipe import load_recipe
from vitrim.training.schema import Recipe
from vitrim.weights import RECIPE, RESULT, WEIGHTS_FILE

STORAGE_DTYPE = torch.bfloat16

RECORDS = (RECIPE, RESULT, UPDATES, EVALUATIONS)
"""The files a run leaves besides weights."""


def reference_recipe(name: str) -> Recipe:
    """The recipe that made a reference checkpoint, with all its values.

    Raises:
        VitrimError: there is no such checkpoint.

    Example:
        >>> reference_recipe("cifar10_vit").task
        'classification'
    """
    return load_recipe(reference.folder(name) / RECIPE).recipe


def export(run: Path, folder: Path, *, earlier: Sequence[Path] = ()) -> Path:
    """Make a reference checkpoint from a finished run of ``vitrim train``.

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
        start, before = reference.result(part).get("start"), str(parts[number - 1]) if number else None
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
        result = {**reference.result(part), "start": f"part{number - 1}" if number > 1 else None}
        (kept / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    return folder
