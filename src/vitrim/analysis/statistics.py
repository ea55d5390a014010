"""Rank correlations and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.errors import VitrimError

Floats = NDArray[np.float64]

DRAWS = 1000
ENDS = (0.025, 0.975)
"""Quantiles at the ends of an interval."""


class RankCorrelation(NamedTuple):
    """Spearman's rho and Kendall's tau-b with two-sided p-values; nan if a variable is constant."""

    spearman: float
    spearman_p: float
    kendall: float
    kendall_p: float


def spearman_kendall(x: ArrayLike, y: ArrayLike) -> RankCorrelation:
    """Spearman's rho (Pearson's correlation of ranks) and Kendall's tau-b of pairs (n,), n >= 2, by scipy.

    Example:
        >>> found = spearman_kendall([1, 2, 3, 4], [1, 3, 2, 4])
        >>> round(found.spearman, 4), round(found.kendall, 4)
        (0.8, 0.6667)
    """
    from scipy.stats import kendalltau, spearmanr

    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise VitrimError(f"expected two or more pairs of numbers, got {first.shape} and {second.shape}")
    if any((one == one[0]).all() for one in (first, second)):
        return RankCorrelation(*(float("nan"),) * 4)
    rho, tau = spearmanr(first, second), kendalltau(first, second)
    return RankCorrelation(float(rho.statistic), float(rho.pvalue), float(tau.statistic), float(tau.pvalue))


def spearman_ci(pairs: ArrayLike, n: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """A 95 % percentile bootstrap interval of Spearman's rho of (m, 2) pairs, m independent rows.

    Quantiles of the statistic over ``n`` draws of the rows with replacement: Efron and Tibshirani, An Introduction to
    the Bootstrap (1993), section 13.3; nan if a column is constant in one of them.
    """
    from scipy.stats import rankdata

    rows = np.asarray(pairs, dtype=np.float64)
    generator, size = np.random.default_rng(seed), len(rows)
    drawn = rows[np.stack([generator.integers(size, size=size) for _ in range(n)])]
    # Pearson's correlation of the ranks, all draws at once: ranks are centred by their mean, (m + 1) / 2.
    x, y = np.moveaxis(rankdata(drawn, axis=1) - (size + 1) / 2, -1, 0)
    below = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    found = np.divide((x * y).sum(1), below, out=np.full(n, np.nan), where=below > 0)
    low, high = np.quantile(found, ENDS).tolist()
    return low, high


def moments(measures: Mapping[str, ArrayLike], n: int = DRAWS) -> dict[str, float]:
    """Mean, population standard deviation and a 95 % bootstrap interval of the mean, of each measure over images.

    ``measures`` are (I,) numbers of the same images, which are drawn together. Four columns per measure: ``NAME,
    NAME_std, NAME_low, NAME_high``.

    Example:
        >>> moments({"iou": [0.0, 1.0]})
        {'iou': 0.5, 'iou_std': 0.5, 'iou_low': 0.0, 'iou_high': 1.0}
    """
    rows = np.stack([np.asarray(values, dtype=np.float64) for values in measures.values()], 1)
    # A draw is a weight per image: one product gives the means of all measures.
    if not len(rows):
        raise VitrimError("expected numbers of one image or more, got none")
    low, high = np.quantile([counts @ rows / len(rows) for counts in _draws(len(rows), n)], ENDS, axis=0)
    columns = (rows.mean(0), rows.std(0), low, high)
    return {
        f"{name}{end}": float(column[place])
        for place, name in enumerate(measures)
        for end, column in zip(("", "_std", "_low", "_high"), columns, strict=True)
    }


@lru_cache(maxsize=1)
def _draws(size: int, n: int) -> list[NDArray[np.uint8]]:
    """Counts of each of ``size`` images in each of ``n`` draws with replacement; the same for all measures."""
    # Fixed draws: the same data give the same interval, and measures of one table are drawn together.
    generator = np.random.default_rng(0)
    return [np.bincount(generator.integers(size, size=size), minlength=size).astype(np.uint8) for _ in range(n)]
