"""The losses of methods that learn more than their task: one file per method, registered by the class of its config.

    @learns(MCTF, "weight", "confidence")
    def losses(step, reduction, **options): ...

A method that learns settings, rather than parameters to use, says with ``finds`` how to read them.

Every file of this folder is imported when a loss is first asked for, so a new one is one new file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import Reduction
from vitrim.core.registry import discover, enter, entry_of
from vitrim.errors import VitrimError
from vitrim.tasks.step import Step

Losses = Callable[..., dict[str, Tensor]]
"""From a `Step`, its `Reduction` and options by name to scalars by name, of which "total" is the one to minimise."""


Finds = Callable[[Reduction], MethodConfig | None]
"""From a trained reduction to the settings that it found, or None if it looked for none."""


@dataclass(frozen=True)
class Learned:
    """The loss of a method, the names of its options, which a recipe gives under ``objective``, and what reads the
    settings that training finds, which are kept as a file of a method."""

    losses: Losses
    options: tuple[str, ...] = ()
    finds: Finds | None = None


_LEARNED: dict[type[MethodConfig], Learned] = {}


def learns(config: type[MethodConfig], *options: str, finds: Finds | None = None) -> Callable[[Losses], Losses]:
    """Function decorator: register the loss of a method. A config can have only one."""

    def register(losses: Losses) -> Losses:
        enter(_LEARNED, config, Learned(losses, options, finds), f"the loss of '{config.name}'")
        return losses

    return register


def check_one_class(targets: Tensor, why: str) -> None:
    """Refuse targets that are not one class per image.

    Raises:
        VitrimError: beginning with ``why``.
    """
    if targets.ndim != 1:
        raise VitrimError(
            f"{why}, so it takes one class per image: set mix.mixup=0 and mix.cutmix=0, and no task with several labels"
        )


def found(reduction: Reduction) -> MethodConfig | None:
    """The settings that training found, to be used in place of those it was trained under; None for most methods.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> found(vitrim.reduce_(model, "diffrate:learn=true")).describe()
        'diffrate:prune_kept=[197,197],merge_kept=[197,197]'
    """
    finds = learned(reduction.config).finds
    return None if finds is None else finds(reduction)


def learned(config: MethodConfig) -> Learned:
    """The loss of a method, looked up over the classes of its config; that of the task alone where none is registered.

    Example:
        >>> import vitrim
        >>> learned(vitrim.AViT()).options, learned(vitrim.ToMe()).options
        (('ponder_scale', 'distribution_scale', 'target_depth', 'published_mean'), ())
    """
    discover(__name__)
    return entry_of(_LEARNED, type(config)) or Learned(lambda step, reduction: step.base_losses())


def losses(step: Step, **options: Any) -> dict[str, Tensor]:
    """The losses training minimises on one batch: scalars by name, of which "total" is the whole.

    The loss that is registered for the method of ``step.reduction``, with its ``options``; otherwise the model's own
    or the task's.

    Raises:
        VitrimError: what the method's loss refuses: mixed targets, a teacher that is missing, ...
    """
    if step.reduction is None:
        return step.base_losses()
    return learned(step.reduction.config).losses(step, step.reduction, **options)
