"""Printed tables of commands, and the record of ``--json``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli.help import MACHINE
from vitrim.cli.options import Setup
from vitrim.errors import VitrimError
from vitrim.files import check_file, json_text, write_text
from vitrim.progress import is_first_process
from vitrim.report import WIDTH, show

if TYPE_CHECKING:
    from rich.console import Console

    from vitrim.report import Report


@dataclass(frozen=True, kw_only=True)
class Output(Setup):
    """A command's output: tables to the terminal, and a record to a file."""

    panel = MACHINE

    json: Annotated[str | None, typer.Option(metavar="FILE", help="write the record here; -: standard output")] = None

    def __post_init__(self) -> None:
        if self.json not in (None, "-"):
            check_file(Path(self.json))

    def spare(self, *files: Path) -> None:
        """Refuse a record that would overwrite one of ``files``, which the command reads or writes."""
        if self.json not in (None, "-") and Path(self.json).resolve() in {file.resolve() for file in files}:
            raise VitrimError(f"--json {self.json} is a file of this command itself: give the record another name")

    @property
    def on_stdout(self) -> bool:
        """True if standard output is for the record only."""
        return self.json == "-"

    def console(self) -> Console:
        """The console for tables: standard output, or standard error if standard output is for the record."""
        from rich.console import Console

        out = Console(stderr=self.on_stdout)
        if not out.is_terminal:  # a pipe or a file has no width, and numbers would wrap in rich's 80 columns
            out.width = max(out.width, WIDTH)
        return out

    def print(self, *lines: str) -> None:
        """Print lines without markup, colours and wrapping."""
        out = self.console()
        for line in lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)

    def write(self, command: str, **entries: Any) -> None:
        """Write the record of ``command``, if ``--json`` is set: to a file, atomically, or to standard output."""
        if self.json is None:
            return
        text = json_text({"command": command, **entries}, indent=2) + "\n"
        if self.on_stdout:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write_text(Path(self.json), text)

    def finish(self, report: Report) -> None:
        show(self.console(), report)
        self.write(**report.record)


@contextmanager
def resumable(kept: Path) -> Iterator[None]:
    """Print how to resume if a signal interrupts the block and ``kept``, a file or folder, exists."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if kept.exists() and is_first_process():
            print(f"kept in {kept.parent}: the same command with --resume goes on from there", file=sys.stderr)
        raise
