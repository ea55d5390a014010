"""One batch in training: how it is mixed, the losses that tasks share, and everything that a loss may ask for.

The loop knows no method. A method that learns more than its task has a file in ``training/objectives``; a model with a
loss of its own (two heads, masked pre-training) has a method ``losses(step)``; everything else learns its task.
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
"""From logits (B, K), or what a dense task predicts, and targets to a scalar."""


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy:
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

    smoothing: float
    rest: float
    sum_classes: bool

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar, from logits (B, K) and targets: (B,) class indices, or (B, K) in [0, 1]."""
        kind = torch.promote_types(logits.dtype, torch.float32)  # half precision cannot hold a smoothed target
        dense = F.one_hot(targets, logits.shape[1]) if targets.ndim == 1 else targets
        smoothed = (1 - self.smoothing) * dense.to(kind) + self.smoothing * self.rest
        per_class = F.binary_cross_entropy_with_logits(logits.to(kind), smoothed, reduction="none")
        return (per_class.sum(dim=1) if self.sum_classes else per_class).mean()


@dataclass(frozen=True)
class Step:
    """One batch, and the ingredients of its loss.

    Attributes:
        model: the model in training mode, reduced or not.
        reduction: its handle, or None if it is not reduced.
        images: (B, C, H, W).
        targets: what ``criterion`` takes: (B,) class indices, or (B, K) where images are mixed or have several labels.
        criterion: the loss of the task from logits and targets, with the distillation of the recipe, if any.
        auxiliary: the loss of an auxiliary head on patches or on a query, from its output and targets; None:
            ``criterion``.
        teacher: the frozen dense model, or None if the recipe has none.
    """

    model: nn.Module
    reduction: Reduction | None
    images: Tensor
    targets: Tensor
    criterion: Criterion
    teacher: nn.Module | None = None
    auxiliary: Criterion | None = None

    def logits(self) -> Tensor:
        """A forward of the model: (B, K)."""
        return ask(self.model).logits(self.model(self.images))

    def tokens_and_logits(self) -> tuple[Tensor, Tensor]:
        """A forward of the model: tokens (B, N, C) after its last norm, and logits (B, K).

        Raises:
            VitrimError: the model does not give its tokens.
        """
        return ask(self.model).features_and_logits(self.model, self.images)

    def teach(self) -> tuple[Tensor, Tensor]:
        """A forward of the teacher without gradients: tokens and logits, as `tokens_and_logits`.

        Raises:
            VitrimError: the recipe has no teacher.
        """
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
