"""The loss of IA-RED2: REINFORCE for the interpreters, the task's own for the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.core.block import running
from vitrim.core.reduce import Reduction
from vitrim.core.versions import forget_casts
from vitrim.methods.ia_red2 import IARED2, KEPT, LOG_PROBABILITY
from vitrim.tasks.step import Step
from vitrim.training.objectives import check_one_class, learns

REWARDED = "ia_red2 is rewarded for the true class"


@learns(IARED2, "tau")
def losses(step: Step, reduction: Reduction, *, tau: float = 0.5) -> dict[str, Tensor]:
    """The paper's loss on one batch: an evaluation forward for the baseline, then a forward in training mode."""
    check_one_class(step.targets, REWARDED)
    with torch.no_grad(), running(False, *step.model.modules()):
        baseline = reward(step.logits(), step.targets, reduction.aux(KEPT), tau)
    # Autocast keeps weights that were cast without gradients: the training forward needs its own.
    forget_casts()
    return objective(reduction, step.logits(), step.targets, criterion=step.criterion, baseline=baseline, tau=tau)


def reward(logits: Tensor, targets: Tensor, kept: Sequence[Tensor], tau: float = 0.5) -> Tensor:
    """(B,) reward: 1 - share^2 for a right prediction, with the share of patches that stay, and -tau for a wrong one.

    Args:
        logits, targets: (B, classes), and (B,) class indices.
        kept: (B,) shares per active group, ``reduction.aux("kept")``; the last one counts.
        tau: price of a wrong prediction.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
        >>> reward(logits, torch.tensor([0, 1]), [torch.tensor([0.5, 0.5])])
        tensor([ 0.7500, -0.5000])
    """
    check_one_class(targets, REWARDED)
    share = kept[-1].detach()
    return torch.where(logits.argmax(dim=-1) == targets, 1.0 - share.square(), torch.full_like(share, -tau))


def objective(
    reduction: Reduction,
    logits: Tensor,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    baseline: Tensor,
    tau: float = 0.5,
) -> dict[str, Tensor]:
    """The paper's training loss: REINFORCE for the interpreters, the task's loss for the blocks.

        policy = -mean over images of (R - R_greedy) * log probability of the draws

    Their gradients do not mix, so their weights do not matter under Adam; the paper optimises them alternately.

    Args:
        logits: (B, classes) of a forward in training mode, before its backward.
        baseline: (B,) R_greedy, the `reward` of an earlier forward in evaluation mode on the same images.
        tau: price of a wrong prediction in the reward.

    Returns:
        "total", the sum of "base" and "policy"; "reward", the mean R, for the log.

    Example:
        >>> import timm, vitrim
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
        >>> reduction = vitrim.reduce_(model, vitrim.IARED2())
        >>> images, targets = torch.zeros(2, 3, 224, 224), torch.tensor([1, 2])
        >>> with torch.no_grad():
        ...     baseline = reward(model.eval()(images), targets, reduction.aux("kept"))
        >>> losses = objective(reduction, model.train()(images), targets, baseline=baseline)
        >>> sorted(losses)
        ['base', 'policy', 'reward', 'total']
    """
    gained = reward(logits, targets, reduction.aux(KEPT), tau)
    log_probability = torch.stack(reduction.aux(LOG_PROBABILITY)).sum(dim=0)
    policy = -((gained - baseline.detach()) * log_probability).mean()
    base = criterion(logits, targets)
    return {"total": base + policy, "base": base, "policy": policy, "reward": gained.mean()}
