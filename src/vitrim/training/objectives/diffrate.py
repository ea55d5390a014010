"""The loss that learns DiffRate's amounts: the task's own, and the squared distance from a MAC target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.core.reduce import Reduction
from vitrim.errors import VitrimError
from vitrim.methods.diffrate import KEPT, DiffRate, learning_reducers
from vitrim.tasks.step import Step
from vitrim.training.objectives import learns


@learns(DiffRate, "target_gmacs", "weight", "mlp_ratio")
def losses(step: Step, reduction: Reduction, *, target_gmacs: float | None = None, **options: Any) -> dict[str, Tensor]:
    """With ``learn`` the loss that learns the amounts on one batch; otherwise that of the task alone.

    Options as in `objective`; ``target_gmacs`` must be given to learn, and only then.

    Raises:
        VitrimError: learning without a target, or a target without learning.
    """
    config = reduction.config
    assert isinstance(config, DiffRate)
    if config.learn != (target_gmacs is not None):
        raise VitrimError(
            "diffrate: learn=true needs target_gmacs, the wanted cost of the blocks in 10^9 multiply-accumulates, "
            "e.g. objective.target_gmacs=2.9"
            if config.learn
            else "diffrate: target_gmacs is what learn=true aims at; without it the amounts are given"
        )
    if target_gmacs is None:
        return step.base_losses()
    logits = step.logits()
    return objective(reduction, logits, step.targets, criterion=step.criterion, target_gmacs=target_gmacs, **options)


def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    target_gmacs: float,
    weight: float = 5.0,
    mlp_ratio: float = 4.0,
) -> dict[str, Tensor]:
    """The loss that learns the amounts: the task's own, and the squared distance from the MAC target.

    Train the parameters under ``*.reducer.*`` only; the paper leaves the pretrained weights as they are.

    Args:
        reduction: the handle of a model reduced with ``learn=True``, after a forward and before its backward.
        logits: (B, classes) of the model.
        targets: what ``criterion`` takes.
        criterion: the loss of the task.
        target_gmacs: wanted cost of the blocks of one image, in 10^9 multiply-accumulates (`block_macs`): the total
            without patch embedding, norms and head.
        weight: of the second term.
        mlp_ratio: width of the MLP in channels.

    Returns:
        "total" = "base" + weight * "cost"; "cost" = (gmacs - target_gmacs)^2; "gmacs" of the amounts as they are.

    Raises:
        VitrimError: the reduction does not learn.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
        >>> reduction = vitrim.reduce_(model, vitrim.DiffRate(learn=True))
        >>> logits = model(torch.zeros(1, 3, 224, 224))
        >>> objective(reduction, logits, torch.tensor([1]), target_gmacs=0.8)["gmacs"].item() > 1.2
        True
    """
    layer, state = learning_reducers(reduction)[0].layer, reduction.state
    kept = [(pruned, merged) for pruned, merged in reduction.aux(KEPT)]
    macs = block_macs(kept, state.initial_patches, state.num_prefix, layer.dim, mlp_ratio)
    gmacs = macs / 1e9
    base, cost = criterion(logits, targets), (gmacs - target_gmacs).square()
    return {"total": base + weight * cost, "base": base, "cost": cost, "gmacs": gmacs}


def block_macs(
    kept: list[tuple[Tensor, Tensor]], initial: int, num_prefix: int, dim: int, mlp_ratio: float = 4.0
) -> Tensor:
    """Multiply-accumulates of all blocks for one image, differentiable in the kept numbers.

    Per block, with N tokens in attention and M in the MLP: 4 N C^2 + 2 N^2 C + 2 ratio M C^2, N C for the ranking, and
    C for each pair that matching compares. Norms are not counted.

    Args:
        kept: for every block, scalars: patches left by pruning, and of these by merging.
        initial: patches that enter the first block.
        num_prefix: tokens in front of the patches.
        dim: channels C.
        mlp_ratio: width of the MLP in channels.

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
        entering = merged
    return total
