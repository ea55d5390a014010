"""One batch in training: the losses that tasks share, and all that a loss may need.

The loop knows no method. A method that learns more than its task has a file in ``training/objectives``; a model with
its own loss (two heads, masked pre-training) has a method ``losses(step)``; all others learn their task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.reduce import Reduction
from vitrim.core.registry import ask
from vitrim.errors import VitrimError

Criterion = Callable[[Any, Any], Tensor]
"""Maps logits (B, K), or a dense task's predictions, and targets to a scalar."""


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy:
    """Binary cross entropy per class, mean over the images, and mean or sum over the classes.

    Smoothed targets are (1 - smoothing) * y + smoothing * rest, with ``rest`` 1/K if one of K classes is right, 1/2 if
    classes are independent. timm's criterion of the same name smooths all targets but indices towards 1/2, or not at
    all: right for several labels, not for mixed labels of one class.

    Example:
        >>> criterion = BinaryCrossEntropy(smoothing=0.1, rest=1 / 3, sum_classes=True)
        >>> logits, indices = torch.randn(2, 3), torch.tensor([2, 0])
        >>> torch.equal(criterion(logits, indices), criterion(logits, F.one_hot(indices, 3).float()))
        True
    """

    smoothing: float
    rest: float
    sum_classes: bool

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar, from logits (B, K) and targets: (B,) class indices, or (B, K) in [0, 1]."""
        kind = torch.promote_types(logits.dtype, torch.float32)  # half precision cannot hold a smoothed target
        dense = F.one_hot(targets, logits.shape[1]) if targets.ndim == 1 else targets
        # The limit is 1 / K for one class of K: a smoothed target is still a distribution.
        smoothed = (1 - self.smoothing) * dense.to(kind) + self.smoothing * self.rest
        per_class = F.binary_cross_entropy_with_logits(logits.to(kind), smoothed, reduction="none")
        return (per_class.sum(dim=1) if self.sum_classes else per_class).mean()


@dataclass(frozen=True)
class Step:
    """One batch, and the ingredients of its loss.

    Attributes:
        model, reduction: the model in training mode, and its handle, or None if it is not reduced.
        images: (B, C, H, W).
        targets: of ``criterion``: (B,) class indices, or (B, K) for mixed images or several labels.
        criterion: the loss of the task from logits and targets, with the recipe's distillation, if any.
        auxiliary: the loss of an auxiliary head on patches or on a query; None: ``criterion``.
        teacher: the frozen dense model, or None.
    """

    model: nn.Module
    reduction: Reduction | None
    images: Tensor
    targets: Tensor
    criterion: Criterion
    teacher: nn.Module | None = None
    auxiliary: Criterion | None = None

    def logits(self) -> Tensor:
        """Run the model: (B, K)."""
        return ask(self.model).logits(self.model(self.images))

    def tokens_and_logits(self) -> tuple[Tensor, Tensor]:
        """Run the model: tokens (B, N, C) after its last norm, and logits (B, K); `VitrimError` without tokens."""
        return ask(self.model).features_and_logits(self.model, self.images)

    def teach(self) -> tuple[Tensor, Tensor]:
        """Run the teacher without gradients, as `tokens_and_logits`; `VitrimError` without a teacher."""
        if self.teacher is None:
            raise VitrimError("this loss needs the dense model as a teacher: set teacher=dense in the recipe")
        with torch.no_grad():
            return ask(self.teacher).features_and_logits(self.teacher, self.images)

    def base_losses(self) -> dict[str, Tensor]:
        """The loss without a method: the model's own, if it has one, otherwise the task's."""
        own = getattr(self.model, "losses", None)
        if own is not None:
            return cast("dict[str, Tensor]", own(self))
        return {"total": self.criterion(self.logits(), self.targets)}
