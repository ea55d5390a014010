"""The loss of Cropr: the task's own, for the model and for every router's auxiliary head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.core.reduce import Reduction
from vitrim.errors import VitrimError
from vitrim.methods.cropr import AUXILIARY, Cropr
from vitrim.tasks.step import Criterion, Step
from vitrim.training.objectives import learns


@learns(Cropr)
def losses(step: Step, reduction: Reduction) -> dict[str, Tensor]:
    """The paper's loss on one batch: the model's or task's own, and the auxiliary loss of every router.

    "auxiliary" is the mean over the routers, for the log. The task defines how the outputs of a router are scored, and
    if there is one per patch (`Task.query_per_patch`). "main" is the loss without routers; its parts are logged too.
    """
    base = step.base_losses()
    outputs = [of_images(output, len(step.images)) for output in reduction.aux(AUXILIARY)]
    if step.auxiliary is None and outputs[0].ndim > 2:
        raise VitrimError(
            f"cropr: the routers give {tuple(outputs[0].shape)}, one output per query, and the task has one target per "
            "image: use num_queries=1, or a loss of your own"
        )
    criterion = step.auxiliary or step.criterion
    auxiliary = torch.stack([criterion(output, step.targets) for output in outputs])
    return {**base, "total": base["total"] + auxiliary.sum(), "main": base["total"], "auxiliary": auxiliary.mean()}


def of_images(outputs: Tensor, count: int) -> Tensor:
    """Outputs of a router for ``count`` images, (B, ...), from rows that may be windows, (B*W, ...).

    An image contains a class if one of its windows does, so the largest logit counts. The paper, whose detector has
    windows, does not specify this.

    Example:
        >>> of_images(torch.tensor([[1.0, -2.0], [0.0, 3.0], [4.0, 5.0], [6.0, 4.0]]), 2)
        tensor([[1., 3.],
                [6., 5.]])
    """
    return outputs if len(outputs) == count else outputs.unflatten(0, (count, -1)).amax(1)


def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Criterion = F.cross_entropy,
    auxiliary_criterion: Criterion | None = None,
) -> dict[str, Tensor]:
    """The paper's training loss, after a forward in training mode and before its backward.

    Args:
        logits: (B, classes) of the model, whose last forward reported the auxiliary logits to ``reduction``.
        targets: targets of ``criterion``, the same for the model and all routers.
        auxiliary_criterion: loss of the routers; None for the task's, which needs one output per image.

    Returns:
        "main"; "auxiliary", (routers,) losses; and "total", the plain sum. The gradients of routers and backbone do not
        mix, so the weights do not matter under Adam.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10).train()
        >>> reduction = vitrim.reduce_(model, vitrim.Cropr(r=8))
        >>> losses = objective(reduction, model(torch.zeros(2, 3, 224, 224)), torch.tensor([1, 2]))
        >>> losses["auxiliary"].shape
        torch.Size([10])
    """
    outputs = reduction.aux(AUXILIARY)
    if auxiliary_criterion is None and outputs[0].ndim != logits.ndim:
        raise VitrimError(
            f"cropr: the routers give {tuple(outputs[0].shape)}, one output per query, and the model "
            f"{tuple(logits.shape)}: use num_queries=1, or a loss of your own"
        )
    main = criterion(logits, targets)
    auxiliary = torch.stack([(auxiliary_criterion or criterion)(out, targets) for out in outputs])
    return {"total": main + auxiliary.sum(), "main": main, "auxiliary": auxiliary}


def curriculum(r: int, epochs: int) -> list[int]:
    """The amount ``r`` of every epoch, for ``reduction.set(r=...)``: linear from 0 over the first half, then constant.

    The published curriculum, per epoch and rounded down. In a recipe it is a ramp that ends at the last epoch of the
    first half, here for r=8 and 64 epochs, rounded to the nearest integer:

        ramps:
          - {option: r, start: 0, stop: 8, end_epoch: 31, whole: true}

    Example:
        >>> curriculum(8, 8)
        [0, 2, 5, 8, 8, 8, 8, 8]
    """
    half = epochs // 2
    return [r * epoch // (half - 1) if half > 1 else 0 for epoch in range(half)] + [r] * (epochs - half)
