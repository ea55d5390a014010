"""The loss of A-ViT: less pondering, and halting around a target block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.core.reduce import Reduction
from vitrim.errors import VitrimError
from vitrim.methods.a_vit import HALTING, PONDER, AViT
from vitrim.tasks.step import Step
from vitrim.training.objectives import learns


@learns(AViT, "ponder_scale", "distribution_scale", "target_depth", "published_mean")
def losses(step: Step, reduction: Reduction, **options: Any) -> dict[str, Tensor]:
    """The paper's loss on one batch; for options and errors see `objective`."""
    return objective(reduction, step.logits(), step.targets, criterion=step.criterion, **options)


def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ponder_scale: float = 5e-4,
    distribution_scale: float = 1e-3,
    target_depth: int | None = None,
    published_mean: bool = False,
) -> dict[str, Tensor]:
    """The paper's training loss, after a forward in training mode and before its backward:

        loss = classification + ponder_scale * mean(ponder) + distribution_scale * KL(prior || mean halting per block).

    The mean halting probability excludes prefix tokens. With ``published_mean`` it includes them but excludes the first
    image of the batch, an error of the published code, whose slice ``[1:]`` was meant for the class token.

    Args:
        logits: (B, K) of the model, whose last forward reported ponder and halting to ``reduction``.
        ponder_scale, distribution_scale: weights of the two terms.
        target_depth: block around which halting should happen, 0-based, not the first; default two thirds of the depth
            (8 of 12).
        published_mean: compute the mean halting probability as the published code does; needs two images.

    Returns:
        ``total`` and its parts ``classification``, ``ponder``, ``distribution`` (unweighted), all scalars.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10).train()
        >>> reduction = vitrim.reduce_(model, vitrim.AViT())
        >>> losses = objective(reduction, model(torch.zeros(2, 3, 224, 224)), torch.tensor([1, 2]))
        >>> sorted(losses)
        ['classification', 'distribution', 'ponder', 'total']
    """
    halting, num_prefix = reduction.aux(HALTING), reduction.state.num_prefix
    depth = len(halting) * 2 // 3 if target_depth is None else target_depth
    if not 0 < depth < len(halting):  # the blocks before it determine the scale of the prior
        raise VitrimError(f"a_vit: target_depth={depth} must be a block from 1 to {len(halting) - 1}")
    if published_mean and len(halting[0]) < 2:
        raise VitrimError("a_vit: published_mean leaves out the first image of a batch, so it needs two")
    mean = torch.stack([(h[1:] if published_mean else h[:, num_prefix:]).mean() for h in halting])
    parts = {
        "classification": criterion(logits, targets),
        "ponder": reduction.aux(PONDER)[0].mean(),
        "distribution": distribution_loss(mean, depth),
    }
    loss = parts["classification"] + ponder_scale * parts["ponder"] + distribution_scale * parts["distribution"]
    return {"total": loss, **parts}


def halting_prior(num_layers: int, depth: int) -> Tensor:
    """(num_layers,) the published target: a normal density around block ``depth``; the part before it sums to 0.98."""
    density = torch.tensor([math.exp(-((layer - depth) ** 2) / 2) for layer in range(num_layers)], dtype=torch.float64)
    return density * (0.98 / density[:depth].sum())


def distribution_loss(mean_halting: Tensor, depth: int) -> Tensor:
    """KL of `halting_prior` and the mean halting probabilities (L,), divided by L and clamped at 0, as published."""
    # Clamped as published: a block that never halts would make the divergence infinite.
    share = (mean_halting / mean_halting.sum()).clamp(0.01, 0.99)
    prior = halting_prior(len(mean_halting), depth).to(share)
    return ((torch.xlogy(prior, prior) - prior * share.log()).sum() / len(mean_halting)).clamp_min(0.0)
