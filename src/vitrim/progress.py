"""Signs of life of what takes long: what it is doing, and how much is left."""

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
"""The time from which a command shows progress where there is no terminal: one that ends sooner stays silent."""
SECONDS_BETWEEN_LINES = 30.0
REDRAWN_SECONDS = 0.2


def is_first_process() -> bool:
    """True in the process that prints and writes; others are those that ``accelerate launch`` started beside it."""
    return int(os.environ.get("RANK", "0")) == 0


class Signs:
    """One line on what is being done: redrawn in place on a terminal, else written every half minute.

    A terminal's line is drawn when it changes, a few times a second at most, and never in between: what is timed runs
    undisturbed. Lines elsewhere come whether or not there is anything new to say.

    Args:
        text: what is done first.
        unit: of what is counted.
        console: where it is shown; default: standard error.
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

            # what goes to standard output stays there, and warnings stand above the line
            self.live = Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._draw()
        else:
            Thread(target=self._beat, daemon=True).start()

    # ---- what is said -----------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Say what is being done now."""
        self.text, self.counted = text, (0, None)
        self._draw()

    def move(self, done: int, total: int | None = None, line: str = "", more: str = "") -> None:
        """Say how much is done, of a total if it is known, and perhaps a line that stays, and ``more`` behind it."""
        of = "" if total is None else f" of {total}"
        self.text = f"{done}{of} {self.unit}{self.pace.left(done, total, time.monotonic())}{more}"
        self.counted = (done, total)
        if line:
            self.say(line)
        self._draw()

    def say(self, line: str) -> None:
        """Say a line that stays."""
        if is_first_process():
            self.clear()
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def clear(self) -> None:
        """Give way to other lines; the next word draws this one again."""
        self.written = time.monotonic()
        self.drawn = -REDRAWN_SECONDS
        if self.live is not None:
            self.live.stop()

    def end(self) -> None:
        """Leave the terminal as it was."""
        self.ended.set()
        self.clear()

    # ---- how it is shown ---------------------------------------------------------------------------------------------

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
        """Write the line whenever nothing was written for half a minute."""
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
    """Say what is done until the end of a block; arguments as of `Signs`.

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
