"""A model and its loss in one module, and learning from a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.reduce import Reduction
from vitrim.core.registry import ask, find_host
from vitrim.errors import VitrimError
from vitrim.tasks.criteria import Criterion
from vitrim.tasks.step import Step
from vitrim.training.objectives import losses

# ---- distillation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distillation:
    """Learning from a teacher's logits as well as from the labels (DeiT).

    loss = (1 - alpha) * criterion + alpha * D, where D is, if ``hard``, cross entropy with the teacher's choice, and
    otherwise tau^2 KL(teacher || student) of the logits divided by tau, mean over images.

    Attributes:
        hard: whether only the teacher's choice counts.
        alpha: weight of the teacher, in [0, 1].
        tau: temperature, unused if ``hard``.
    """

    hard: bool = False
    alpha: float = 0.5
    tau: float = 3.0

    def __call__(self, criterion: Criterion, teacher_logits: Tensor) -> Criterion:
        """The criterion that also learns from ``teacher_logits`` (B, K) of this batch.

        Example:
            >>> criterion = Distillation(alpha=0.0)(F.cross_entropy, torch.zeros(2, 3))
            >>> criterion(torch.zeros(2, 3), torch.tensor([0, 1])).item() == F.cross_entropy(
            ...     torch.zeros(2, 3), torch.tensor([0, 1])).item()
            True
        """

        def distilled(logits: Tensor, targets: Tensor) -> Tensor:
            base = criterion(logits, targets)
            return (1 - self.alpha) * base + self.alpha * self.divergence(logits, teacher_logits)

        return distilled

    def divergence(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """The term of the teacher, a scalar, from logits (B, K) of both."""
        if self.hard:
            return F.cross_entropy(logits, teacher_logits.argmax(dim=1))
        student = F.log_softmax(logits / self.tau, dim=1)
        teacher = F.log_softmax(teacher_logits / self.tau, dim=1)
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.tau**2


# ---- what is wrapped for many processes ------------------------------------------------------------------------------


MODEL = "model."
"""Prefix of the names of the model's parameters in an `Objective`."""


class Objective(nn.Module):
    """A model and its loss in one module, so that whatever wraps it (DDP, FSDP) sees all parameters that are used.

    Args:
        model: the model, reduced or not.
        criterion: the loss of the task.
        auxiliary: the loss of auxiliary heads; None: ``criterion``.
        reduction: the handle of a reduced model.
        teacher: a frozen model, not registered here: it is neither wrapped, averaged nor saved.
        distillation: how the criterion learns from the teacher, or None.
        options: of the method's loss, see `vitrim.training.objectives`.

    Example:
        >>> import timm
        >>> objective = Objective(timm.create_model("test_vit", num_classes=10), F.cross_entropy)
        >>> sorted(objective(torch.zeros(2, 3, 160, 160), torch.tensor([1, 2])))
        ['total']
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Criterion,
        *,
        auxiliary: Criterion | None = None,
        reduction: Reduction | None = None,
        teacher: nn.Module | None = None,
        distillation: Distillation | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if distillation is not None and teacher is None:
            raise VitrimError("distillation needs a teacher: set teacher=dense in the recipe")
        self.model = model
        self.criterion = criterion
        self.auxiliary = auxiliary
        self.reduction = reduction
        self.distillation = distillation
        self.options = dict(options or {})
        self._unregistered = (teacher,)

    @property
    def _no_split_modules(self) -> list[str]:
        """Class names of the modules that `accelerate` shards whole: a model's blocks, whose class reducing changes."""
        host = find_host(self.model)
        return [] if host is None else sorted({type(block).__name__ for block in host.blocks(self.model)})

    @property
    def teacher(self) -> nn.Module | None:
        """The frozen dense model, or None."""
        return self._unregistered[0]

    def forward(self, images: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        """Losses by name, scalars; "total" is the one to minimise. Images (B, C, H, W), targets of the criterion.

        Without targets only "logits" (B, K): a sharded model is evaluated through the module that was sharded.
        """
        if targets is None:
            return {"logits": ask(self.model).logits(self.model(images))}
        criterion = self.criterion
        if self.distillation is not None and self.teacher is not None:
            with torch.no_grad():
                teacher_logits = ask(self.teacher).logits(self.teacher(images))
            criterion = self.distillation(criterion, teacher_logits)
        step = Step(self.model, self.reduction, images, targets, criterion, self.teacher, self.auxiliary)
        return losses(step, **self.options)
