"""The table of figures: a file of `figures/` enters its functions, which draw what stands in tables.

A figure reads tables and nothing else, so it can be drawn again from stored records, and a family without a figure has
its tables in the report all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from vitrim.analysis.tables import Outcome, Table
from vitrim.core.registry import discover, enter
from vitrim.plots.style import colours, markers

__all__ = ["Drawing", "Picture", "Tables", "draws", "fullest", "names_of", "pictures", "styles", "tables_of"]


class Tables(dict[str, Table]):
    """All tables of a report by name: also those that a figure does not draw, since they settle the colours.

    Attributes:
        arrays: what pictures of images are drawn from: by family, then by the names that the family gives them. Empty
            where a report is made again from stored records.
    """

    def __init__(self, tables: Mapping[str, Table], arrays: Mapping[str, Mapping[str, NDArray[Any]]] | None = None):
        super().__init__(tables)
        self.arrays = arrays or {}


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
        alt: a sentence that stands for the picture where it cannot be seen.
        draw: from all tables to a matplotlib figure; None where these tables have nothing to draw, such as a line over
            rates where every method has one.
    """

    name: str
    family: str
    table: str
    title: str
    alt: str
    draw: Draw


@dataclass(frozen=True)
class Picture:
    """A figure that was drawn: see `Drawing`."""

    drawing: Drawing
    figure: Any
    alt: str


def draws(family: str, table: str, *, title: str, alt: str) -> Callable[[Draw], Draw]:
    """Enter a function ``draw_NAME(tables)`` as a figure of ``family``; see `Drawing`."""

    def entered(draw: Draw) -> Draw:
        name = draw.__name__.removeprefix("draw_")
        enter(_DRAWINGS, name, Drawing(name, family, table, title, alt, draw), f"figure '{name}'")
        return draw

    return entered


def drawings(family: str) -> list[Drawing]:
    """The figures of a family, in the order of its file."""
    discover("vitrim.analysis.figures")
    return [drawing for drawing in _DRAWINGS.values() if drawing.family == family]


def tables_of(outcomes: Mapping[str, Outcome]) -> Tables:
    """All tables of the families by name, with their arrays."""
    return Tables(
        {table.name: table for outcome in outcomes.values() for table in outcome.tables},
        {family: outcome.arrays for family, outcome in outcomes.items()},
    )


def pictures(family: str, tables: Tables) -> Iterator[Picture]:
    """Draw the figures of a family that its tables allow."""
    for drawing in drawings(family):
        if drawing.table not in tables or not tables[drawing.table].rows:
            continue
        figure = drawing.draw(tables)
        if figure is not None:
            known = ", ".join(names_of({drawing.table: tables[drawing.table]}))
            yield Picture(drawing, figure, f"{drawing.alt} The numbers are in {drawing.table}.csv. Shown: {known}.")


def names_of(tables: Mapping[str, Table]) -> list[str]:
    """The names of the records in tables, in order of appearance."""
    columns = [table.column(name) for table in tables.values() for name in NAMES if name in table.columns]
    return list(dict.fromkeys(name for column in columns for name in column))


def styles(tables: Tables) -> tuple[dict[str, str], dict[str, str]]:
    """The colour and the marker of every record, by name: the same in all figures of these tables."""
    names = names_of(tables)
    return colours(names), markers(names)


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
