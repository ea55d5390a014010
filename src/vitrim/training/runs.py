"""What a finished run of ``vitrim train`` leaves in its folder, and the model that is made of it.

    model = load_run(Path("runs/cifar10"))

The names of the files of a run that others read are here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrim.errors import VitrimError
from vitrim.loading import create_model
from vitrim.training.recipe import load_recipe
from vitrim.weights import WEIGHTS_FILE, load_checkpoint, load_host

RECIPE = "recipe.yaml"
"""All values of its recipe."""

RESULT = "result.json"
"""What it reached: updates, seconds, the last evaluation and the best."""


def load_run(folder: str | Path, **options: Any) -> nn.Module:
    """The model of a finished run with its weights, float32, in eval mode and not reduced.

    A method whose parameters were trained is put on it by ``vitrim.Reduction.load(model, folder)``.

    Args:
        folder: of the run, with weights and recipe.
        options: of the model, over those of the recipe; they must leave the weights' shapes as they are. Rates of
            dropping something in training are those of the library unless given here.

    Raises:
        VitrimError: the run is not finished, or the options change the names or shapes of its weights.
    """
    folder = Path(folder)
    for name in (WEIGHTS_FILE, RECIPE, RESULT):
        if not (folder / name).is_file():
            raise VitrimError(f"{folder} is not a finished run: it has no {name}")
    recipe = load_recipe(folder / RECIPE).recipe
    given = {key: value for key, value in recipe.model_options.items() if not key.endswith("_rate")}
    model = create_model(recipe.model, options={**given, **options}, device=torch.get_default_device())
    if "num_classes" in options:  # as asked, or not at all
        load_checkpoint(model, folder / WEIGHTS_FILE)
    else:
        load_host(model, folder / WEIGHTS_FILE)
    return model
