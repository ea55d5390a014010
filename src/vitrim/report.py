"""The findings of a command: tables to read, numbers to keep, notes on how to read them.

Every command of the command line is a function too, and both give the same `Report`:

    report = vitrim.bench("vit_small_patch16_224", "tome:r=13")  # $ vitrim bench vit_small_patch16_224 -m tome:r=13
    print(report)                                                # the table that the command prints
    report.rows[1]["speedup"], report.record                     # the numbers that --json writes
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrim.files import json_text, write_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

WIDTH = 120
"""Columns of text where nothing says how wide the place is: a pipe, a file, a string."""


@dataclass(frozen=True)
class Table:
    """Rows of plain numbers and texts; None where there is no number.

    Attributes:
        name: of its file, without an ending.
        title: one line.
        columns: names, with units.
        rows: one value per column. Texts are shown as they are, numbers by `cell`.
        shown: the columns that people see; None for all, none for a table that is too long to be shown.
        text_columns: how many columns, from the left, hold text: they stand at their left edge.

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
    text_columns: int = 1

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

    def cells(self) -> tuple[tuple[str, ...], list[list[str]]]:
        """Names and texts of the columns that are shown; no columns where the table is not shown."""
        names = self.columns if self.shown is None else self.shown
        places = [self.columns.index(name) for name in names]
        return names, [[cell(row[place]) for place in places] for row in self.rows]

    def rich(self) -> RichTable:
        """The table for a terminal."""
        from rich.table import Table as RichTable
        from rich.text import Text

        names, rows = self.cells()
        table = RichTable(title=Text(self.title) if self.title else None, title_justify="left", header_style="bold")
        for index, name in enumerate(names):
            table.add_column(Text(name), justify="left" if index < self.text_columns else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def html(self) -> str:
        """The table for a notebook."""
        names, rows = self.cells()

        def line(tag: str, texts: Sequence[str]) -> str:
            sides = ("left" if place < self.text_columns else "right" for place in range(len(texts)))
            cells = (
                f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>'
                for text, side in zip(texts, sides, strict=False)
            )
            return f"<tr>{''.join(cells)}</tr>"

        head, body = line("th", names), "".join(line("td", row) for row in rows)
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"


@dataclass
class Report:
    """The findings of one command.

    Attributes:
        command: its name on the command line.
        facts: what the numbers depend on, by name: the environment, the weights, the images, ...
        rows: the numbers, one mapping per line of the result; units are part of the names.
        tables: for people. What is in them is in ``rows`` and ``facts``, unrounded.
        notes: one line each, needed to read the tables correctly.
        files: written by the command.

    Example:
        >>> report = Report("count", {"seed": 0}, [{"method": "dense", "gmacs": 4.61}])
        >>> report.tables.append(Table("count", "", ("method", "GMACs"), [("dense", "4.61")]))
        >>> report.record
        {'command': 'count', 'seed': 0, 'rows': [{'method': 'dense', 'gmacs': 4.61}]}
    """

    command: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def record(self) -> dict[str, Any]:
        """Everything but the tables, as ``--json`` writes it."""
        return {"command": self.command, **self.facts, "rows": [dict(row) for row in self.rows]}

    def save(self, path: str | Path) -> None:
        """Write the `record` as JSON, whole or not at all.

        Raises:
            VitrimError: there is no such place, or no permission.
        """
        write_text(Path(path), json_text(self.record, indent=2) + "\n")

    def parts(self) -> Iterator[RichTable | str]:
        """The parts that a terminal shows, from top to bottom."""
        for table in self.tables:
            if table.shown != ():
                if table.title:  # a line of its own: above the table it would be folded to its width
                    yield table.title
                yield replace(table, title="").rich()
        for note in self.notes:
            yield f"note: {note}"

    def __str__(self) -> str:
        from rich.console import Console

        out = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        show(out, self)
        return out.file.getvalue().rstrip("\n")  # type: ignore[attr-defined,no-any-return]

    def __repr__(self) -> str:
        return f"<Report of {self.command}: {len(self.rows)} rows, {len(self.tables)} tables; print() shows them>"

    def _repr_html_(self) -> str:
        tables = [table.html() for table in self.tables if table.shown != ()]
        return "".join(tables) + "".join(f"<p><small>{escape(note)}</small></p>" for note in self.notes)


def show(out: Any, report: Report) -> None:
    """Print the tables and notes of ``report`` on a rich console."""
    for part in report.parts():
        out.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


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
