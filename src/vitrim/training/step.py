"""One batch in training: what a method may ask for when it says what its loss is, and the module that computes it.

The loop knows no method. A method that learns more than its task overrides `MethodConfig.losses(step)`; a model with a
loss of its own (two heads, masked pre-training) has `losses(step)` as well; everything else learns its task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.reduce import Reduction
from vitrim.core.registry import find_host
from vitrim.errors import VitrimError

Criterion = Callable[[Tensor, Tensor], Tensor]
"""From logits (B, K) and targets to a scalar."""


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
"""How the names of the model's parameters begin in an `Objective`."""


class Objective(nn.Module):
    """A model and its loss in one module, so that whatever wraps it (DDP, FSDP) sees all parameters that are used.

    Args:
        model: the model, reduced or not.
        criterion: the loss of the task.
        reduction: the handle of a reduced model.
        teacher: a frozen model, not registered here: it is neither wrapped, averaged nor saved.
        distillation: how the criterion learns from the teacher, or None.
        options: of the method's loss, passed to `MethodConfig.losses`.

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
        self.reduction = reduction
        self.distillation = distillation
        self.options = dict(options or {})
        self._unregistered = (teacher,)

    @property
    def _no_split_modules(self) -> list[str]:
        """What `accelerate` shards as one, by the names of classes: a model's blocks, whose class reducing changes."""
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
            return {"logits": logits_of(self.model(images))}
        criterion = self.criterion
        if self.distillation is not None and self.teacher is not None:
            with torch.no_grad():
                teacher_logits = logits_of(self.teacher(images))
            criterion = self.distillation(criterion, teacher_logits)
        step = Step(self.model, self.reduction, images, targets, criterion, self.teacher)
        if self.reduction is None:
            return step.base_losses()
        return self.reduction.config.losses(step, **self.options)
