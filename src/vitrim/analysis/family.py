"""The parts of an analysis family: its result, and figures drawn from its tables.

A figure reads nothing but tables, so stored records can redraw it; a family without figures still has its tables in the
report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrim.core.tables import enter
from vitrim.plots.charts import Line, colour_bar, heat, line, square
from vitrim.report import Table
from vitrim.style import SMALL, TEXT, TITLE, colours, markers, names_below, panels


@dataclass
class FamilyResult:
    """The findings of one family.

    Attributes:
        tables: empty if the family does not apply.
        notes: one line each: parts left out and why, numbers to read with care.
        arrays: data of pictures by name; the family documents the names.
        images: number of images behind the numbers, if not all of the records'.
    """

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    images: int | None = None


class Tables(dict[str, Table]):
    """All tables of a report by name; colours depend on all of them, so a figure receives them all.

    Attributes:
        arrays: data of pictures, by family and name. Empty for a report rebuilt from stored records.
    """

    def __init__(self, tables: Mapping[str, Table], arrays: Mapping[str, Mapping[str, NDArray[Any]]] | None = None):
        super().__init__(tables)
        self.arrays = arrays or {}

    @classmethod
    def of(cls, results: Mapping[str, FamilyResult]) -> Tables:
        return cls(
            {table.name: table for result in results.values() for table in result.tables},
            {family: result.arrays for family, result in results.items()},
        )


TableRow = dict[str, Any]
"""A row of a table by column, see `Table.records`."""
Draw = Callable[[Tables], Any]

_DRAWINGS: dict[str, Drawing] = {}
NAMES = ("method", "method_a", "method_b")
"""Columns that hold names of records."""


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn.

    Attributes:
        name: file name without suffix.
        caption: description of the picture, also used as its alternative text.
        draw: from all tables to a matplotlib figure; None if the tables have nothing to draw, such as a line over rates
            when every method has only one.
    """

    name: str
    family: str
    table: str
    title: str
    caption: str
    draw: Draw

    def alt(self, tables: Tables) -> str:
        """The alternative text: caption, where the numbers are, and which records are shown."""
        shown = ", ".join(names_of(tables[self.table]))
        return f"{self.caption} The numbers are in {self.table}.csv. Shown: {shown}."


def draws(family: str, table: str, title: str) -> Callable[[Draw], Draw]:
    """Register ``draw_NAME(tables)`` as a figure of ``family``; its docstring is the caption. See `Drawing`."""

    def entered(draw: Draw) -> Draw:
        name, caption = draw.__name__.removeprefix("draw_"), " ".join((draw.__doc__ or title).split())
        entry = Drawing(name, family, table, title, caption, draw)
        enter(_DRAWINGS, name, entry, f"figure '{name}'", attrgetter("draw"))
        return draw

    return entered


def drawings(family: str) -> list[Drawing]:
    """The figures of a family, in the order of definition."""
    return [drawing for drawing in _DRAWINGS.values() if drawing.family == family]


def drawn(family: str, tables: Tables) -> Iterator[tuple[Drawing, Any]]:
    """Draw the figures of a family that its tables allow."""
    for drawing in drawings(family):
        if drawing.table in tables and tables[drawing.table].rows:
            figure = drawing.draw(tables)
            if figure is not None:
                yield drawing, figure


# ---- helpers of drawing functions ------------------------------------------------------------------------------------


def names_of(*tables: Table) -> list[str]:
    """The record names in tables, in order of appearance."""
    columns = [table.column(name) for table in tables for name in NAMES if name in table.columns]
    return list(dict.fromkeys(name for column in columns for name in column))


def by_method(table: Table) -> dict[str, list[TableRow]]:
    """The rows of a table by record name."""
    found: dict[str, list[TableRow]] = {}
    for row in table.records():
        found.setdefault(row["method"], []).append(row)
    return found


def styles(tables: Tables) -> tuple[dict[str, str], dict[str, str]]:
    """The colour and marker of every record by name, the same in all figures of these tables."""
    names = names_of(*tables.values())
    return colours(names), markers(names)


