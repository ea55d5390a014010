"""The loss of DynamicViT: the task's own, the keep rate, and distillation from a dense teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitrim.checked import checked_call
from vitrim.core.reduce import Reduction
from vitrim.errors import VitrimError
from vitrim.methods.dynamicvit import DECISION, DynamicViT
from vitrim.tasks.step import Step
from vitrim.training.objectives import learns

WEIGHTS = (1.0, 2.0, 0.5, 0.5)  # of the terms base, ratio, class and token

TokenLoss = Literal["mse", "kl"]


@learns(DynamicViT, "weights", "token_loss")
def losses(step: Step, reduction: Reduction, **options: Any) -> dict[str, Tensor]:
    """The paper's loss on one batch: all four terms with a teacher, otherwise "base" and "ratio".

    For options and errors see `objective`; the teacher must have comparable tokens.
    """
    if step.teacher is None:
        return objective(reduction, step.logits(), step.targets, criterion=step.criterion, **options)
    taught, teacher_logits = step.teach()
    tokens, logits = step.tokens_and_logits()
    prefix = reduction.state.num_prefix
    return objective(
        reduction,
        logits,
        step.targets,
        criterion=step.criterion,
        features=tokens[:, prefix:],
        teacher_logits=teacher_logits,
        teacher_features=taught[:, prefix:],
        **options,
    )


@checked_call
def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    features: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    teacher_features: Tensor | None = None,
    weights: Annotated[Sequence[float], Field(min_length=4, max_length=4)] = WEIGHTS,
    token_loss: TokenLoss = "mse",
) -> dict[str, Tensor]:
    """The paper's training loss, after a forward in training mode and before its backward.

    Args:
        logits: (B, classes) of the student, whose last forward reported the decisions to ``reduction``.
        features: (B, P, C) patch tokens of the student after the final norm; None omits the token term.
        teacher_logits: (B, classes) of the unreduced, frozen teacher; None omits the class term.
        teacher_features: (B, P, C) of the teacher, like ``features``.
        weights: weights of base, ratio, class and token; for its base size, the paper uses 5 for ratio.
        token_loss: squared error of the features, or divergence of their softmax over channels (LV-ViT).

    Returns:
        The unweighted terms "base"; "ratio", mean over stages and images of (share kept - r^s)^2; "class",
        KL(teacher || student), mean over images; "token", mean over the tokens that the last stage keeps (0 without
        any); and "total", their weighted sum.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10).train()
        >>> reduction = vitrim.reduce_(model, vitrim.DynamicViT())
        >>> losses = objective(reduction, model(torch.zeros(2, 3, 224, 224)), torch.tensor([1, 2]))
        >>> sorted(losses)
        ['base', 'ratio', 'total']
    """
    config = reduction.config
    assert isinstance(config, DynamicViT)
    decisions = reduction.aux(DECISION)
    aims = config.targets(len(decisions))
    ratio = torch.stack([(d.mean(dim=1) - aim).square().mean() for d, aim in zip(decisions, aims, strict=True)]).mean()
    terms = {"base": criterion(logits, targets), "ratio": ratio}
    if teacher_logits is not None:
        # KL(teacher || student), mean over images
        student, teacher = logits.log_softmax(-1), teacher_logits.detach().log_softmax(-1)
        terms["class"] = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    if features is not None and teacher_features is not None:
        if features.shape != teacher_features.shape:
            raise VitrimError(
                f"dynamicvit: tokens {tuple(features.shape)} of the student cannot be compared with the teacher's "
                f"{tuple(teacher_features.shape)}: the teacher must be the same model, and none may drop patches "
                "(patch_drop=0)"
            )
        kept = decisions[-1].detach()
        if token_loss == "mse":
            distance = (features - teacher_features.detach()).square().mean(dim=-1)
        else:
            student, teacher = features.log_softmax(-1), teacher_features.detach().log_softmax(-1)
            distance = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=-1)
        # Only tokens that survive are compared; the least count of 1 is for an image that keeps none.
        terms["token"] = (distance * kept).sum() / kept.sum().clamp_min(1.0)
    by_name = dict(zip(("base", "ratio", "class", "token"), weights, strict=True))
    total = torch.stack([by_name[name] * term.to(ratio.dtype) for name, term in terms.items()]).sum()
    return {"total": total, **terms}
