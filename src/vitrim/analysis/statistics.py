"""Rank correlations and intervals: how sure a number of an analysis is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.errors import VitrimError

__all__ = ["Interval", "RankCorrelation", "bootstrap_ci", "mean_ci", "spearman_ci", "spearman_kendall"]


class RankCorrelation(NamedTuple):
    """Spearman's rho and Kendall's tau-b with their two-sided p-values; nan where a variable is constant."""

    spearman: float
    spearman_p: float
    kendall: float
    kendall_p: float


class Interval(NamedTuple):
    """The ends of a confidence interval, each of the shape of the statistic."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]


def spearman_kendall(x: ArrayLike, y: ArrayLike) -> RankCorrelation:
    """Spearman's rho (Pearson's correlation of ranks) and Kendall's tau-b of pairs, by scipy.

    Args:
        x: (n,), n >= 2.
        y: (n,).

    Raises:
        VitrimError: other numbers of values, or fewer than two pairs.

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


def bootstrap_ci(
    values: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], ArrayLike],
    n: int = 1000,
    seed: int = 0,
    *,
    level: float = 0.95,
) -> Interval:
    """A percentile bootstrap interval: quantiles of the statistic over ``n`` draws of the rows with replacement.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3.

    Args:
        values: (m, ...), m independent rows, such as images.
        statistic: of such an array, reduces its first axis, e.g. ``lambda rows: rows.mean(0)``.
        n: draws.
        seed: of the draws.
        level: of confidence, in (0, 1).

    Raises:
        VitrimError: no rows, no draws, or another level.

    Example:
        >>> low, high = bootstrap_ci(np.arange(100.0), np.mean)
        >>> bool(low < 49.5 < high), bool(high - low < 15)
        (True, True)
    """
    rows = np.asarray(values, dtype=np.float64)
    _check(rows, n, level)
    generator = np.random.default_rng(seed)
    found = np.stack(
        [np.asarray(statistic(rows[generator.integers(len(rows), size=len(rows))]), np.float64) for _ in range(n)]
    )
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(low, high)


def mean_ci(values: ArrayLike, n: int = 1000, seed: int = 0, *, level: float = 0.95) -> Interval:
    """`bootstrap_ci` of the means of columns, the same numbers sooner: draws become counts of rows.

    Args:
        values: (m, K), m independent rows.
        n, seed, level: as for `bootstrap_ci`.

    Raises:
        VitrimError: as `bootstrap_ci`.

    Example:
        >>> low, high = mean_ci([[0.0], [1.0]])
        >>> low.tolist(), high.tolist()
        ([0.0], [1.0])
    """
    rows = np.asarray(values, dtype=np.float64)
    _check(rows, n, level)
    generator, size = np.random.default_rng(seed), len(rows)
    counts = (np.bincount(generator.integers(size, size=size), minlength=size) for _ in range(n))
    low, high = np.quantile([count @ rows / size for count in counts], [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Interval(low, high)


def spearman_ci(pairs: ArrayLike, n: int = 1000, seed: int = 0, *, level: float = 0.95) -> Interval:
    """`bootstrap_ci` of Spearman's rho of pairs, the same numbers sooner: all draws are ranked at once.

    Args:
        pairs: (m, 2).
        n, seed, level: as for `bootstrap_ci`. Draws in which a side is constant have no rho, and the interval is nan.

    Raises:
        VitrimError: as `bootstrap_ci`.

    Example:
        >>> low, high = spearman_ci([[1, 2], [2, 4], [3, 3], [4, 7], [5, 6], [6, 9]])
        >>> bool(low < 0.9 < high)
        True
    """
    from scipy.stats import rankdata

    rows = np.asarray(pairs, dtype=np.float64)
    _check(rows, n, level)
    generator, size = np.random.default_rng(seed), len(rows)
    drawn = rows[np.stack([generator.integers(size, size=size) for _ in range(n)])]
    x, y = np.moveaxis(rankdata(drawn, axis=1) - (size + 1) / 2, -1, 0)
    below = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    found = np.divide((x * y).sum(1), below, out=np.full(n, np.nan), where=below > 0)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(low, high)


def summary(values: ArrayLike) -> list[tuple[float, float, float, float]]:
    """Mean, population standard deviation and the ends of a 95 % bootstrap interval of the mean, of each column.

    Args:
        values: (I, K), images by measures.

    Example:
        >>> [round(number, 3) for number in summary([[0.0], [1.0]])[0]]
        [0.5, 0.5, 0.0, 1.0]
    """
    rows = np.asarray(values, dtype=np.float64)
    low, high = mean_ci(rows)
    columns = zip(rows.mean(0), rows.std(0), low, high, strict=True)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in columns]


def columns_of(prefix: str, columns: Sequence[str] = ("", "_std", "_low", "_high")) -> tuple[str, ...]:
    """The names of the numbers of `summary`.

    Example:
        >>> columns_of("iou")
        ('iou', 'iou_std', 'iou_low', 'iou_high')
    """
    return tuple(f"{prefix}{column}" for column in columns)


def _check(rows: NDArray[np.float64], n: int, level: float) -> None:
    if rows.ndim == 0 or not len(rows) or n < 1 or not 0 < level < 1:
        raise VitrimError(
            f"expected rows to draw from, one draw or more and a level in (0, 1), got {rows.shape}, {n} and {level}"
        )