def line_panels(
    tables: Tables,
    table: str,
    measures: Sequence[Sequence[str]],
    *,
    over: str = "block",
    label: str = "block",
    across: int = 3,
) -> tuple[Any, list[Any]]:
    """A figure, and its axes, with a panel per measure and a line per record of a table, with the legend below.

    Args:
        tables: all tables of the report, for the colours.
        measures: per panel, the column of the line and, optionally, the two columns of its band.
        over: column of whole numbers on the x axis.
        across: most panels, and entries of the legend, in a row.
    """
    colour, marker = styles(tables)
    own = by_method(tables[table])
    size = (6.2, 3.2) if len(measures) == 1 else (3.6, 2.4) if across == 2 else (2.9, 2.3)
    figure, axes = panels(len(measures), across=across, size=size, above=0.2 + 0.2 * -(-len(own) // across))
    for axis, columns in zip(axes, measures, strict=True):
        for name, every in own.items():
            rows = sorted(every, key=lambda row: row[over])
            given = Line(*([row[column] for row in rows] for column in (over, *columns)))
            line(axis, given, colour=colour[name], marker=marker[name], label=name)
        whole_numbers(axis, label)
    names_below(figure, axes, across=across)
    return figure, axes


def whole_numbers(axis: Any, label: str) -> None:
    """Label the x axis, and put its ticks at whole numbers, such as blocks."""
    axis.set_xlabel(label, fontsize=TEXT)
    axis.xaxis.get_major_locator().set_params(integer=True)


def fullest(blocks: Iterable[int], most: int) -> list[int]:
    """The ``most`` most frequent blocks, in order; ties are resolved evenly over the depth.

    Args:
        blocks: one for each row of a table.

    Example:
        >>> fullest([0, 1, 1, 2, 3, 3, 3], 2), fullest([0, 1, 2, 3], 2)
        ([1, 3], [1, 3])
        >>> fullest(range(12), 4)
        [2, 5, 8, 11]
    """
    counts, found = Counter(blocks), list[int]()
    for count in sorted(set(counts.values()), reverse=True):
        equal = sorted(block for block in counts if counts[block] == count)
        left = min(most - len(found), len(equal))
        found += [equal[(number + 1) * len(equal) // left - 1] for number in range(left)]
    return sorted(found)


def drawn_blocks(arrays: Mapping[str, NDArray[Any]], name: str, most: int) -> dict[int, int]:
    """The blocks of a record to draw, each with its index among the blocks that have maps.

    Args:
        arrays: with ``NAME/blocks``, and with ``drawn`` if blocks were requested.
        most: largest number of blocks, if none were requested.

    Example:
        >>> arrays = {"mctf/blocks": np.arange(1, 12)}
        >>> drawn_blocks(arrays, "mctf", 3), drawn_blocks({**arrays, "drawn": np.array([0, 2, 5])}, "mctf", 3)
        ({3: 2, 7: 6, 11: 10}, {2: 1, 5: 4})
    """
    blocks: list[int] = arrays[f"{name}/blocks"].tolist()
    wanted = arrays["drawn"].tolist() if "drawn" in arrays else fullest(blocks, most)
    return {block: blocks.index(block) for block in wanted if block in blocks}


def note_blocks(result: FamilyResult, asked: Sequence[int], found: Mapping[str, Iterable[int]]) -> None:
    """Store the blocks that were asked for, if any, with a note on each record of ``found`` that has no map of one."""
    if not asked:
        return
    result.arrays["drawn"] = np.array(sorted(set(asked)))
    for name, blocks in found.items():
        missing = [str(block) for block in sorted(set(asked)) if block not in set(blocks)]
        if missing:
            result.notes.append(f"{name} has no map of block {', '.join(missing)} to draw")


class PairMap(NamedTuple):
    """A heat map of all pairs of records.

    Attributes:
        column: column of a pair's value.
        turned: column of the reversed pair's value.
        own: value of a record with itself: 1 for a similarity, 0 for a distance.
    """

    title: str
    rows: Sequence[TableRow]
    column: str
    turned: str
    own: float = 1.0


def draw_pair_maps(names: Sequence[str], maps: Sequence[PairMap], across: int, label: str = "") -> Any:
    """Draw heat maps of all pairs of records, at most ``across`` in a row: with a ``label``, one colour bar for all;
    without, one beside each."""
    side, across = square(names, across)
    figure, axes = panels(len(maps), across=across, size=(side + (0.2 if label else 0.7), side + 0.35), above=1.5)
    figure.set_figwidth(figure.get_figwidth() + (2.2 if label else 1.4))
    figure.set_layout_engine("compressed")  # otherwise names below square maps are cut off
    for place, (axis, given) in enumerate(zip(axes, maps, strict=True)):
        grid = np.full((len(names), len(names)), np.nan)
        np.fill_diagonal(grid, given.own)
        for row in given.rows:
            a, b = names.index(row["method_a"]), names.index(row["method_b"])
            grid[a, b], grid[b, a] = row[given.column], row[given.turned]
        finite = grid[np.isfinite(grid)]
        limits = (min(0.0, float(finite.min())), 1.0) if given.own else (0.0, float(finite.max()) or 1.0)
        image = heat(axis, grid, rows=names, columns=names, limits=limits)
        axis.tick_params(labelleft=place % across == 0, labelbottom=place + across >= len(axes))
        axis.set_title(given.title, fontsize=TITLE)
        if not label:
            figure.colorbar(image, ax=axis, shrink=0.8, aspect=18).ax.tick_params(labelsize=SMALL)
    if label:
        colour_bar(figure, image, axes, label)
    return figure


def methods_with(arrays: Mapping[str, object], kind: str) -> list[str]:
    """The methods that have arrays of a kind.

    Example:
        >>> methods_with({"images": None, "topk/scores": None}, "scores")
        ['topk']
    """
    return [name.removesuffix(f"/{kind}") for name in arrays if name.endswith(f"/{kind}")]
