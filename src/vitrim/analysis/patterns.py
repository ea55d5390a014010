"""Which patches two reductions keep: overlap of sets, its lower bounds, and its level by chance.

"Which Tokens to Use?" is Haurum et al., Which Tokens to Use? Investigating Token Reduction in Vision Transformers
(ICCV workshops 2023); algorithms and sections are those of its supplement.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.core.schedule import KEEP_RULES
from vitrim.errors import VitrimError

__all__ = [
    "chance_ioa",
    "chance_iou",
    "ioa",
    "ioa_lower_bound",
    "iou",
    "iou_lower_bound",
    "least_ioa",
    "least_iou",
    "least_overlap",
]

Floats = NDArray[np.float64]


def iou(a: ArrayLike, b: ArrayLike) -> Floats:
    """Intersection over union of sets of patches, |A & B| / |A | B|; 0 where both are empty.

    Symmetric. Source: "Which Tokens to Use?", section 5.

    Args:
        a: (..., P) bool, True for the patches of the set.
        b: the same for the other set.

    Returns:
        (...), float64 in [0, 1].

    Raises:
        VitrimError: sets over other numbers of patches.

    Example:
        >>> float(iou([True, True, False, False], [True, False, True, False]))
        0.3333333333333333
    """
    first, second = _sets(a, b)
    return _ratio((first & second).sum(-1), (first | second).sum(-1))


def ioa(a: ArrayLike, b: ArrayLike) -> Floats:
    """Share of the second set that lies in the first, |A & B| / |B|; 0 where B is empty.

    Source: "Which Tokens to Use?", section 5; there B is the set of the lower keep rate, so that 1 means that it lies
    within the other.

    Args:
        a: (..., P) bool, True for the patches of the set.
        b: the same for the set that is divided by.

    Returns:
        (...), float64 in [0, 1].

    Raises:
        VitrimError: sets over other numbers of patches.

    Example:
        >>> float(ioa([True, True, True, False], [True, False, False, True]))
        0.5
    """
    first, second = _sets(a, b)
    return _ratio((first & second).sum(-1), second.sum(-1))


def _sets(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    if first.shape[-1:] != second.shape[-1:]:
        raise VitrimError(f"expected two sets of the same patches, got sets over {first.shape} and {second.shape}")
    return first, second


def _ratio(part: ArrayLike, whole: ArrayLike) -> Floats:
    """``part / whole``, 0 where the whole is 0."""
    above, below = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    return np.divide(above, below, out=np.zeros(np.broadcast_shapes(above.shape, below.shape)), where=below != 0)


# ---- lower bounds ----------------------------------------------------------------------------------------------------


def least_overlap(patches: int, a: int, b: int) -> int:
    """The smallest intersection that sets of ``a`` and ``b`` of ``patches`` patches can have, max(0, a + b - P).

    Example:
        >>> least_overlap(196, 176, 137)
        117
    """
    return max(0, a + b - patches)


def least_ioa(patches: int, a: int, b: int) -> float:
    """The smallest `ioa` of sets of ``a`` and ``b`` patches, max(0, a + b - P) / b; 0 for ``b == 0``. It is reached.

    Example:
        >>> round(least_ioa(196, 176, 137), 3)
        0.854
    """
    return least_overlap(patches, a, b) / b if b else 0.0


def least_iou(patches: int, a: int, b: int) -> float:
    """The smallest `iou` of sets of ``a`` and ``b`` patches, max(0, a + b - P) / P. It is reached.

    Sets that overlap although they overlap as little as they can have all P patches as their union.

    Example:
        >>> least_iou(196, 24, 24), round(least_iou(196, 158, 96), 3)
        (0.0, 0.296)
    """
    return least_overlap(patches, a, b) / patches


def ioa_lower_bound(patches: int, r1: float, r2: float, stage: int) -> float:
    """The smallest `ioa` after ``stage`` stages of static pruning, "Which Tokens to Use?", Algorithm 1.

    I / floor(P r2^s) with I = max(0, floor(P r1^s) + floor(P r2^s) - P). It holds for methods that keep exactly these
    counts, not for merging or for counts that follow the image.

    Args:
        patches: P, patches of an image.
        r1: keep rate of the first set, in [0, 1].
        r2: keep rate of the second, which is divided by.
        stage: s, stages so far, from 1.

    Raises:
        VitrimError: rates outside [0, 1] or a stage below 1.

    Example:
        >>> [round(ioa_lower_bound(196, 0.9, 0.7, stage), 3) for stage in (1, 2, 3)]
        [0.854, 0.604, 0.194]
    """
    return least_ioa(patches, *(_kept(patches, rate, stage) for rate in (r1, r2)))


def iou_lower_bound(patches: int, r1: float, r2: float, stage: int) -> float:
    """The smallest `iou` after ``stage`` stages of static pruning, "Which Tokens to Use?", Algorithm 2.

    I / P with I = max(0, floor(P r1^s) + floor(P r2^s) - P). It holds where `ioa_lower_bound` does.

    Args:
        patches, r1, r2, stage: as for `ioa_lower_bound`.

    Raises:
        VitrimError: rates outside [0, 1] or a stage below 1.

    Example:
        >>> [round(iou_lower_bound(196, 0.9, 0.7, stage), 3) for stage in (1, 2, 3)]
        [0.597, 0.296, 0.066]
    """
    return least_iou(patches, *(_kept(patches, rate, stage) for rate in (r1, r2)))


def _kept(patches: int, rate: float, stage: int) -> int:
    """floor(P r^s), rounded as the methods with the study's rule do."""
    if not 0.0 <= rate <= 1.0:
        raise VitrimError(f"expected a keep rate in [0, 1], got {rate}")
    if stage < 1:
        raise VitrimError(f"expected a stage from 1, got {stage}")
    return KEEP_RULES["floor_initial_power"](rate, stage, patches, patches)


# ---- chance ----------------------------------------------------------------------------------------------------------


def chance_ioa(patches: int, a: int) -> float:
    """The mean `ioa` of a random set of ``a`` patches with any non-empty set: a / P.

    Example:
        >>> chance_ioa(196, 49)
        0.25
    """
    return a / patches


def chance_iou(patches: int, a: int, b: int) -> float:
    """The mean `iou` of two random sets of ``a`` and ``b`` patches, in closed form.

    sum over k of Hypergeometric(k; P, a, b) k / (a + b - k): the intersection k of two independent sets of fixed sizes
    is hypergeometric.

    Example:
        >>> round(chance_iou(4, 2, 2), 4)  # 1/6 * 0 + 4/6 * 1/3 + 1/6 * 1
        0.3889
    """
    from scipy.stats import hypergeom

    overlap = np.arange(least_overlap(patches, a, b), min(a, b) + 1)
    return float(hypergeom.pmf(overlap, patches, a, b) @ _ratio(overlap, a + b - overlap))
