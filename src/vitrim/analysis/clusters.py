"""Groups of patches under two reductions: entropies of clusters, stages put together and taken apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.errors import VitrimError

__all__ = ["ami", "completeness", "compose", "homogeneity", "permuted", "relabel", "v_measure"]

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
EPS = float(np.finfo(np.float64).eps)


def homogeneity(a: ArrayLike, b: ArrayLike) -> Floats:
    """The degree to which every cluster of ``b`` holds patches of one cluster of ``a`` only: 1 - H(A|B) / H(A).

    1 where ``a`` is a single cluster. As scikit-learn's ``homogeneity_score(labels_true=a, labels_pred=b)``, for all
    images at once: that takes a millisecond per image, which is minutes for the pairs and blocks of one analysis.

    Rosenberg and Hirschberg, V-Measure (EMNLP 2007). "Which Tokens to Use?" compares a higher rate M1 with a lower one
    M2 by 1 - H(M2|M1) / H(M2), which is ``homogeneity(M2, M1)``; the formula in section E of its supplement is what its
    code calls completeness.

    Args:
        a: (..., P) integers, the cluster of every patch; -1, a patch that is gone, counts as a cluster.
        b: the same for the other clustering.

    Returns:
        (...), float64 in [0, 1].

    Raises:
        VitrimError: clusterings of other patches.

    Example:
        >>> homogeneity([[0, 0, 1, 1], [0, 1, 2, 3]], [[0, 1, 2, 3], [0, 0, 1, 1]]).round(4).tolist()
        [1.0, 0.5]
    """
    of_a, of_b, of_both = _entropies(a, b)
    return _share(of_a + of_b - of_both, of_a)


def completeness(a: ArrayLike, b: ArrayLike) -> Floats:
    """The degree to which every cluster of ``a`` lies in one of ``b``: 1 - H(B|A) / H(B), `homogeneity` the other way.

    Args:
        a, b: as for `homogeneity`.

    Returns:
        (...), float64 in [0, 1].

    Raises:
        VitrimError: clusterings of other patches.

    Example:
        >>> round(float(completeness([0, 0, 1, 1], [0, 1, 2, 3])), 4)
        0.5
    """
    return homogeneity(b, a)


def v_measure(a: ArrayLike, b: ArrayLike) -> Floats:
    """The harmonic mean of `homogeneity` h and `completeness` c, 2 h c / (h + c); 0 where both are 0. Symmetric.

    This is the normalised mutual information 2 I(A; B) / (H(A) + H(B)) with the arithmetic mean, the NMI of "Which
    Tokens to Use?". It is not corrected for chance; see `permuted` and `ami`.

    Args:
        a, b: as for `homogeneity`.

    Returns:
        (...), float64 in [0, 1].

    Raises:
        VitrimError: clusterings of other patches.

    Example:
        >>> round(float(v_measure([0, 0, 1, 1], [0, 1, 2, 3])), 4)
        0.6667
    """
    of_a, of_b, of_both = _entropies(a, b)
    shared = of_a + of_b - of_both
    h, c = _share(shared, of_a), _share(shared, of_b)
    return np.divide(2 * h * c, h + c, out=np.zeros_like(h), where=h + c > 0)


def ami(a: ArrayLike, b: ArrayLike) -> Floats:
    """Adjusted mutual information, (I - E[I]) / ((H(A) + H(B)) / 2 - E[I]): about 0 for unrelated clusterings.

    I is the mutual information of the two, and E[I] its mean over all pairs of clusterings with clusters of the same
    sizes. Vinh et al., Information Theoretic Measures for Clusterings Comparison (JMLR 2010). As scikit-learn's
    ``adjusted_mutual_info_score``, for all images at once.

    Args:
        a, b: (..., P), as for `homogeneity`.

    Returns:
        (...), float64, at most 1; 1 where both are a single cluster, 0 where one of them is.

    Raises:
        VitrimError: clusterings of other patches.

    Example:
        >>> float(ami([0, 0, 1, 1], [1, 1, 0, 0]))
        1.0
    """
    of_a, of_b, of_both = _entropies(a, b)
    first, second = _labels(a, b)
    expected = _expected_information(*(one.reshape(-1, one.shape[-1]) for one in (first, second)))
    gained = of_a + of_b - of_both - expected.reshape(of_a.shape)
    possible = (of_a + of_b) / 2 - expected.reshape(of_a.shape)
    gained, possible = (np.where(one < 0, np.minimum(one, -EPS), np.maximum(one, EPS)) for one in (gained, possible))
    single = np.where((of_a == 0) & (of_b == 0), 1.0, 0.0)
    return np.where((of_a == 0) | (of_b == 0), single, gained / possible)


def _expected_information(a: Labels, b: Labels) -> Floats:
    """(I,) in nats: E[I] of clusters of the sizes in rows (I, P), which are hypergeometric.

    It is a sum over pairs of clusters of a number that follows from their two sizes alone: these are worked out once.
    """
    patches = a.shape[1]
    of_a, of_b = _sizes(a), _sizes(b)
    sizes_a, sizes_b = (np.flatnonzero(counts.any(0)) for counts in (of_a, of_b))
    table = np.array([[_shared_information(patches, int(i), int(j)) for j in sizes_b] for i in sizes_a])
    found: Floats = np.einsum("ki,ij,kj->k", of_a[:, sizes_a], table, of_b[:, sizes_b])
    return found


def _sizes(labels: Labels) -> NDArray[np.int64]:
    """(I, P + 1), the number of clusters of each size in rows (I, P) of labels."""
    images, patches = labels.shape
    wide = int(labels.max(initial=0)) + 2
    cluster, size = np.unique(np.arange(images)[:, None] * wide + labels + 1, return_counts=True)
    found = np.bincount(cluster // wide * (patches + 1) + size, minlength=images * (patches + 1))
    return found.reshape(images, patches + 1)


def _shared_information(patches: int, a: int, b: int) -> float:
    """The mean of n / P log(P n / (a b)), n being the overlap of random clusters of ``a`` and ``b`` of P patches."""
    from scipy.stats import hypergeom

    overlap = np.arange(max(1, a + b - patches), min(a, b) + 1)
    terms = overlap / patches * np.log(patches * overlap / (a * b))
    return float(hypergeom.pmf(overlap, patches, a, b) @ terms)


def permuted(labels: ArrayLike, seed: int = 0) -> NDArray[Any]:
    """The clusters of every image dealt out to its patches at random: the same sizes, and no relation to the image.

    What a measure gives on these is its level by chance.

    Args:
        labels: (..., P).
        seed: of the permutations, one for every image.

    Example:
        >>> sorted(permuted([0, 0, 1, 2]).tolist())
        [0, 0, 1, 2]
    """
    return np.random.default_rng(seed).permuted(np.asarray(labels), axis=-1)


def _labels(a: ArrayLike, b: ArrayLike) -> tuple[Labels, Labels]:
    first, second = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
    if first.shape[-1:] != second.shape[-1:] or first.ndim == 0:
        raise VitrimError(f"expected clusters of the same patches, got labels {first.shape} and {second.shape}")
    one, other = np.broadcast_arrays(first, second)
    return one, other


def _entropies(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """H(A), H(B) and H(A, B) of every image, in nats."""
    first, second = _labels(a, b)
    shape, patches = first.shape[:-1], first.shape[-1]
    first, second = (one.reshape(-1, patches) - min(0, one.min(initial=0)) for one in (first, second))
    wide = int(second.max(initial=0)) + 1
    found = (_entropy(one).reshape(shape) for one in (first, second, first * wide + second))
    return next(found), next(found), next(found)


def _entropy(labels: Labels) -> Floats:
    """Entropies of rows (I, P) of labels from 0, in nats: log P - sum over clusters of n log n / P."""
    images, patches = labels.shape
    wide = int(labels.max(initial=0)) + 1
    cluster, size = np.unique(np.arange(images)[:, None] * wide + labels, return_counts=True)
    total = np.bincount(cluster // wide, weights=size * np.log(size), minlength=images)
    found: Floats = np.log(patches) - total / patches
    found[total == patches * np.log(patches)] = 0.0  # a single cluster, to the bit
    return found


def _share(shared: Floats, of: Floats) -> Floats:
    """``shared / of`` within [0, 1], 1 where nothing is to be known."""
    return np.clip(np.divide(shared, of, out=np.ones_like(shared), where=of > 0), 0.0, 1.0)


# ---- stages ----------------------------------------------------------------------------------------------------------


def compose(labels: ArrayLike, stage_map: ArrayLike) -> Labels:
    """The tokens of patches after one more stage: ``stage_map[labels]``, -1 where a patch is gone.

    Args:
        labels: (..., P), the token that holds each patch before the stage, -1 for none.
        stage_map: (..., M), the token that each of the M tokens goes to, -1 for none.

    Returns:
        (..., P) int64.

    Raises:
        VitrimError: labels of tokens that the map does not have.

    Example:
        >>> compose([0, 1, 1, 2, -1], [1, 0, -1]).tolist()
        [1, 0, 0, -1, -1]
    """
    before, onward = np.asarray(labels, dtype=np.int64), np.asarray(stage_map, dtype=np.int64)
    if before.max(initial=-1) >= onward.shape[-1]:
        raise VitrimError(f"token {before.max()} goes nowhere: the map of the stage has {onward.shape[-1]} tokens")
    onward = np.broadcast_to(onward, (*before.shape[:-1], onward.shape[-1]))
    return np.where(before < 0, -1, np.take_along_axis(onward, np.maximum(before, 0), axis=-1))


def relabel(before: ArrayLike, after: ArrayLike, num_tokens: int | None = None) -> Labels:
    """The map of one stage from the composed labels on its both sides; `compose` of it and ``before`` is ``after``.

    Args:
        before: (..., P), the token that holds each patch before the stage, -1 for none.
        after: the same after it.
        num_tokens: M, tokens before the stage; by default the largest label says.

    Returns:
        (..., M) int64, the token that each token goes to, -1 where none of its patches is left, or it has none.

    Raises:
        VitrimError: a token whose patches go different ways, or a patch that comes back.

    Example:
        >>> relabel([0, 1, 1, 2], [1, 0, 0, -1]).tolist()
        [1, 0, -1]
    """
    first, second = _labels(before, after)
    shape, patches = first.shape[:-1], first.shape[-1]
    tokens = int(first.max(initial=-1)) + 1 if num_tokens is None else num_tokens
    first, second = first.reshape(-1, patches), second.reshape(-1, patches)
    found = np.full((len(first), tokens), -1, dtype=np.int64)
    image, patch = np.nonzero(first >= 0)
    found[image, first[image, patch]] = second[image, patch]
    if not np.array_equal(compose(first, found), second):
        raise VitrimError("these are no labels of one reduction: a token is divided, or a patch comes back")
    return found.reshape(*shape, tokens)
