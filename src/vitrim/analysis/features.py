"""Likeness of the features of two models: Procrustes, CKA and CCA over the same images.

Source: Ding et al., Grounding Representation Similarity with Statistical Testing (NeurIPS 2021), whose measures "Which
Tokens to Use?" applies to class tokens. All of them take features (I, C) of the same I images in the same order, which
may have different widths, and centre and scale them themselves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.errors import VitrimError

__all__ = ["cca", "cca_measures", "center", "cka", "mean_cca", "mean_sq_cca", "opd", "procrustes", "pwcca"]

Floats = NDArray[np.float64]


def center(features: ArrayLike) -> Floats:
    """Features (I, C) minus their mean over images, divided by their Frobenius norm; of constant ones zeros.

    Raises:
        VitrimError: no matrix.

    Example:
        >>> center([[0.0], [2.0]]).round(4).tolist()
        [[-0.7071], [0.7071]]
    """
    values = np.asarray(features, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise VitrimError(f"expected features (images, channels), got {values.shape}")
    found: Floats = values - values.mean(0)
    norm = np.linalg.norm(found)
    if norm > 0:
        found /= norm
    return found


def procrustes(a: ArrayLike, b: ArrayLike) -> float:
    """Orthogonal Procrustes distance, ||A||^2 + ||B||^2 - 2 ||A'B||_* of `center` features, in [0, 2]. Symmetric.

    The squared distance after the best rotation: 0 for features that are rotated and scaled alike.

    Args:
        a: (I, C), I images.
        b: (I, D).

    Raises:
        VitrimError: features of other images.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 4))
        >>> abs(procrustes(a, 3 * a[:, ::-1])) < 1e-12
        True
    """
    first, second = _pair(a, b)
    nuclear = np.linalg.svd(first.T @ second, compute_uv=False).sum()
    return float((first**2).sum() + (second**2).sum() - 2 * nuclear)


opd = procrustes
"""The name of `procrustes` in Ding et al."""


def cka(a: ArrayLike, b: ArrayLike) -> float:
    """Distance by linear centred kernel alignment, 1 - ||A'B||_F^2 / (||A'A||_F ||B'B||_F), in [0, 1]. Symmetric.

    Kornblith et al., Similarity of Neural Network Representations Revisited (ICML 2019). nan for constant features.

    Args:
        a: (I, C), I images.
        b: (I, D).

    Raises:
        VitrimError: features of other images.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 4))
        >>> abs(cka(a, 3 * a[:, ::-1])) < 1e-12
        True
    """
    first, second = _pair(a, b)
    below = np.linalg.norm(first.T @ first) * np.linalg.norm(second.T @ second)
    return float(1 - np.linalg.norm(first.T @ second) ** 2 / below) if below > 0 else float("nan")


def cca(a: ArrayLike, b: ArrayLike) -> Floats:
    """The min(C, D) canonical correlations of two features, descending, in [0, 1].

    The singular values of S_AA^(-1/2) S_AB S_BB^(-1/2), with symmetric roots by eigendecomposition in which eigenvalues
    that are not positive count as 0.

    Args:
        a: (I, C), I images.
        b: (I, D).

    Raises:
        VitrimError: features of other images, or no more images than channels: every correlation would then be 1.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> cca(a, a).round(6).tolist()
        [1.0, 1.0]
    """
    return _canonical(*_pair(a, b))[1]


def mean_cca(a: ArrayLike, b: ArrayLike) -> float:
    """The mean of the canonical correlations; see `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> round(mean_cca(a, a), 6)
        1.0
    """
    return float(cca(a, b).mean())


def mean_sq_cca(a: ArrayLike, b: ArrayLike) -> float:
    """The mean of the squared canonical correlations; see `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> round(mean_sq_cca(a, a), 6)
        1.0
    """
    return float((cca(a, b) ** 2).mean())


def pwcca(a: ArrayLike, b: ArrayLike) -> float:
    """Distance by projection-weighted CCA, 1 - sum w_i rho_i, in [0, 1]. Not symmetric: ``a`` gives the weights.

    w_i is the sum over the channels of ``a`` of |<h_i, channel>|, h_i being the i-th canonical variate of ``a``,
    divided by the sum over all C of them; the first min(C, D) meet a correlation. Morcos et al., Insights on
    Representational Similarity (NeurIPS 2018).

    Args:
        a: (I, C), I images.
        b: (I, D). With C > D, the directions of ``a`` beyond the D-th are a basis that the linear algebra library
            chooses, and the weights depend on it.

    Raises:
        VitrimError: as for `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> abs(pwcca(a, 2 * a)) < 1e-6
        True
    """
    first, second = _pair(a, b)
    variates, correlations, _ = _canonical(first, second)
    return _weighted(first, variates, correlations)


def cca_measures(a: ArrayLike, b: ArrayLike) -> tuple[float, float, float]:
    """`pwcca` of a and b, `pwcca` of b and a, and `mean_cca`, from one decomposition.

    Args:
        a, b: as for `pwcca`.

    Raises:
        VitrimError: as for `cca`.

    Example:
        >>> a = np.random.default_rng(0).normal(size=(9, 2))
        >>> [abs(round(number, 6)) for number in cca_measures(a, 2 * a)]
        [0.0, 0.0, 1.0]
    """
    first, second = _pair(a, b)
    of_a, correlations, of_b = _canonical(first, second)
    distances = (_weighted(first, of_a, correlations), _weighted(second, of_b, correlations))
    return (*distances, float(correlations.mean()))


def _weighted(features: Floats, variates: Floats, correlations: Floats) -> float:
    """1 minus the mean correlation, weighted by how much of the features lies along each variate."""
    weight = np.abs(variates.T @ features).sum(1)
    return float(1 - (weight[: len(correlations)] / weight.sum()) @ correlations)


def _canonical(a: Floats, b: Floats) -> tuple[Floats, Floats, Floats]:
    """All C canonical variates (I, C) of centred ``a``, the min(C, D) correlations, and all variates (I, D) of b."""
    images, widest = len(a), max(a.shape[1], b.shape[1])
    if images <= widest:
        raise VitrimError(f"CCA needs more images than channels, got {images} images and {widest} channels")
    root_a, root_b = _inverse_root(a.T @ a), _inverse_root(b.T @ b)
    # the full SVD: weights of PWCCA run over all directions of a
    left, correlations, right = np.linalg.svd(root_a @ (a.T @ b) @ root_b, full_matrices=True)
    return a @ (root_a @ left), correlations, b @ (root_b @ right.T)


def _inverse_root(matrix: Floats) -> Floats:
    """The symmetric inverse square root of a symmetric matrix; eigenvalues that are not positive give 0."""
    values, vectors = np.linalg.eigh(matrix)
    roots = np.zeros_like(values)
    roots[values > 0] = values[values > 0] ** -0.5
    found: Floats = (vectors * roots) @ vectors.T
    return found


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    first, second = center(a), center(b)
    if len(first) != len(second):
        raise VitrimError(f"expected features of the same images, got {len(first)} and {len(second)}")
    return first, second
