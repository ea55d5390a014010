"""What the recipe of a run says to those who use its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrim.reference import folder
from vitrim.tasks.sliding import Protocol
from vitrim.training.recipe import load_recipe, resolve
from vitrim.weights import RECIPE


def as_trained(model: str, changes: Mapping[str, Any]) -> tuple[Protocol, dict[str, Any]]:
    """The protocol and the options of the data that a model was trained with, the plain ones if no recipe is known.

    Args:
        model: as on the command line; ``run:FOLDER`` and ``vitrim:NAME`` have recipes.
        changes: values of the protocol that replace the recipe's.

    Raises:
        VitrimError: changes that are not valid, or a recipe that cannot be read.

    Example:
        >>> protocol, options = as_trained("vitrim:camvid_vit", {"flip": True})
        >>> protocol.size, protocol.flip, options["ignore"]
        (320, True, 11)
    """
    library, _, name = model.partition(":")
    protocol, options = Protocol(), {}
    if library in ("run", "vitrim"):
        trained = Path(name).expanduser() if library == "run" else folder(name)
        recipe = load_recipe(trained / RECIPE).recipe
        protocol, options = recipe.protocol, recipe.data_options
    if changes:
        values = {**protocol.model_dump(), **changes}
        # as a section of a recipe, whose errors are one line that names what is valid
        protocol = resolve({"model": model, "epochs": 1, "protocol": values}, name="--protocol").recipe.protocol
    return protocol, options
