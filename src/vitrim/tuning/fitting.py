"""The methods that can be tuned on a model as it is."""

from __future__ import annotations

import copy

from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.core.registry import methods
from vitrim.errors import UnsupportedModelError
from vitrim.tuning.cost import quiet


def training_free(model: nn.Module, *, counted: bool = False) -> list[MethodConfig]:
    """The methods, with their default options, that learn nothing, have an amount to move, and fit ``model``.

    Args:
        model: left as it was.
        counted: only those whose counts do not depend on the images, as their latency is predicted.

    Example:
        >>> import timm
        >>> names = [config.name for config in training_free(timm.create_model("test_vit", num_classes=3))]
        >>> "tome" in names, "dynamicvit" in names, "none" in names
        (True, False, False)
    """
    found = []
    shell = copy.deepcopy(model).to("meta")
    for kind in methods().values():
        if kind.tunable is None or not kind.training_free or (counted and kind().is_adaptive()):
            continue
        config = kind()
        try:  # what a method asks of a model is checked by reducing it, and by nothing else
            with quiet():
                reduce_(copy.deepcopy(shell), config)
        except UnsupportedModelError:
            continue
        found.append(config)
    return found
