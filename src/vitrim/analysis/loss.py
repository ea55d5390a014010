"""The information that a reduction loses: distances of class tokens and predictions, errors of merging.

ATM is Lee and Choi, Lossless Token Merging Even Without Fine-Tuning in Vision Transformers (ECAI 2025); MCTF is Lee et
al., Multi-criteria Token Fusion with One-step-ahead Attention (CVPR 2024).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.errors import VitrimError

__all__ = ["MergingError", "cosine_distance", "kl_nats", "merging_error", "spread_in_groups"]

Floats = NDArray[np.float64]


class MergingError(NamedTuple):
    """The merging error of every image (...,), and the ends of the range in which it must lie."""

    error: Floats
    least: Floats
    most: Floats


def cosine_distance(a: ArrayLike, b: ArrayLike) -> Floats:
    """1 - a . b / (|a| |b|) of vectors, in [0, 2]; nan where one is zero. ATM, section 3.2 (Figure 2).

    Args:
        a, b: (..., C).

    Returns:
        (...), float64.

    Example:
        >>> cosine_distance([[1.0, 0.0], [1.0, 1.0]], [[0.0, 2.0], [3.0, 3.0]]).round(12).tolist()
        [1.0, 0.0]
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    product = (first * second).sum(-1)
    found: Floats = 1 - np.divide(product, lengths, out=np.full_like(product, np.nan), where=lengths > 0)
    return found


def kl_nats(p: ArrayLike, q: ArrayLike) -> Floats:
    """KL(p || q) = sum p log(p / q) in nats over the last axis, of rows divided by their sums.

    Cells without mass in ``p`` count nothing; infinite where ``p`` has mass and ``q`` has none.

    Args:
        p, q: (..., N), not negative.

    Returns:
        (...), float64.

    Example:
        >>> kl_nats([[0.5, 0.5]], [[0.5, 0.5]]).tolist(), kl_nats([1, 0], [1, 1]).round(4).tolist()
        ([0.0], 0.6931)
    """
    from scipy.special import rel_entr

    first, second = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    first, second = (one / one.sum(-1, keepdims=True) for one in (first, second))
    found: Floats = rel_entr(first, second).sum(-1)
    return found


def merging_error(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike) -> MergingError:
    """The loss of one merging step, summed over its groups, and its bounds by ATM's Theorem 1.

    With tokens scaled to length 1, m the mean of a group weighted by the sizes n_i, and N the sum of these,

        E = sum_i n_i (1 - cos(x_i, m)) = N (1 - |m|)        (Definition 2)
        D = sum_i n_i |x_i - m|^2 = N (1 - |m|^2)

    so that D / 2 <= E <= D. Of a pair, D is 2 n_i n_j / (n_i + n_j) times the cosine distance, and this is Theorem 1:
    here it holds for groups of any number.

    Args:
        tokens: (..., N, C), before the step.
        sizes: (..., N), input tokens that each stands for.
        groups: (..., N), the token that each becomes part of, -1 for none.

    Returns:
        Three arrays (...,), float64.

    Raises:
        VitrimError: other numbers of tokens, sizes and groups.

    Example:
        >>> found = merging_error([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [1, 3, 1], [0, 0, 1])
        >>> [round(float(number), 4) for number in found]
        [0.8377, 0.75, 1.5]
    """
    vectors, weights, labels = _checked(tokens, sizes, groups)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    means, total = _means(unit, weights, labels)
    squared = np.minimum((means**2).sum(-1), 1.0)
    error, most = (total * (1 - np.sqrt(squared))).sum(-1), (total * (1 - squared)).sum(-1)
    return MergingError(error, most / 2, most)


def spread_in_groups(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike, merged: ArrayLike) -> Floats:
    """The size-weighted squared distance of tokens to what they become, over their size-weighted squared length.

    sum_i n_i |x_i - y_g(i)|^2 / sum_i n_i |x_i|^2 over the tokens that become something: 0 where nothing is lost.

    Args:
        tokens, sizes, groups: as for `merging_error`.
        merged: (..., M, C), the new tokens y.

    Returns:
        (...), float64; nan without tokens.

    Raises:
        VitrimError: as `merging_error`.

    Example:
        >>> round(float(spread_in_groups([[1.0], [3.0]], [1, 1], [0, 0], [[2.0]])), 4)
        0.2
    """
    vectors, weights, labels = _checked(tokens, sizes, groups)
    after = np.asarray(merged, dtype=np.float64)
    weights = np.where(labels >= 0, weights, 0.0)
    gone = np.maximum(labels, 0)[..., None]
    apart = ((vectors - np.take_along_axis(after, gone, axis=-2)) ** 2).sum(-1)
    above, below = (weights * apart).sum(-1), (weights * (vectors**2).sum(-1)).sum(-1)
    found: Floats = np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
    return found


def _checked(tokens: ArrayLike, sizes: ArrayLike, groups: ArrayLike) -> tuple[Floats, Floats, NDArray[np.int64]]:
    vectors, weights = np.asarray(tokens, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    labels = np.asarray(groups, dtype=np.int64)
    if not vectors.shape[:-1] == weights.shape == labels.shape or labels.ndim == 0:
        raise VitrimError(
            f"expected a size and a group of every token, got tokens {vectors.shape}, sizes {weights.shape} and groups "
            f"{labels.shape}"
        )
    return vectors, weights, labels


def _means(vectors: Floats, weights: Floats, labels: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Weighted means (..., M, C) of the groups and the sums (..., M) of their weights; of empty groups zeros."""
    shape, (tokens, channels) = labels.shape[:-1], vectors.shape[-2:]
    rows, count = labels.reshape(-1, tokens), int(labels.max(initial=0)) + 1
    image, token = np.nonzero(rows >= 0)
    flat, weight = vectors.reshape(-1, tokens, channels)[image, token], weights.reshape(-1, tokens)[image, token]
    sums, total = np.zeros((len(rows), count, channels)), np.zeros((len(rows), count))
    np.add.at(sums, (image, rows[image, token]), weight[:, None] * flat)
    np.add.at(total, (image, rows[image, token]), weight)
    means = np.divide(sums, total[..., None], out=np.zeros_like(sums), where=total[..., None] > 0)
    return means.reshape(*shape, count, channels), total.reshape(*shape, count)


def concordance(a: ArrayLike, b: ArrayLike) -> float:
    """The probability that two items are in the same order by ``a`` as by ``b``, ties counting half: (1 + tau) / 2.

    tau is Kendall's (tau-a), over the items for which both numbers are known.

    Args:
        a, b: (P,), nan where not known.

    Returns:
        In [0, 1], 0.5 by chance; nan for fewer than two items.

    Example:
        >>> concordance([1, 2, 3, np.nan], [10, 30, 20, 0]), concordance([1, 2], [5, 5])
        (0.6666666666666666, 0.5)
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    known = np.isfinite(first) & np.isfinite(second)
    signs = [np.sign(one[known][:, None] - one[known][None, :]) for one in (first, second)]
    count = int(known.sum())
    if count < 2:
        return float("nan")
    return float((1 + (signs[0] * signs[1]).sum() / (count * (count - 1))) / 2)
