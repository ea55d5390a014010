"""The parts of a family of an analysis: its result, and figures drawn from the tables in it.

A figure reads tables and nothing else, so it can be drawn again from stored records, and a family without a figure has
its tables in the report all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.core.registry import enter
from vitrim.plots.charts import Line, line
from vitrim.plots.style import TEXT, colours, markers
from vitrim.report import Table


@dataclass
class FamilyResult:
    """The findings of one family.

    Attributes:
        tables: none where the family does not apply.
        notes: one line each: what was left out and why, what to read with care.
        arrays: what pictures are drawn from, by name; the family says which there are.
        images: how many the numbers were estimated from, where that is not all of the records'.
    """

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    images: int | None = None


class Tables(dict[str, Table]):
    """All tables of a report by name: also those that a figure does not draw, since they settle the colours.

    Attributes:
        arrays: what pictures of images are drawn from: by family, then by the names that the family gives them. Empty
            where a report is made again from stored records.
    """

    def __init__(self, tables: Mapping[str, Table], arrays: Mapping[str, Mapping[str, NDArray[Any]]] | None = None):
        super().__init__(tables)
        self.arrays = arrays or {}

    @classmethod
    def of(cls, results: Mapping[str, FamilyResult]) -> Tables:
        """All tables of the families, with their arrays."""
        return cls(
            {table.name: table for result in results.values() for table in result.tables},
            {family: result.arrays for family, result in results.items()},
        )


TableRow = dict[str, Any]
"""A row of a table by column, see `Table.records`."""
Draw = Callable[[Tables], Any]

_DRAWINGS: dict[str, Drawing] = {}
NAMES = ("method", "method_a", "method_b")
"""Columns with names of records."""


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn.

    Attributes:
        name: of its file, without an ending.
        family: that makes its table.
        table: the name of the table that it needs.
        title: one line.
        caption: a sentence that stands for the picture where it cannot be seen.
        draw: from all tables to a matplotlib figure; None where these tables have nothing to draw, such as a line over
            rates where every method has one.
    """

    name: str
    family: str
    table: str
    title: str
    caption: str
    draw: Draw

    def alt(self, tables: Tables) -> str:
        """The text for those who do not see the figure: caption, where the numbers are, which records it shows."""
        known = ", ".join(names_of({self.table: tables[self.table]}))
        return f"{self.caption} The numbers are in {self.table}.csv. Shown: {known}."


def draws(family: str, table: str, *, title: str, alt: str) -> Callable[[Draw], Draw]:
    """Enter a function ``draw_NAME(tables)`` as a figure of ``family``; see `Drawing`."""

    def entered(draw: Draw) -> Draw:
        name = draw.__name__.removeprefix("draw_")
        enter(_DRAWINGS, name, Drawing(name, family, table, title, alt, draw), f"figure '{name}'")
        return draw

    return entered


def drawings(family: str) -> list[Drawing]:
    """The figures of a family, in the order of its file."""
    return [drawing for drawing in _DRAWINGS.values() if drawing.family == family]


def drawn(family: str, tables: Tables) -> Iterator[tuple[Drawing, Any]]:
    """Draw the figures of a family that its tables allow: each `Drawing` with its matplotlib figure."""
    for drawing in drawings(family):
        if drawing.table in tables and tables[drawing.table].rows:
            figure = drawing.draw(tables)
            if figure is not None:
                yield drawing, figure


# ---- for functions that draw -----------------------------------------------------------------------------------------


def names_of(tables: Mapping[str, Table]) -> list[str]:
    """The names of the records in tables, in order of appearance."""
    columns = [table.column(name) for table in tables.values() for name in NAMES if name in table.columns]
    return list(dict.fromkeys(name for column in columns for name in column))


def styles(tables: Tables) -> tuple[dict[str, str], dict[str, str]]:
    """The colour and the marker of every record, by name: the same in all figures of these tables."""
    names = names_of(tables)
    return colours(names), markers(names)


def lines(axis: Any, tables: Tables, table: str, columns: Sequence[str], label: str = "block") -> list[Any]:
    """Draw a line for every record of a table.

    Args:
        axis: of matplotlib.
        tables: all of the report, for the colours.
        table: its name.
        columns: x, y and, of a band, its ends.
        label: below the x axis, whose ticks are whole numbers.

    Returns:
        The lines, for a legend.
    """
    colour, marker = styles(tables)
    drawn_lines = []
    for name in names_of({table: tables[table]}):
        rows = sorted(
            (row for row in tables[table].records() if row["method"] == name), key=lambda row: row[columns[0]]
        )
        given = Line(*([row[column] for row in rows] for column in columns))
        drawn_lines.append(line(axis, given, colour=colour[name], marker=marker[name], label=name))
    whole_numbers(axis, label)
    return drawn_lines


def whole_numbers(axis: Any, label: str) -> None:
    """Label the x axis, and put its ticks at whole numbers, such as blocks."""
    axis.set_xlabel(label, fontsize=TEXT)
    axis.xaxis.get_major_locator().set_params(integer=True)


def fullest(blocks: Iterable[int], most: int) -> list[int]:
    """At most so many blocks, in order: those that occur most often, of equal ones the later.

    Args:
        blocks: one for each row of a table.
        most: of them.

    Example:
        >>> fullest([0, 1, 1, 2, 3, 3, 3], 2), fullest([0, 1, 2, 3], 2)
        ([1, 3], [2, 3])
    """
    counts = Counter(blocks)
    return sorted(sorted(counts, key=lambda block: (counts[block], block))[-most:])


def matrix(rows: Iterable[TableRow], names: Sequence[str], straight: str, turned: str) -> NDArray[np.float64]:
    """(R, R), the value of every pair; 1 of each name with itself, nan where there is none.

    Args:
        rows: with ``method_a`` and ``method_b``.
        names: of the R records.
        straight: the column of a pair.
        turned: the column of the pair turned round.

    Example:
        >>> rows = [{"method_a": "x", "method_b": "y", "h": 0.5, "c": 0.2}]
        >>> matrix(rows, ["x", "y"], "h", "c").tolist()
        [[1.0, 0.5], [0.2, 1.0]]
    """
    grid = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(grid, 1.0)
    for row in rows:
        a, b = names.index(row["method_a"]), names.index(row["method_b"])
        grid[a, b], grid[b, a] = row[straight], row[turned]
    return grid


def methods_with(arrays: Mapping[str, object], kind: str) -> list[str]:
    """The methods that have arrays of a kind.

    Example:
        >>> methods_with({"images": None, "topk/scores": None}, "scores")
        ['topk']
    """
    return [name.removesuffix(f"/{kind}") for name in arrays if name.endswith(f"/{kind}")]
