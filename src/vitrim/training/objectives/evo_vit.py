"""The loss of Evo-ViT with two heads: one on the mean patch, one on the class token."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from vitrim.core.reduce import Reduction
from vitrim.methods.evo_vit import CLASS_LOGITS, EvoViT
from vitrim.tasks.step import Step
from vitrim.training.objectives import learns


@learns(EvoViT)
def losses(step: Step, reduction: Reduction) -> dict[str, Tensor]:
    """The paper's loss of both heads on one batch; without ``class_head`` the task's alone."""
    assert isinstance(reduction.config, EvoViT)
    if not reduction.config.class_head:
        return step.base_losses()
    return objective(reduction, step.logits(), step.targets, criterion=step.criterion)


def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, Tensor]:
    """The paper's training loss: half for the head on the mean patch, half for the head on the class token.

    Args:
        logits: (B, K) of a model reduced with ``class_head=True``, after a forward in training mode.

    Returns:
        "main", "class_token", and "total", their mean.

    Example:
        >>> import timm, torch, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10, global_pool="avg").train()
        >>> reduction = vitrim.reduce_(model, vitrim.EvoViT(class_head=True))
        >>> losses = objective(reduction, model(torch.zeros(2, 3, 224, 224)), torch.tensor([1, 2]))
        >>> sorted(losses)
        ['class_token', 'main', 'total']
    """
    main = criterion(logits, targets)
    class_token = criterion(reduction.aux(CLASS_LOGITS)[0], targets)
    return {"total": (main + class_token) / 2, "main": main, "class_token": class_token}
