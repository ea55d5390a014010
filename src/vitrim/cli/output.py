"""Printed tables of commands, and the record that ``--json`` writes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli.help import MACHINE
from vitrim.cli.options import Setup
from vitrim.errors import VitrimError
from vitrim.files import check_file, json_text, write_text
from vitrim.report import WIDTH, show

if TYPE_CHECKING:
    from rich.console import Console

    from vitrim.report import Report

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the record here; -: standard output")]


@dataclass(frozen=True, kw_only=True)
class Output(Setup):
    """The places for a command's results: tables to the terminal, and a record to a file.

    Raises:
        VitrimError: the record cannot be written there; found before any work.
    """

    panel = MACHINE

    json: Json = None

    def __post_init__(self) -> None:
        if self.json not in (None, "-"):
            check_file(Path(self.json))

    def spare(self, *files: Path) -> None:
        """Refuse a record in the place of one of ``files``, which the command reads, or writes beside its result.

        Raises:
            VitrimError: naming it.
        """
        if self.json not in (None, "-") and Path(self.json).resolve() in {file.resolve() for file in files}:
            raise VitrimError(f"--json {self.json} is a file of this command itself: give the record another name")

    @property
    def on_stdout(self) -> bool:
        """True if standard output carries the record and nothing else."""
        return self.json == "-"

    def console(self) -> Console:
        """The console for tables: standard output, or standard error if that is for the record."""
        from rich.console import Console

        out = Console(stderr=self.on_stdout)
        if not out.is_terminal:  # a pipe or a file has no width; the 80 columns rich assumes fold the numbers
            out.width = max(out.width, WIDTH)
        return out

    def print(self, *lines: str) -> None:
        """Print lines as they are: no markup, no colours, no folding."""
        out = self.console()
        for line in lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)

    def write(self, command: str, **entries: Any) -> None:
        """Write the record of ``command``, if one is wanted: to a file, whole or not at all, or to standard output."""
        if self.json is None:
            return
        text = json_text({"command": command, **entries}, indent=2) + "\n"
        if self.on_stdout:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write_text(Path(self.json), text)

    def finish(self, report: Report) -> None:
        """Print the tables and notes of a command's report, and write its record, if one is wanted."""
        show(self.console(), report)
        self.write(**report.record)


def is_first_process() -> bool:
    """True in the process that prints and writes; others are those that ``accelerate launch`` started beside it."""
    return int(os.environ.get("RANK", "0")) == 0


SECONDS_BETWEEN_LINES = 30.0


class Told:
    """Lines of progress, at most one in half a minute.

    Example:
        >>> told = Told("images")
        >>> [told.line(done, 100, seconds) for done, seconds in ((1, 0.0), (25, 20.0), (50, 31.0), (60, 40.0))]
        ['', '', '50 of 100 images, about 1 min left', '']
    """

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.first: tuple[int, float] | None = None
        self.last = 0.0

    def line(self, done: int, total: int | None, seconds: float) -> str:
        """The line that is due now, or none.

        Args:
            done: of the unit.
            total: None where it is not known.
            seconds: on any clock.
        """
        if self.first is None:
            self.first, self.last = (done, seconds), seconds
            return ""
        if seconds - self.last < SECONDS_BETWEEN_LINES:
            return ""
        self.last = seconds
        if total is None:
            return f"{done} {self.unit}"
        pace = (done - self.first[0]) / (seconds - self.first[1])
        left = "" if pace <= 0 else f", about {max(1, round((total - done) / pace / 60))} min left"
        return f"{done} of {total} {self.unit}{left}"


@contextmanager
def progress_bar(unit: str = "images") -> Iterator[Callable[..., None]]:
    """Progress on standard error, in the first process: a bar that is gone at the end, or without a terminal a line
    every half minute.

    Yields:
        What moves it, called with what is done, the total if it is known, and perhaps a line that stays above the bar,
        which is printed where there is no bar, too.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal or not is_first_process()
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task(unit, total=None, visible=False)  # until it is moved
        told = Told(unit)

        def move(done: int, total: int | None = None, line: str = "") -> None:
            progress.update(bar, completed=done, total=total, visible=True)
            due = told.line(done, total, time.monotonic())
            if due and not console.is_terminal and is_first_process():
                print(due, file=sys.stderr, flush=True)
            if line:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield move


@contextmanager
def resumable(kept: Path) -> Iterator[None]:
    """Say how to go on if Ctrl-C ends what is inside and ``kept``, a file or folder, holds what was reached."""
    try:
        yield
    except KeyboardInterrupt:
        if kept.exists() and is_first_process():
            print(f"kept in {kept.parent}: the same command with --resume goes on from there", file=sys.stderr)
        raise
