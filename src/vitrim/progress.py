"""Progress of long commands: the current step, and the time left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from vitrim.report import Pace

if TYPE_CHECKING:
    from rich.console import Console

SILENT_SECONDS = 2.0
"""Delay of the first line without a terminal: shorter commands print no progress."""
SECONDS_BETWEEN_LINES = 30.0
REDRAWN_SECONDS = 0.2


def is_first_process() -> bool:
    """True in the process that prints and writes, among those of ``accelerate launch``."""
    return int(os.environ.get("RANK", "0")) == 0


class Signs:
    """A progress line: redrawn in place on a terminal, else printed every half minute.

    On a terminal the line is drawn only when it changes, a few times per second at most, so that it does not disturb
    timing.

    Args:
        text: the first step.
        unit: of the counts.
        console: default: standard error.
    """

    def __init__(self, text: str, unit: str = "images", console: Console | None = None) -> None:
        from rich.console import Console

        self.text, self.unit, self.pace = text, unit, Pace()
        self.counted: tuple[int, int | None] = (0, None)
        self.begun = time.monotonic()
        self.written: float | None = None
        self.drawn = -REDRAWN_SECONDS
        self.ended = Event()
        self.live: Any = None
        self.console = Console(stderr=True) if console is None else console
        if not is_first_process():
            return
        if self.console.is_terminal:
            from rich.live import Live

            # standard output is not redirected; warnings appear above the line
            self.live = Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._draw()
        else:
            Thread(target=self._beat, daemon=True).start()

    # ---- content -----------------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Show the current step."""
        self.text, self.counted = text, (0, None)
        self._draw()

    def move(self, done: int, total: int | None = None, line: str = "", more: str = "") -> None:
        """Show a count, of ``total`` if known, ``more``, and the time left; ``line`` is printed permanently."""
        of = "" if total is None else f" of {total}"
        self.text = f"{done}{of} {self.unit}{more}{self.pace.left(done, total, time.monotonic())}"
        self.counted = (done, total)
        if line:
            self.say(line)
        self._draw()

    def say(self, line: str) -> None:
        """Print a permanent line."""
        if is_first_process():
            self.clear()
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def clear(self) -> None:
        """Remove the line for other output; the next change draws it again."""
        self.written = time.monotonic()
        self.drawn = -REDRAWN_SECONDS
        if self.live is not None:
            self.live.stop()

    def end(self) -> None:
        """Stop, and remove the line."""
        self.ended.set()
        self.clear()

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self.live is None or time.monotonic() - self.drawn < REDRAWN_SECONDS:
            return
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self.drawn = time.monotonic()
        done, total = self.counted
        shown: Any = Text(self.text, no_wrap=True, overflow="ellipsis")
        if total:
            line = Table.grid(padding=(0, 1))
            line.add_row(ProgressBar(total, done, width=30), shown)
            shown = line
        self.live.start()
        self.live.update(shown, refresh=True)

    def _beat(self) -> None:
        """Print the line whenever nothing was printed for half a minute."""
        while True:
            now = time.monotonic()
            due = self.begun + SILENT_SECONDS if self.written is None else self.written + SECONDS_BETWEEN_LINES
            if self.ended.wait(max(0.0, due - now)):
                return
            if self.written is None or time.monotonic() - self.written >= SECONDS_BETWEEN_LINES:
                first, self.written = self.written is None, time.monotonic()
                spent = "" if first else f"[{timedelta(seconds=int(self.written - self.begun))}] "
                self.console.print(f"{spent}{self.text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(text: str, unit: str = "images", console: Console | None = None) -> Iterator[Signs]:
    """Show progress until the end of a block; arguments as of `Signs`.

    Example:
        >>> with progress("loading") as signs:
        ...     signs.tell("counting")
        ...     signs.move(1, 2)
        >>> signs.text
        '1 of 2 images'
    """
    signs = Signs(text, unit, console)
    try:
        yield signs
    finally:
        signs.end()
