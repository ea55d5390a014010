"""Rank correlations and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vitrim.errors import VitrimError

DRAWS = 1000
ENDS = (0.025, 0.975)
"""Quantiles at the ends of an interval."""
BAND = ("", "_low", "_high")
"""Suffixes of the columns of a mean and its interval, see `columns_of`."""


class RankCorrelation(NamedTuple):
    """Spearman's rho and Kendall's tau-b with two-sided p-values; nan if a variable is constant."""

    spearman: float
    spearman_p: float
    kendall: float
    kendall_p: float


def spearman_kendall(x: ArrayLike, y: ArrayLike) -> RankCorrelation:
    """Spearman's rho (Pearson's correlation of ranks) and Kendall's tau-b of pairs, by scipy.

    Args:
        x, y: (n,), n >= 2.

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
    """A 95 % percentile bootstrap interval of Spearman's rho of pairs.

    Quantiles of the statistic over ``n`` draws of the rows with replacement: Efron and Tibshirani, An Introduction to
    the Bootstrap (1993), section 13.3.

    Args:
        pairs: (m, 2), m independent rows.
        n: draws. If a column is constant in one of them, the interval is nan.

    Example:
        >>> low, high = spearman_ci([[1, 2], [2, 4], [3, 3], [4, 7], [5, 6], [6, 9]])
        >>> bool(low < 0.9 < high)
        True
    """
    from scipy.stats import rankdata

    rows = np.asarray(pairs, dtype=np.float64)
    generator, size = np.random.default_rng(seed), len(rows)
    drawn = rows[np.stack([generator.integers(size, size=size) for _ in range(n)])]
    x, y = np.moveaxis(rankdata(drawn, axis=1) - (size + 1) / 2, -1, 0)
    below = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    found = np.divide((x * y).sum(1), below, out=np.full(n, np.nan), where=below > 0)
    low, high = np.quantile(found, ENDS).tolist()
    return low, high


def summary(values: ArrayLike, n: int = DRAWS) -> list[tuple[float, float, float, float]]:
    """Mean, population standard deviation and a 95 % bootstrap interval of the mean, of each column.

    Args:
        values: (I, K), images by measures.
        n: draws of the interval, see `spearman_ci`.

    Example:
        >>> [round(number, 3) for number in summary([[0.0], [1.0]])[0]]
        [0.5, 0.5, 0.0, 1.0]
    """
    rows = np.asarray(values, dtype=np.float64)
    generator, size = np.random.default_rng(0), len(rows)
    if not size:
        raise VitrimError("expected numbers of one image or more, got none")
    counts = (np.bincount(generator.integers(size, size=size), minlength=size) for _ in range(n))
    low, high = np.quantile([count @ rows / size for count in counts], ENDS, axis=0)
    columns = zip(rows.mean(0), rows.std(0), low, high, strict=True)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in columns]


def columns_of(prefix: str, columns: Sequence[str] = ("", "_std", "_low", "_high")) -> tuple[str, ...]:
    """The column names for a result of `summary`.

    Example:
        >>> columns_of("iou")
        ('iou', 'iou_std', 'iou_low', 'iou_high')
    """
    return tuple(f"{prefix}{column}" for column in columns)
