"""The consistency training of MCTF: one model, run twice on the same images with two amounts of fusion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.checked import checked_call
from vitrim.core.reduce import Reduction
from vitrim.core.registry import host_of
from vitrim.core.tokens import decision_dtype
from vitrim.errors import VitrimError
from vitrim.methods.mctf import MCTF
from vitrim.tasks.step import Step
from vitrim.training.objectives import check_one_class, learns

MOST_OF_TEACHER = 7  # most tokens that the paper's teacher fuses
CONFIDENT = "mctf trains where the model is confident of the true class"


@learns(MCTF, "weight", "confidence", "confident_of", "teacher_r")
def losses(
    step: Step, reduction: Reduction, *, teacher_r: float | Sequence[float] | None = None, **options: Any
) -> dict[str, Tensor]:
    """The paper's loss on one batch: a teacher's forward with a random amount, and a student's with ``r``.

    Both run in training mode with gradients. Afterwards the amount is ``r`` again, and the handle shows the second.

    Args:
        teacher_r: largest amount of the teacher, or smallest and largest (inclusive): tokens, or fractions below 1,
            drawn in steps of 0.01, independent of the type of ``r``. Default: 0 to 7 tokens, but fewer than ``r``.
    """
    assert isinstance(reduction.config, MCTF)
    r = reduction.config.r
    if isinstance(r, tuple):
        raise VitrimError(
            "mctf: the teacher's amount is drawn below r, so training takes one r for all blocks, no list"
        )
    facts = host_of(reduction.model).facts(reduction.model)
    low, high = teacher_amounts(r, teacher_r, facts.grid_size[0] * facts.grid_size[1])
    check_one_class(step.targets, CONFIDENT)
    if not facts.has_class_token:
        raise VitrimError(f"mctf's training compares class tokens, and this {type(step.model).__name__} has none")
    # A checkpointed block is computed again in the backward, when the amount is the student's: the teacher's would be
    # wrong.
    if getattr(step.model, "grad_checkpointing", False):
        raise VitrimError(
            "mctf's training runs the model with two amounts before one backward, which gradient checkpointing would "
            "compute again with one: set grad_checkpointing=false"
        )
    reduction.set(r=draw(low, high))
    try:
        teacher_tokens, teacher_logits = step.tokens_and_logits()
    finally:
        reduction.set(r=r)
    tokens, logits = step.tokens_and_logits()
    return objective(
        logits,
        step.targets,
        features=tokens[:, 0],
        teacher_logits=teacher_logits,
        teacher_features=teacher_tokens[:, 0],
        criterion=step.criterion,
        **options,
    )


@checked_call
def objective(
    logits: Tensor,
    targets: Tensor,
    *,
    features: Tensor,
    teacher_logits: Tensor,
    teacher_features: Tensor,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    weight: float = 1.0,
    confidence: float = 0.4,
    confident_of: Literal["prediction", "label"] = "prediction",
) -> dict[str, Tensor]:
    """The consistency training of the paper: one model, run twice on the same images with two amounts of fusion.

    The student fuses r tokens (16), the teacher fewer, drawn for every batch from 0, ..., 7; both learn the labels, and
    the student's class token learns to resemble the teacher's where the student is confident:

        loss = criterion(student) + criterion(teacher) + weight * mean_D (z_teacher - z_student)^2,

    the last averaged over the images on which the student is more confident than ``confidence``; 0 if none. Confidence
    is the largest probability of its prediction, as in UDA, to which the paper refers. The teacher's class token is a
    constant in this term. The paper trains with ``weight`` 1 (DeiT-T, T2T-ViT) or 3 (DeiT-S, LV-ViT), cross entropy
    with label smoothing 0.1 and no mixing of images.

    Args:
        logits: (B, K) of the student; ``targets`` are (B,) true classes.
        features: (B, C) class tokens of the student after the model's last norm.
        teacher_logits, teacher_features: of the teacher, with gradients.
        weight: lambda.
        confidence: beta, a probability.
        confident_of: ``prediction``: the largest probability; ``label``: that of the true class, which excludes images
            that the student gets wrong, because labels are known here, unlike in UDA.

    Returns:
        ``total`` and its parts ``student``, ``teacher``, ``consistency`` (unweighted), all scalars.

    Example:
        >>> import torch
        >>> student, teacher = torch.randn(2, 2, 10), torch.randn(2, 2, 10)
        >>> z, z_teacher = torch.randn(2, 2, 8)
        >>> losses = objective(
        ...     student[0], torch.tensor([1, 7]), features=z, teacher_logits=teacher[0], teacher_features=z_teacher)
        >>> sorted(losses)
        ['consistency', 'student', 'teacher', 'total']
    """
    check_one_class(targets, CONFIDENT)
    student, teacher = criterion(logits, targets), criterion(teacher_logits, targets)
    wide = decision_dtype(logits.dtype)
    with torch.no_grad():
        probabilities = logits.to(wide).softmax(dim=1)
        own = probabilities.amax(dim=1)
        if confident_of == "label":
            own = probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
        counts = (own > confidence).to(wide)
    distance = (teacher_features.detach().to(wide) - features.to(wide)).square().mean(dim=1)
    consistency = (distance * counts).sum() / counts.sum().clamp_min(1.0)
    return {
        "total": student + teacher + weight * consistency,
        "student": student,
        "teacher": teacher,
        "consistency": consistency,
    }


def teacher_amounts(r: int | float, given: float | Sequence[float] | None, patches: int) -> tuple[float, float]:
    """The smallest and the largest amount of a teacher of a student with ``r``, on a model of so many ``patches``.

    ``given`` is the largest amount, or both; fractions of the patches if below 1, like `MCTF.r`. None: 0 to 7 tokens,
    below ``r``. `VitrimError` for a range that is none, or not below ``r``.

    Example:
        >>> teacher_amounts(16, None, 196), teacher_amounts(4, None, 196), teacher_amounts(0.35, 0.2, 196)
        ((0, 7), (0, 3), (0, 0.2))
    """
    own = _tokens(r, patches)
    if given is None:
        return 0, min(MOST_OF_TEACHER, max(own - 1, 0))
    bounds: tuple[float, ...] = (0, given) if isinstance(given, int | float) else tuple(given)
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise VitrimError(
            f"mctf: teacher_r={given} is no range: give the largest amount, or the smallest and the largest"
        )
    low, high = bounds
    if high >= 1 and not (float(low).is_integer() and float(high).is_integer()):
        raise VitrimError(f"mctf: teacher_r={given} must be whole numbers of tokens, or fractions below 1")
    # Two fractions, or two numbers, compare as they are; a fraction and a number by the tokens that they come to.
    alike = high >= r > 0 if (high < 1) == (r < 1) else _tokens(high, patches) >= own > 0
    if alike:
        raise VitrimError(
            f"mctf: the teacher must fuse fewer than the model itself, and teacher_r={given} is not below r={r}"
        )
    return low, high


def draw(low: float, high: float) -> int | float:
    """A random amount from ``low`` to ``high``, inclusive: an integer, or below 1 in steps of 0.01; by torch's
    generator.

    Example:
        >>> draw(3, 3), draw(0.2, 0.2)
        (3, 0.2)
    """
    steps = 100 if 0 < high < 1 else 1
    drawn = int(torch.randint(round(low * steps), round(high * steps) + 1, ()))
    return drawn if steps == 1 else drawn / steps


def _tokens(amount: int | float, patches: int) -> int:
    """The amount as a number of tokens, a fraction rounded as in `MCTF`."""
    return math.floor(round(patches * amount, 9)) if 0 < amount < 1 else int(amount)
