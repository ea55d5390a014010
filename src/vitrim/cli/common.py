"""Helpers shared by the subcommands: methods by text, devices, the record of ``--json``, tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.errors import VitrimError, unknown
from vitrim.files import check_file, json_text, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from vitrim.core.method import MethodConfig

Methods = Annotated[
    list[str], typer.Option("--method", "-m", help="name:key=value,key=value, e.g. tome:r=13, or @FILE; may repeat")
]
MethodsBesideDense = Annotated[
    list[str] | None,
    typer.Option(
        "--method", "-m", help="name:key=value,key=value, e.g. tome:r=13, or @FILE; may repeat; dense is always shown"
    ),
]
MAX_BATCH = 2**20
MAX_SEED = 2**63 - 1
MAX_THREADS = 1024
MAX_WORKERS = 256
MAX_SECONDS = 24 * 3600.0
MAX_REPEATS = 100_000
"""Far above any useful value: typing errors are reported at once, not by the library that fails on them."""
INTERRUPTED = 130
TERMINATED = 143
"""Exit codes of Ctrl-C and SIGTERM, as shells use them."""
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, max=MAX_BATCH, help="images per batch")]
Workers = Annotated[
    int, typer.Option("--workers", min=0, max=MAX_WORKERS, help="processes that read images; 0: this one")
]


def parse_methods(texts: Sequence[str]) -> list[MethodConfig]:
    """Parse the methods written on the command line, checking every one before any work starts."""
    from vitrim.core import registry

    return registry.parse_methods(texts)


def parse_options(texts: Sequence[str] | None, what: str = "model option") -> dict[str, Any]:
    """Parse ``["img_size=384"]`` into ``{"img_size": 384}``."""
    from vitrim.core.registry import read_value

    options: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise VitrimError(f"cannot read '{text}': write key=value, e.g. img_size=384")
        if key in options:
            raise VitrimError(f"{what} {key} is given twice")
        options[key] = read_value(value, f"{what} {key}")
    return options


def check_choice(what: str, given: str, valid: Collection[str]) -> None:
    """Refuse a value that is not one of ``valid``.

    Raises:
        VitrimError: with the nearest one and all of them.
    """
    if given not in valid:
        raise unknown(what, given, valid)


# ---- output --------------------------------------------------------------------------------------------------------


def is_first_process() -> bool:
    """True in the process that prints and writes; others are those that ``accelerate launch`` started beside it."""
    return int(os.environ.get("RANK", "0")) == 0


def check_json(target: str | None) -> None:
    """Refuse, before any work, a target that `write_json` could not write to.

    Raises:
        VitrimError: there is no such place, or no permission.
    """
    if target not in (None, "-"):
        check_file(Path(target))


def write_json(target: str | None, record: dict[str, Any]) -> None:
    """Write ``record`` to a file (whole or not at all) or, for ``-``, to standard output."""
    if target is None:
        return
    text = json_text(record, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(Path(target), text)


def console(json_target: str | None = None) -> Console:
    """The console for tables: standard output, or standard error when the record itself goes to standard output."""
    from rich.console import Console

    out = Console(stderr=json_target == "-")
    if not out.is_terminal:  # a pipe or a file has no width; the 80 columns rich assumes fold the numbers
        out.width = max(out.width, 120)
    return out


def print_table(
    out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1
) -> None:
    """Print a table whose first columns are text and whose other columns are right-aligned."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(table)
