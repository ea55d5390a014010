"""Maps over the patches of an image: how deep each patch goes, and how far two such maps are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.errors import VitrimError

__all__ = ["Pattern", "depth_map", "emd", "js_bits", "kl_bits", "mean_pattern", "pcc", "scc", "sim"]

Floats = NDArray[np.float64]


class Pattern(NamedTuple):
    """Mean and population standard deviation of depth, per patch (P,) and over all patches and images."""

    mean: Floats
    std: Floats
    overall_mean: float
    overall_std: float


def depth_map(kept: ArrayLike, blocks: Sequence[int], num_layers: int) -> Floats:
    """The block in which each patch is dropped; ``num_layers`` where it never is.

    A patch that comes back counts from its first removal. Source: "Which Tokens to Use?", averaged depth of patches.

    Args:
        kept: (..., S, P) bool, the patches left after each of S blocks.
        blocks: the S blocks, from 0, ascending.
        num_layers: L, blocks of the model.

    Returns:
        (..., P) float64.

    Raises:
        VitrimError: as many blocks as rows are expected.

    Example:
        >>> depth_map([[True, True, False], [True, False, False]], [3, 6], 12).tolist()
        [12.0, 6.0, 3.0]
    """
    left = np.asarray(kept, dtype=bool)
    if left.ndim < 2 or left.shape[-2] != len(blocks):
        raise VitrimError(f"expected kept patches (..., {len(blocks)}, P) for {len(blocks)} blocks, got {left.shape}")
    depth = np.full((*left.shape[:-2], left.shape[-1]), float(num_layers))
    for stage in reversed(range(len(blocks))):
        depth[~left[..., stage, :]] = blocks[stage]
    return depth


def mean_pattern(depths: ArrayLike) -> Pattern:
    """Mean and population standard deviation over images of the depths (I, P), per patch and of all at once.

    Example:
        >>> mean_pattern([[3.0, 12.0], [6.0, 12.0]]).mean.tolist()
        [4.5, 12.0]
    """
    depth = np.asarray(depths, dtype=np.float64)
    return Pattern(depth.mean(0), depth.std(0), float(depth.mean()), float(depth.std()))


# ---- two maps --------------------------------------------------------------------------------------------------------


def kl_bits(a: ArrayLike, b: ArrayLike) -> float:
    """Kullback-Leibler divergence KL(b || a) = sum q log2(q / p) in bits, where p and q are the maps divided by sums.

    The first map is the reference, as in the study's code: its "KLD12" is KL(2 || 1). Cells without mass in ``b`` count
    nothing; infinite where ``b`` has mass and ``a`` has none.

    Args:
        a: map of any shape, not negative.
        b: another of that shape.

    Raises:
        VitrimError: maps of other shapes, negative or without mass.

    Example:
        >>> kl_bits([1, 1], [1, 0])
        1.0
    """
    from scipy.stats import entropy

    p, q = _masses(a, b)
    return float(entropy(q, p, base=2))


def js_bits(a: ArrayLike, b: ArrayLike, *, reference: bool = False) -> float:
    """Jensen-Shannon divergence in bits, (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2; in [0, 1]. Symmetric.

    Args:
        a, b: as for `kl_bits`.
        reference: with reversed arguments, (KL(m || p) + KL(m || q)) / 2, as in the study's code; not bounded.

    Raises:
        VitrimError: maps of other shapes, negative or without mass.

    Example:
        >>> js_bits([1, 0], [0, 1]), js_bits([1, 0], [0, 1], reference=True)
        (1.0, inf)
    """
    from scipy.stats import entropy

    p, q = _masses(a, b)
    middle = (p + q) / 2
    pairs = ((middle, p), (middle, q)) if reference else ((p, middle), (q, middle))
    return float(sum(entropy(one, other, base=2) for one, other in pairs) / 2)


def pcc(a: ArrayLike, b: ArrayLike) -> float:
    """Pearson's correlation of two maps, cov(a, b) / (std a std b), in [-1, 1]; nan where one is constant.

    Raises:
        VitrimError: maps of other shapes.

    Example:
        >>> round(pcc([0, 1, 2], [0, 2, 4]), 12)
        1.0
    """
    first, second = _maps(a, b)
    if _constant(first) or _constant(second):
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def scc(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's correlation of two maps: `pcc` of the ranks, ties at their mean rank; nan where one is constant.

    Raises:
        VitrimError: maps of other shapes.

    Example:
        >>> round(scc([0, 1, 2], [0, 1, 100]), 12)
        1.0
    """
    from scipy.stats import spearmanr

    first, second = _maps(a, b)
    if _constant(first) or _constant(second):
        return float("nan")
    return float(spearmanr(first, second).statistic)


def sim(a: ArrayLike, b: ArrayLike) -> float:
    """Histogram intersection: the sum of minima of both maps, first scaled to [0, 1], then divided by their sums.

    In [0, 1]; nan where a map is constant. Source: Bylinskii et al., What Do Different Evaluation Metrics Tell Us About
    Saliency Models? (TPAMI 2019).

    Raises:
        VitrimError: maps of other shapes.

    Example:
        >>> sim([0, 1, 1], [0, 0, 5])
        0.5
    """
    first, second = _maps(a, b)
    if _constant(first) or _constant(second):
        return float("nan")
    scaled = ((one - one.min()) / (one.max() - one.min()) for one in (first, second))
    return float(np.minimum(*(one / one.sum() for one in scaled)).sum())


def emd(a: ArrayLike, b: ArrayLike) -> float:
    """Earth mover's distance of two maps divided by their sums: the least mean way of the mass, in patches.

    The way between two cells is Euclidean. Solved exactly by POT's network simplex.

    Args:
        a: (rows, columns), not negative.
        b: another of that shape.

    Raises:
        VitrimError: maps of other shapes, not of two dimensions, negative or without mass.

    Example:
        >>> emd([[1, 0, 0]], [[0, 0, 1]])
        2.0
    """
    import ot

    shape = np.shape(a)
    if len(shape) != 2:
        raise VitrimError(f"expected maps (rows, columns), got {shape}")
    p, q = _masses(a, b)
    places = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 2).astype(np.float64)
    return float(ot.emd2(p, q, ot.dist(places, metric="euclidean")))


def _maps(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    """Both maps as vectors."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise VitrimError(f"expected two maps of one shape, got {first.shape} and {second.shape}")
    return first.ravel(), second.ravel()


def _masses(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    """Both maps as vectors of sum 1."""
    first, second = _maps(a, b)
    for one in (first, second):
        if one.min(initial=0.0) < 0 or not 0 < one.sum() < np.inf:
            raise VitrimError("expected maps of non-negative numbers that are not all zero")
    return first / first.sum(), second / second.sum()


def _constant(values: Floats) -> bool:
    return bool((values == values[:1]).all())
