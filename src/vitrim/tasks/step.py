"""One batch in training: everything that the loss of a model or a method may ask for.

The loop knows no method. A method that learns more than its task has a file in ``training/objectives``; a model with a
loss of its own (two heads, masked pre-training) has a method ``losses(step)``; everything else learns its task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from vitrim.core.reduce import Reduction
from vitrim.core.registry import ask
from vitrim.errors import VitrimError
from vitrim.tasks.criteria import Criterion


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

    def auxiliary_loss(self, output: Tensor) -> Tensor:
        """The loss of an auxiliary head from its ``output``: on patches (B, P, K), or of a query, (B, K)."""
        return (self.auxiliary or self.criterion)(output, self.targets)

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
