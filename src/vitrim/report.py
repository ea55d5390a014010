"""The result of a command: tables, numbers and notes. Every command is also a function that returns a `Report`."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from vitrim.files import csv_text, json_text, write_text

DENSE = "dense"
"""The method in rows of the unreduced model."""
WIDTH = 120
"""Columns of text without a terminal: in a pipe, a file or a string."""


def at_px(name: str, size: int | None) -> str:
    """The name of a row, or of a model, at another image size.

    Example:
        >>> at_px("tome:r=8", 208), at_px("dense", None)
        ('tome:r=8 at 208 px', 'dense')
    """
    return name if size is None else f"{name} at {size} px"


@dataclass(frozen=True)
class Table:
    """A table of numbers and texts; None is a missing number.

    Attributes:
        name: of its file, without a suffix.
        shown: the displayed columns; None for all, () for a table that is too long to display.
        text_columns: the number of text columns, from the left; they are left-aligned.

    Example:
        >>> table = Table("", "", ("method", "top-1"), [("evit:keep_rate=0.7,blocks=3+6+9", "75.10"), ("tome", None)])
        >>> from rich.console import Console
        >>> Console(width=22).print(table, crop=False)
        method  top-1
        ─────────────
        evit    75.10
        tome        -
        evit = evit:keep_rate=0.7,blocks=3+6+9
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    shown: tuple[str, ...] | None = None
    text_columns: int = 1

    def csv(self) -> str:
        """The table as comma-separated values with a header."""
        return csv_text(self.columns, (["" if _missing(value) else value for value in row] for row in self.rows))

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries for JSON, with None for missing numbers."""
        return [
            {name: None if _missing(value) else value for name, value in zip(self.columns, row, strict=True)}
            for row in self.rows
        ]

    def column(self, name: str) -> list[Any]:
        """The values of one column."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def cells(self) -> tuple[tuple[str, ...], list[list[str]]]:
        """Names and texts of the displayed columns."""
        names = self.columns if self.shown is None else self.shown
        places = [self.columns.index(name) for name in names]
        return names, [[cell(row[place]) for place in places] for row in self.rows]

    def parts(self) -> Iterator[Any]:
        """The title in a separate line, because a table would fold it to its width, and the table."""
        if self.title:
            yield self.title
        yield replace(self, title="")

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

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The table for a terminal of any width; names and numbers are never broken.

        A table that is too wide first loses the lines between its columns. Then long texts, such as methods, become
        short names with a key below, and columns move into further tables, each with the text columns. A table of texts
        that is too wide becomes a list.
        """
        from rich.text import Text

        names, rows = self.cells()
        width, texts = options.max_width, self.text_columns
        if self.title:
            yield Text(self.title)
        # First with lines between the columns, then without them; both keep every word whole.
        for lean in (False, True):
            widths = _widths(names, rows, width, texts, lean=lean)
            if widths is not None:
                yield self._drawn(names, rows, widths, lean=lean)
                return
        if texts >= len(names):
            yield from (Text(line, no_wrap=True, overflow="ignore") for line in _listed(names, rows, width))
            return
        rows, key = shortened(rows, texts)
        for place, part in enumerate(_parts(names, rows, width, texts)):
            if place:
                yield ""
            # A part is a table of its own, with the text columns in front.
            own, cells = [names[one] for one in part], [[row[one] for one in part] for row in rows]
            own_texts = sum(one < texts for one in part)
            yield self._drawn(own, cells, _widths(own, cells, width, own_texts, lean=True), own_texts)
        for name, text in key.items():
            yield Text(f"{name} = {text}", no_wrap=True, overflow="ignore")

    def _drawn(
        self,
        names: Sequence[str],
        rows: Sequence[Sequence[str]],
        widths: Sequence[int] | None,
        texts: int | None = None,
        *,
        lean: bool = True,
    ) -> Any:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            header_style="bold",
            box=box.SIMPLE_HEAD if lean else box.HEAVY_HEAD,
            padding=(0, 1, 0, 0) if lean else (0, 1),
            show_edge=not lean,
            pad_edge=not lean,
        )
        for index, name in enumerate(names):
            side: Any = "left" if index < (self.text_columns if texts is None else texts) else "right"
            width = None if widths is None else widths[index]
            table.add_column(Text(name), justify=side, overflow="fold", width=width)
        for row in rows:
            table.add_row(*map(Text, row))
        return table


LONG = 16
"""Longer texts, in characters, get short names in a table that is too wide."""


def shortened(rows: Sequence[Sequence[str]], text_columns: int = 1) -> tuple[list[list[str]], dict[str, str]]:
    """Rows with short names for long texts, such as methods with many options, and the key.

    Example:
        >>> shortened([["dense", "1"], ["tome:r=[13,13,13,13]", "2"], ["tome:r=[8,8,8,8,8,8]", "3"]])
        ([['dense', '1'], ['tome 1', '2'], ['tome 2', '3']], {'tome 1': 'tome:r=[13,13,13,13]', 'tome 2': \
'tome:r=[8,8,8,8,8,8]'})
    """
    every = dict.fromkeys(text for row in rows for text in row[:text_columns])
    long = [text for text in every if len(text) > LONG and ":" in text[:-1] and " " not in text.partition(":")[0]]
    stems = [text.partition(":")[0] for text in long]
    names: dict[str, str] = {}
    for text, stem in zip(long, stems, strict=True):
        alone = stems.count(stem) == 1 and stem not in every
        number = sum(name.startswith(f"{stem} ") for name in names.values()) + 1
        names[text] = stem if alone else f"{stem} {number}"
    short = [[names.get(text, text) for text in row[:text_columns]] + list(row[text_columns:]) for row in rows]
    return short, {name: text for text, name in names.items()}


def _widths(
    names: Sequence[str], rows: Sequence[Sequence[str]], width: int, text_columns: int, *, lean: bool
) -> list[int] | None:
    """The widths of the columns in a table of ``width``; None if a number or a word would be broken."""
    from rich.cells import cell_len

    wide, least = [], []
    for place, (name, *texts) in enumerate(zip(names, *rows, strict=True)):
        words = [name, *texts] if place < text_columns else [name]
        whole = texts if place == 0 or place >= text_columns else []  # names and numbers
        wide.append(max(map(cell_len, [name, *texts])))
        least.append(max(map(cell_len, [*(word for text in words for word in text.split()), *whole]), default=0))
    # Rich draws two spaces between lean columns; otherwise two spaces and a line for each, and one line at the end.
    room = width - (2 * (len(names) - 1) if lean else 3 * len(names) + 1)
    # Take a letter from the widest column that can lose one, until the table fits.
    while sum(wide) > room:
        place = max(range(len(wide)), key=lambda place: (wide[place] > least[place], wide[place]))
        if wide[place] <= least[place]:
            return None
        wide[place] -= 1
    return wide


def _parts(names: Sequence[str], rows: Sequence[Sequence[str]], width: int, text_columns: int) -> list[list[int]]:
    """The columns of the parts of a table that is too wide: the text columns, and as many others as fit."""
    head = list(range(max(1, min(text_columns, len(names)))))
    parts: list[list[int]] = []
    for place in range(len(head), len(names)):
        wider = [*(parts[-1] if parts else head), place]
        # Try the next column beside those of the last part; if it does not fit, it begins a part, however wide it is.
        own = [[row[one] for one in wider] for row in rows]
        if _widths([names[one] for one in wider], own, width, len(head), lean=True) is None or not parts:
            parts.append([*head, place])
        else:
            parts[-1] = wider
    return parts or [head]


def _listed(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """A table of texts as a list: the first cell on one line, the others below it with their names."""
    for row in rows:
        yield row[0]
        rest = "; ".join(
            f"{name} {text}" for name, text in zip(names[1:], row[1:], strict=True) if text not in ("", "-")
        )
        yield from textwrap.wrap(
            rest, max(width, 20), initial_indent="    ", subsequent_indent="    ", break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip


@dataclass
class Report:
    """The result of one command.

    Attributes:
        facts: conditions of the numbers, by name: the environment, the weights, the images, ...
        rows: the numbers, unrounded, one mapping per line of the result; names include units.
        tables: ``rows`` and ``facts`` for display.
        notes: one line each, needed to interpret the tables.

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
        """Everything except the tables, as ``--json`` writes it."""
        return {"command": self.command, **self.facts, "rows": [dict(row) for row in self.rows]}

    def save(self, path: str | Path) -> None:
        """Write the `record` as JSON; see `write_text`."""
        write_text(Path(path), json_text(self.record, indent=2) + "\n")

    def parts(self) -> Iterator[Table | str]:
        """Tables and notes for a terminal."""
        for table in self.tables:
            if table.shown != ():
                yield from table.parts()
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


class Pace:
    """An estimate of the time left, by the pace so far."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def left(self, done: int, total: int | None, seconds: float) -> str:
        """The estimate in words, empty if unknown, after ``done`` of ``total`` and these ``seconds`` of any clock."""
        if self.first is None or done < self.first[0]:  # a new count began
            self.first = (done, seconds)
        pace = (done - self.first[0]) / max(seconds - self.first[1], 1e-9)
        if total is None or pace <= 0 or done >= total:
            return ""
        return f", about {max(1, round((total - done) / pace / 60))} min left"


def show(out: Any, report: Report) -> None:
    """Print the tables and notes of ``report`` on a rich console; only a terminal wraps lines."""
    for part in report.parts():
        line = isinstance(part, str) and not (out.is_terminal and " " in part and not part.startswith("wrote "))
        out.print(part, markup=False, highlight=False, soft_wrap=line, crop=False)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def cell(value: object) -> str:
    """A value formatted for a table.

    Example:
        >>> cell(0.123456), cell(None), cell(float("nan")), cell(3)
        ('0.1235', '-', '-', '3')
    """
    if _missing(value):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
