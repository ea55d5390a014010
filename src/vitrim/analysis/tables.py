"""The numbers of an analysis as tables, and the means and intervals that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.analysis.statistics import mean_ci
from vitrim.report import Table, cell

__all__ = ["FEW", "Outcome", "Table", "cell", "summary"]

FEW = 30
"""Images below which numbers come with a warning."""


@dataclass
class Outcome:
    """The findings of a family.

    Attributes:
        tables: its tables, empty where it does not apply.
        notes: one line each: what was left out and why, what to read with care.
        arrays: what pictures are drawn from, by name; the family says which there are.
        images: those that the numbers were estimated from, where that is not all of the records'.
    """

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    images: int | None = None


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


def named(prefix: str, columns: Sequence[str] = ("", "_std", "_low", "_high")) -> tuple[str, ...]:
    """The names of the numbers of `summary`.

    Example:
        >>> named("iou")
        ('iou', 'iou_std', 'iou_low', 'iou_high')
    """
    return tuple(f"{prefix}{column}" for column in columns)
