"""Reference checkpoints: small models trained on real images with ``vitrim train``, shipped with the package.

    model = load_reference("cifar10_vit")          # on the command line: vitrim:cifar10_vit

Each is a folder of this package with the weights (bfloat16 safetensors), the recipe that made them, the log of that run
and what was reached. `export` makes such a folder of a finished run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vitrim.errors import VitrimError, unknown
from vitrim.training.log import EVALUATIONS, UPDATES
from vitrim.training.recipe import Recipe, load_recipe
from vitrim.weights import WEIGHTS_FILE, classes_in, load_checkpoint

__all__ = ["export", "load_reference", "reference_recipe", "references"]

FOLDER = Path(__file__).parent
RECIPE, RESULT = "recipe.yaml", "result.json"
STORAGE_DTYPE = torch.bfloat16


def references() -> dict[str, Path]:
    """The reference checkpoints: their folders by name.

    Example:
        >>> "cifar10_vit" in references()
        True
    """
    return {path.parent.name: path.parent for path in sorted(FOLDER.glob(f"*/{WEIGHTS_FILE}"))}


def reference_recipe(name: str) -> Recipe:
    """The recipe that made a reference checkpoint, with all its values.

    Raises:
        VitrimError: there is no such checkpoint.

    Example:
        >>> reference_recipe("cifar10_vit").task
        'classification'
    """
    return load_recipe(_folder(name) / RECIPE).recipe


def load_reference(name: str, **options: Any) -> nn.Module:
    """A reference model with its weights, float32, in eval mode.

    Args:
        name: one of `references`.
        options: of the model, over those of the recipe; they must leave the weights' shapes as they are.

    Raises:
        VitrimError: there is no such checkpoint, or the options change the names or shapes of its weights.

    Example:
        >>> model = load_reference("cifar10_vit")
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    file = _folder(name) / WEIGHTS_FILE
    recipe = reference_recipe(name)
    # what only training uses, such as dropping patches, is left to the caller
    given = {key: value for key, value in recipe.model_options.items() if not key.endswith("_rate")}
    given |= {"num_classes": classes_in(file, "head"), **options}
    model: nn.Module = timm.create_model(recipe.model, **given)
    if not next(model.parameters()).is_meta:
        load_checkpoint(model, file)
    return model.eval()


def export(run: Path, folder: Path) -> Path:
    """Make a reference checkpoint of a finished run of ``vitrim train``.

    Args:
        run: the run's folder, with its weights, recipe, log and result.
        folder: a new folder, of the checkpoint's name.

    Returns:
        ``folder``.

    Raises:
        VitrimError: the run is not finished.
    """
    wanted = [run / name for name in (WEIGHTS_FILE, RECIPE, RESULT, UPDATES, EVALUATIONS)]
    for path in wanted:
        if not path.is_file():
            raise VitrimError(f"{run} is not a finished run: it has no {path.name}")
    folder.mkdir(parents=True)
    weights = {key: value.to(STORAGE_DTYPE).contiguous() for key, value in load_file(run / WEIGHTS_FILE).items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"recipe": RECIPE})
    for path in wanted[1:]:
        shutil.copyfile(path, folder / path.name)
    return folder


def reached(name: str) -> dict[str, Any]:
    """What the run of a reference checkpoint reached at its end: its last and its best evaluation."""
    result: dict[str, Any] = json.loads((_folder(name) / RESULT).read_text())
    return result


def _folder(name: str) -> Path:
    known = references()
    if name not in known:
        raise unknown("reference checkpoint", name, known)
    return known[name]
