"""One batch in training: what a model or a method may ask for when it says what its loss is.

The loop knows no method. A method that learns more than its task has a file in ``training/objectives``; a model with a
loss of its own (two heads, masked pre-training) has a method ``losses(step)``; everything else learns its task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitrim.core.reduce import Reduction
from vitrim.errors import VitrimError
from vitrim.tasks.criteria import Criterion


@dataclass(frozen=True)
class Step:
    """One batch, and what its loss may be made of.

    Attributes:
        model: the model in training mode, reduced or not.
        reduction: its handle, or None if it is not reduced.
        images: (B, C, H, W).
        targets: what ``criterion`` takes: (B,) class indices, or (B, K) where images are mixed or have several labels.
        criterion: the loss of the task from logits and targets, with the distillation of the recipe, if any.
        teacher: the frozen dense model, or None if the recipe has none.
    """

    model: nn.Module
    reduction: Reduction | None
    images: Tensor
    targets: Tensor
    criterion: Criterion
    teacher: nn.Module | None = None

    def logits(self) -> Tensor:
        """A forward of the model: (B, K)."""
        return logits_of(self.model(self.images))

    def tokens_and_logits(self) -> tuple[Tensor, Tensor]:
        """A forward of the model: tokens (B, N, C) after its last norm, and logits (B, K)."""
        return tokens_and_logits(self.model, self.images)

    def teach(self) -> tuple[Tensor, Tensor]:
        """A forward of the teacher without gradients: tokens and logits, as `tokens_and_logits`.

        Raises:
            VitrimError: the recipe has no teacher.
        """
        if self.teacher is None:
            raise VitrimError("this loss needs the dense model as a teacher: set teacher=dense in the recipe")
        with torch.no_grad():
            return tokens_and_logits(self.teacher, self.images)

    def base_losses(self) -> dict[str, Tensor]:
        """The loss without a method: the model's own, if it has one, otherwise the task's."""
        own = getattr(self.model, "losses", None)
        if own is not None:
            return cast("dict[str, Tensor]", own(self))
        return {"total": self.criterion(self.logits(), self.targets)}


def logits_of(output: Any) -> Tensor:
    """The logits in what a host or an `Objective` returns: the tensor itself, or the output's ``logits``.

    Example:
        >>> logits_of(torch.zeros(2, 10)).shape
        torch.Size([2, 10])
    """
    if isinstance(output, Tensor):
        return output
    return cast(Tensor, output["logits"] if isinstance(output, dict) else output.logits)


def tokens_and_logits(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (B, N, C) after the last norm, and logits (B, K), of a model with timm's two halves of a forward.

    Raises:
        VitrimError: the model has no ``forward_features`` and ``forward_head``.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", num_classes=10)
        >>> tokens, logits = tokens_and_logits(model, torch.zeros(1, 3, 160, 160))
        >>> tokens.shape, logits.shape
        (torch.Size([1, 101, 64]), torch.Size([1, 10]))
    """
    if not hasattr(model, "forward_features") or not hasattr(model, "forward_head"):
        raise VitrimError(
            f"this loss compares tokens, and {type(model).__name__} does not give them: it needs forward_features and "
            "forward_head, as timm's models have"
        )
    tokens = cast(Tensor, cast(Any, model).forward_features(images))
    return tokens, cast(Tensor, cast(Any, model).forward_head(tokens))
