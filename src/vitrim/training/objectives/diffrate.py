"""The loss that learns DiffRate's amounts: the task's own, and the squared distance from a MAC target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitrim.checked import checked_call
from vitrim.core.reduce import Reduction
from vitrim.errors import VitrimError
from vitrim.methods.diffrate import KEPT, DiffRate, learned, learning_reducers
from vitrim.tasks.step import Step
from vitrim.training.objectives import learns

GMACS_WEIGHT = 5.0
SHARE_WEIGHT = 100.0
"""Weights of the squared distance from a target; on DeiT-S both are about equal: 4.54 squared times 5 is near 100."""


def amounts(reduction: Reduction) -> DiffRate | None:
    """The config with the learned amounts; None if they were fixed."""
    assert isinstance(reduction.config, DiffRate)
    return learned(reduction) if reduction.config.learn else None


@learns(DiffRate, "target_gmacs", "target_macs", "weight", "mlp_ratio", finds=amounts)
def losses(
    step: Step,
    reduction: Reduction,
    *,
    target_gmacs: float | None = None,
    target_macs: float | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The loss that learns the amounts on one batch; without ``learn`` the task's alone.

    For options see `objective`; one of ``target_gmacs`` and ``target_macs`` is for learning, and required there.
    """
    config = reduction.config
    assert isinstance(config, DiffRate)
    if config.learn and target_gmacs is None and target_macs is None:
        raise VitrimError(
            "diffrate: learn=true needs target_macs, the wanted share of the blocks' multiply-accumulates, e.g. "
            "objective.target_macs=0.6, or target_gmacs, in 10^9 of them"
        )
    if not config.learn and (target_gmacs is not None or target_macs is not None):
        name = "target_gmacs" if target_macs is None else "target_macs"
        raise VitrimError(f"diffrate: {name} is what learn=true aims at; without it the amounts are given")
    if not config.learn:
        return step.base_losses()
    options = {**options, "target_gmacs": target_gmacs, "target_macs": target_macs}
    return objective(reduction, step.logits(), step.targets, criterion=step.criterion, **options)


@checked_call
def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    target_gmacs: float | None = None,
    target_macs: Annotated[float, Field(gt=0, lt=1)] | None = None,
    weight: float | None = None,
    mlp_ratio: float = 4.0,
) -> dict[str, Tensor]:
    """The loss that learns the amounts: the task's own, and the squared distance from the MAC target.

    Train only the parameters under ``*.reducer.*``; the paper does not change the pretrained weights.

    Args:
        reduction: handle of a model reduced with ``learn=True``, after a forward and before its backward.
        logits: (B, classes) of the model.
        target_gmacs: target cost of the blocks for one image, in 10^9 multiply-accumulates (`block_macs`).
        target_macs: instead, target share in (0, 1) of the unreduced blocks' cost.
        weight: weight of the second term; default 5 for GMACs, 100 for shares.

    Returns:
        "total" = "base" + weight * "cost"; "cost" = (gmacs - target_gmacs)^2, or (share - target_macs)^2; "gmacs" of
        the current amounts.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
        >>> reduction = vitrim.reduce_(model, vitrim.DiffRate(learn=True))
        >>> logits = model(torch.zeros(1, 3, 224, 224))
        >>> objective(reduction, logits, torch.tensor([1]), target_gmacs=0.8)["gmacs"].item() > 1.2
        True
    """
    layer, state = learning_reducers(reduction)[0].layer, reduction.state
    if (target_gmacs is None) == (target_macs is None):
        raise VitrimError("diffrate: give one of target_gmacs and target_macs")
    geometry = (state.initial_patches, state.num_prefix, layer.dim, mlp_ratio)
    kept = [(pruned, merged) for pruned, merged in reduction.aux(KEPT)]
    macs = block_macs(kept, *geometry)
    gmacs, base = macs / 1e9, criterion(logits, targets)
    # A share is of the blocks that keep every patch, at the same geometry.
    if target_macs is not None:
        full = torch.full_like(kept[0][0].detach(), float(state.initial_patches))
        cost = (macs / block_macs([(full, full)] * len(kept), *geometry) - target_macs).square()
    else:
        assert target_gmacs is not None
        cost = (gmacs - target_gmacs).square()
    if weight is None:
        weight = GMACS_WEIGHT if target_macs is None else SHARE_WEIGHT
    return {"total": base + weight * cost, "base": base, "cost": cost, "gmacs": gmacs}


def block_macs(
    kept: list[tuple[Tensor, Tensor]], initial: int, num_prefix: int, dim: int, mlp_ratio: float = 4.0
) -> Tensor:
    """Multiply-accumulates of all blocks for one image, differentiable in the kept numbers.

    Per block, with N tokens in attention and M in the MLP: 4 N C^2 + 2 N^2 C + 2 ratio M C^2, N C for the ranking, and
    C for each pair that matching compares. Patch embedding, norms and head are not counted. ``kept`` holds scalars for
    every block: patches left by pruning, and then by merging.

    Example:
        >>> full = torch.tensor(196.0)
        >>> round(block_macs([(full, full)] * 12, 196, 1, 384).item() / 1e9, 2)  # DeiT-S
        4.54
    """
    total, entering = torch.zeros_like(kept[0][0]), torch.full_like(kept[0][0], float(initial))
    for pruned, merged in kept:
        n, m = entering + num_prefix, merged + num_prefix
        matching = (pruned - merged) * merged
        total = total + 4 * n * dim**2 + (2 * n + 1) * n * dim + matching * dim + 2 * mlp_ratio * m * dim**2
        # What a block keeps after merging enters the next one.
        entering = merged
    return total
