"""Losses that tasks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Criterion = Callable[[Any, Any], Tensor]
"""From logits (B, K), or what a dense task predicts, and targets to a scalar."""


class BinaryCrossEntropy(nn.Module):
    """One binary cross entropy per class, mean over the images, and mean or sum over the classes.

    Smoothed targets are (1 - smoothing) * y + smoothing * rest. timm's criterion of the same name moves all targets but
    indices to 1/2, or leaves them: right for several labels, not for mixed labels of one class.

    Args:
        smoothing: in [0, 1).
        rest: what targets are moved to: 1/K where one of K classes is right, 1/2 where each is on its own.
        sum_classes: sum over the classes; otherwise their mean, K times smaller.

    Example:
        >>> criterion = BinaryCrossEntropy(smoothing=0.1, rest=1 / 3, sum_classes=True)
        >>> logits, indices = torch.randn(2, 3), torch.tensor([2, 0])
        >>> torch.equal(criterion(logits, indices), criterion(logits, F.one_hot(indices, 3).float()))
        True
    """

    def __init__(self, smoothing: float, rest: float, *, sum_classes: bool) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.rest = rest
        self.sum_classes = sum_classes

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar, from logits (B, K) and targets: (B,) class indices, or (B, K) in [0, 1]."""
        kind = torch.promote_types(logits.dtype, torch.float32)  # half precision cannot hold a smoothed target
        dense = F.one_hot(targets, logits.shape[1]) if targets.ndim == 1 else targets
        smoothed = (1 - self.smoothing) * dense.to(kind) + self.smoothing * self.rest
        per_class = F.binary_cross_entropy_with_logits(logits.to(kind), smoothed, reduction="none")
        return (per_class.sum(dim=1) if self.sum_classes else per_class).mean()
