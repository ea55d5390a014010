"""The losses of methods that learn more than their task: one file per method, registered by its config class.

A method that learns settings, not only parameters, registers how to read them as ``finds``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction
from vitrim.core.tables import discover, enter, entry_of
from vitrim.errors import VitrimError
from vitrim.tasks.step import Step

Losses = Callable[..., dict[str, Tensor]]
"""Maps a `Step`, its `Reduction` and options to scalars by name; "total" is to be minimised."""


Finds = Callable[[Reduction], MethodConfig | None]
"""Maps a trained reduction to the settings it learned, or None."""


@dataclass(frozen=True)
class Learned:
    """The loss of a method, its options in a recipe's ``objective``, and how to read the settings that
    training finds.
    """

    losses: Losses
    options: tuple[str, ...] = ()
    finds: Finds | None = None


_LEARNED: dict[type[MethodConfig], Learned] = {}


def learns(config: type[MethodConfig], *options: str, finds: Finds | None = None) -> Callable[[Losses], Losses]:
    """Function decorator that registers the loss of a method. A config can have only one."""

    def register(losses: Losses) -> Losses:
        enter(_LEARNED, config, Learned(losses, options, finds), f"the loss of '{config.name}'", attrgetter("losses"))
        return losses

    return register


def check_one_class(targets: Tensor, why: str) -> None:
    """Refuse targets other than one class per image, with a message that begins with ``why``."""
    if targets.ndim != 1:
        raise VitrimError(
            f"{why}, so it takes one class per image: set mix.mixup=0 and mix.cutmix=0, and no task with several labels"
        )


def found(reduction: Reduction) -> MethodConfig | None:
    """The settings that training found, which replace those of the training; None for most methods.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> found(vitrim.reduce_(model, "diffrate:learn=true")).describe()
        'diffrate:prune_kept=[197,197],merge_kept=[197,197]'
    """
    finds = learned(reduction.config).finds
    return None if finds is None else finds(reduction)


def learned(config: MethodConfig) -> Learned:
    """The loss registered for a config or a base class of it, or else the task's."""
    discover(__name__)
    return entry_of(_LEARNED, type(config)) or Learned(lambda step, reduction: step.base_losses())


def losses(step: Step, **options: Any) -> dict[str, Tensor]:
    """The losses to minimise on one batch: scalars by name, of which "total" is the sum.

    Of the method of ``step.reduction``, with its ``options``, or else the model's or task's. `VitrimError` if the loss
    refuses the batch, e.g. mixed targets or a missing teacher.
    """
    if step.reduction is None:
        return step.base_losses()
    return learned(step.reduction.config).losses(step, step.reduction, **options)
