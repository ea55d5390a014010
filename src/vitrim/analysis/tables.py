"""The numbers of an analysis as tables, and the means and intervals that fill them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.analysis.statistics import mean_ci

__all__ = ["FEW", "Outcome", "Table", "cell", "summary"]

FEW = 30
"""Images below which numbers come with a warning."""


@dataclass(frozen=True)
class Table:
    """Rows of plain numbers and texts; None where there is no number.

    Attributes:
        name: of its file, without an ending.
        title: one line.
        columns: names, with units.
        rows: one value per column.
        shown: the columns that a terminal shows; None for all, none for a table that is too long.

    Example:
        >>> print(Table("one", "One.", ("method", "share"), [("tome", 0.5), ("topk", None)]).csv().strip())
        method,share
        tome,0.5
        topk,
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    shown: tuple[str, ...] | None = None

    def csv(self) -> str:
        """The table as comma-separated values, with a line of names."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if _missing(value) else value for value in row] for row in self.rows)
        return out.getvalue()

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries that JSON can hold: no number is None."""
        return [
            {name: None if _missing(value) else value for name, value in zip(self.columns, row, strict=True)}
            for row in self.rows
        ]

    def column(self, name: str) -> list[Any]:
        """The values of one column."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def cell(value: object) -> str:
    """A value as people read it in a table.

    Example:
        >>> cell(0.123456), cell(None), cell(float("nan")), cell(3)
        ('0.1235', '-', '-', '3')
    """
    if _missing(value):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
