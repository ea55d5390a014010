"""Figures of an analysis, drawn from its tables alone, so that stored records can redraw them.

Most are lines over blocks (`line_panels`) or heat maps of all pairs of records (`draw_pair_maps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from vitrim.analysis.family import TableRow, Tables, names_of
from vitrim.core.tables import enter
from vitrim.plots.charts import Line, colour_bar, heat, line, square
from vitrim.style import SMALL, TEXT, TITLE, colours, markers, names_below, panels

Draw = Callable[[Tables], Any]

_DRAWINGS: dict[str, Drawing] = {}


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn.

    Attributes:
        name: file name without suffix.
        caption: description of the picture, also used as its alternative text.
        draw: from all tables to a matplotlib figure; None if the tables have nothing to draw.
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


def styles(tables: Tables) -> tuple[dict[str, str], dict[str, str]]:
    """The colour and marker of every record by name, the same in all figures of these tables."""
    names = names_of(*tables.values())
    return colours(names), markers(names)


# ---- lines -----------------------------------------------------------------------------------------------------------


def line_of(rows: Sequence[TableRow], measure: str, over: str) -> Line:
    """A measure with its interval, its bounds and its chance level, as far as the rows have them, over a column."""
    rows, stem = sorted(rows, key=lambda row: row[over]), measure.removesuffix("_measure")  # v_measure has v_chance
    ends = (f"{measure}_{end}" for end in ("low", "high", "least", "most"))
    columns: list[list[Any]] = [[row.get(name) for row in rows] for name in (over, measure, *ends, f"{stem}_chance")]
    return Line(*columns)


class Panel(NamedTuple):
    """A panel with a line per name, see `line_of`; ``over`` is the column on the x axis, ``label`` the axis's."""

    measure: str
    lines: Mapping[str, Sequence[TableRow]]
    title: str = ""
    over: str = "block"
    label: str = "block"


def line_panels(
    given: Sequence[Panel], looks: tuple[Mapping[str, str], Mapping[str, str]], *, across: int = 3
) -> tuple[Any, list[Any]]:
    """A figure of panels, at most ``across`` in a row, and its axes, with the legend below; ``looks`` are `styles`."""
    colour, marker = looks
    names = dict.fromkeys(name for panel in given for name in panel.lines)
    size = (6.2, 3.2) if len(given) == 1 else (4.2, 2.8) if across == 2 else (2.9, 2.3)
    figure, axes = panels(len(given), across=across, size=size, above=0.2 + 0.2 * -(-len(names) // across))
    for axis, panel in zip(axes, given, strict=True):
        for name, rows in panel.lines.items():
            shown = line_of(rows, panel.measure, panel.over)
            line(axis, shown, colour=colour[name], marker=marker[name], label=name)
        axis.set_title(panel.title, fontsize=TEXT)
        axis.set_xlabel(panel.label, fontsize=TEXT)
        if all(isinstance(row[panel.over], int) for rows in panel.lines.values() for row in rows):
            axis.xaxis.get_major_locator().set_params(integer=True)
    names_below(figure, axes, across=across)
    return figure, axes


# ---- pairs -----------------------------------------------------------------------------------------------------------


class PairMap(NamedTuple):
    """A heat map of all pairs of records.

    Attributes:
        column, turned: column of a pair's value, and of the reversed pair's.
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
