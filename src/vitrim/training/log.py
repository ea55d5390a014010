"""The log of a run: rows of updates (CSV), of evaluations (JSON lines), accelerate's trackers, and the progress bar.

The files are the record: on resume the rows after the checkpoint are dropped, and each reads as if the run had never
been stopped. Trackers (TensorBoard and others) are handed the same numbers, and do with them what they do.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    filter_trackers,
    get_available_trackers,
)
from accelerate.utils import LoggerType
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vitrim.errors import MissingPackageError, VitrimError, check_known, first_line
from vitrim.files import json_text, replaced, whole_lines
from vitrim.weights import EVALUATIONS, UPDATES

TENSORBOARD = "tensorboard"
SECONDS_BETWEEN_LINES = 30.0
"""Of progress where there is no terminal."""
PROJECT = "vitrim"
"""The project under which trackers file a run."""


class Log:
    """The files of a run.

    Args:
        folder: where they go; None writes nothing (other processes than the first, dry runs).
        from_update: rows from this update on are dropped.

    Attributes:
        trackers: of accelerate (`start_trackers`); they get what the files get.

    Raises:
        VitrimError: the folder or a file in it cannot be written, also raised by `update` and `evaluation`; or a file
            is damaged before its end, which a kill or a full disk may have cut short.
    """

    def __init__(self, folder: Path | None, *, from_update: int = 0) -> None:
        self.folder = folder
        self.trackers: list[GeneralTracker] = []
        self.columns: list[str] | None = None
        if folder is None:
            return
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            updates, evaluations = folder / UPDATES, folder / EVALUATIONS
            _keep(updates, self._update_of, from_update - 1)
            _keep(evaluations, _evaluation_of, from_update)
        if self.columns is not None and "update" not in self.columns:
            raise VitrimError(f"{updates}, line 1, is damaged: it names no column 'update'")

    def _update_of(self, line: bytes) -> int:
        """The number of the update of a row of numbers; -1 of the header."""
        cells = line.decode("utf-8").rstrip("\r").split(",")
        if self.columns is None:
            self.columns = cells
            return -1
        if len(cells) != len(self.columns):
            raise ValueError(f"expected {len(self.columns)} cells, got {len(cells)}")
        for cell in cells:
            float(cell or "nan")
        return int(dict(zip(self.columns, cells, strict=True)).get("update", -1))

    def update(self, row: dict[str, float]) -> None:
        """Write the numbers of an update; ``row["update"]`` says which."""
        if self.folder is None:
            return
        path = self.folder / UPDATES
        if self.columns is None:
            self.columns = list(row)
            if not path.exists() or not path.stat().st_size:
                with writing(path):
                    path.write_text(",".join(self.columns) + "\n", encoding="utf-8")
        with writing(path), path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, extrasaction="ignore").writerow(row)
        self._track("train", row)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write the numbers of an evaluation; ``row["update"]`` says after which update."""
        if self.folder is None:
            return
        path = self.folder / EVALUATIONS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json_text(row) + "\n")
        self._track("evaluation", row)

    def close(self) -> None:
        """Finish the trackers."""
        for tracker in self.trackers:
            tracker.finish()

    def _track(self, tag: str, row: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "update"}
        for tracker in self.trackers:
            tracker.log({f"{tag}/{name}": value for name, value in numbers.items()}, step=row["update"])


def _evaluation_of(line: bytes) -> int:
    """The number of the update after which a line of evaluations was written."""
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("update")) is not int:
        raise ValueError("expected an object with the number of an update")
    return cast(int, row["update"])


def _keep(path: Path, update_of: Callable[[bytes], int], last: int) -> None:
    """Drop the lines of a file, if there is one, behind those of the update ``last``."""
    if path.exists():
        lines, _ = whole_lines(path, lambda line: (update_of(line), line))
        with replaced(path) as beside:
            beside.write_bytes(b"".join(line + b"\n" for update, line in lines if update <= last))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report in one line that ``path`` cannot be written, and how to continue.

    Raises:
        VitrimError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or first_line(error)
        raise VitrimError(f"cannot write to {path}: {why}; a run that was saved can be resumed") from error


# ---- trackers of accelerate: which there are, and what they are called and given, is accelerate's --------------------


def check_trackers(trackers: Iterable[str | GeneralTracker]) -> None:
    """Refuse names of trackers that accelerate does not know, or whose package is not installed.

    Raises:
        VitrimError: no such tracker, with the nearest one.
        MissingPackageError: its package is not installed.

    Example:
        >>> check_trackers(["tensorbord"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        vitrim.errors.VitrimError: unknown tracker 'tensorbord'; did you mean 'tensorboard'? valid: aim, ...
    """
    missing = {str(kind) for kind in LoggerType} - {str(kind) for kind in get_available_trackers()}
    for name in trackers:
        if isinstance(name, GeneralTracker):
            continue
        check_known("tracker", name, LOGGER_TYPE_TO_CLASS)
        if name in missing:
            raise MissingPackageError(f"logging with {name} needs its package: pip install {name}")


def start_trackers(
    trackers: Iterable[str | GeneralTracker], folder: Path, *, from_update: int, values: Mapping[str, Any]
) -> list[GeneralTracker]:
    """Start trackers for a run, each once. Only the first process calls it.

    Args:
        trackers: names that `check_trackers` has let through, or trackers of one's own.
        folder: where those that write files put them.
        from_update: where TensorBoard, which can, drops what a run wrote before it was stopped.
        values: what tells the run from others: the values of its recipe by dotted name.
    """
    started: list[GeneralTracker] = []
    for kind in filter_trackers(list(dict.fromkeys(trackers)), folder):
        if isinstance(kind, GeneralTracker):
            tracker = kind
        elif str(kind) == TENSORBOARD:
            tracker = TensorBoardTracker(TENSORBOARD, folder, purge_step=from_update)
        else:
            make = LOGGER_TYPE_TO_CLASS[str(kind)]
            tracker = make(PROJECT, *([folder] if make.requires_logging_directory else []))
        tracker.start()
        simple = {name: one if isinstance(one, str | int | float) else json.dumps(one) for name, one in values.items()}
        tracker.store_init_configuration(simple)  # lists and null as texts, which all trackers take
        started.append(tracker)
    return started


# ---- the progress bar ------------------------------------------------------------------------------------------------


class Bar:
    """The progress of a run: a bar with the time left on a terminal, a line now and then elsewhere.

    Args:
        console: where it is shown, or None for nowhere.
        start, stop: updates, the first and one beyond the last.
        images: images of an update.
    """

    def __init__(self, console: Console | None, start: int, stop: int, images: int) -> None:
        self.console, self.stop, self.images = console, stop, images
        self.last = time.monotonic()
        self.bar: Progress | None = None
        if console is not None and console.is_terminal:
            columns = (
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=console)
            self.bar.start()
            self.task = self.bar.add_task("", total=stop, completed=start)

    def advance(self, done: int, epoch: float, loss: float, images_per_second: float) -> None:
        """Show that ``done`` updates are done."""
        text = f"epoch {epoch:.2f}  loss {loss:.4f}  {images_per_second:.0f} images/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=text)
        elif self.console is not None and (time.monotonic() - self.last >= SECONDS_BETWEEN_LINES or done == self.stop):
            self.last = time.monotonic()
            minutes = round((self.stop - done) * self.images / max(images_per_second, 1e-9) / 60)
            left = f"{minutes // 60}:{minutes % 60:02d} h left"
            self.console.print(f"update {done}/{self.stop}  {text}  {left}", highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()
