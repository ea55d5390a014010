"""The loss of Cropr: the task's own, for the model and for every router's auxiliary head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.core.reduce import Reduction
from vitrim.errors import VitrimError
from vitrim.methods.cropr import AUXILIARY, Cropr
from vitrim.tasks.step import Step
from vitrim.training.objectives import learns


@learns(Cropr)
def losses(step: Step, reduction: Reduction) -> dict[str, Tensor]:
    """The loss of the paper on one batch; "auxiliary" is the mean over the routers, for the log.

    Where the task has a loss of its own for the routers, as dense tasks do, "main" is the model's own loss or that of
    the task, and its parts are logged too.

    Raises:
        VitrimError: routers with one output per query on a model with one per image.
    """
    if step.auxiliary is not None:
        base = step.base_losses()
        routers = torch.stack([step.auxiliary(out, step.targets) for out in reduction.aux(AUXILIARY)])
        main = base.pop("total")
        return {**base, "total": main + routers.sum(), "main": main, "auxiliary": routers.mean()}
    terms = objective(reduction, step.logits(), step.targets, criterion=step.criterion)
    return {**terms, "auxiliary": terms["auxiliary"].mean()}


def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> dict[str, Tensor]:
    """The training loss of the paper, after a forward in training mode and before its backward.

    Args:
        reduction: the handle of the model; its last forward reported the auxiliary logits.
        logits: (B, classes) of the model.
        targets: what ``criterion`` takes, the same for the model and all routers.
        criterion: the loss of the task.

    Returns:
        "main"; "auxiliary", (routers,) one loss each; and "total", the plain sum of all. As the gradients of routers
        and backbone do not mix, their weights do not matter under Adam.

    Raises:
        VitrimError: routers with one output per query on a model with one per image.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10).train()
        >>> reduction = vitrim.reduce_(model, vitrim.Cropr(r=8))
        >>> losses = objective(reduction, model(torch.zeros(2, 3, 224, 224)), torch.tensor([1, 2]))
        >>> losses["auxiliary"].shape
        torch.Size([10])
    """
    outputs = reduction.aux(AUXILIARY)
    if outputs[0].ndim != logits.ndim:
        raise VitrimError(
            f"cropr: the routers give {tuple(outputs[0].shape)}, one output per query, and the model "
            f"{tuple(logits.shape)}: use num_queries=1, or a loss of your own"
        )
    main = criterion(logits, targets)
    auxiliary = torch.stack([criterion(out, targets) for out in outputs])
    return {"total": main + auxiliary.sum(), "main": main, "auxiliary": auxiliary}


def curriculum(r: int, epochs: int) -> list[int]:
    """The amount ``r`` of every epoch, for ``reduction.set(r=...)``: linear from 0 over the first half, then constant.

    This is the published curriculum, once per epoch and rounded down. A recipe writes it as a ramp that ends at the
    last epoch of the first half, here for r=8 and 64 epochs, and which is rounded to the nearest number:

        ramps:
          - {option: r, start: 0, stop: 8, end_epoch: 31, whole: true}

    Example:
        >>> curriculum(8, 8)
        [0, 2, 5, 8, 8, 8, 8, 8]
    """
    half = epochs // 2
    return [r * epoch // (half - 1) if half > 1 else 0 for epoch in range(half)] + [r] * (epochs - half)
