"""The log of a run: a CSV file of updates, a JSON lines file of evaluations, and accelerate's trackers.

The files are the record: on resume, rows after the checkpoint are dropped, so each reads as if the run had not been
interrupted.
"""

from __future__ import annotations

import csv
import json
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

from vitrim.errors import VitrimError, check_known, first_line, not_installed
from vitrim.files import json_text, replaced, whole_lines
from vitrim.weights import EVALUATIONS, UPDATES

TENSORBOARD = "tensorboard"
PROJECT = "vitrim"
"""Name of trackers' project."""


class Log:
    """The log files of a run; ``trackers`` of accelerate receive the same rows.

    A `VitrimError`, also of `update` and `evaluation`, if they cannot be written, or are damaged before their end,
    which a kill or a full disk may have truncated.

    Args:
        folder: None writes nothing, as in dry runs and all processes but the first.
        from_update: rows from this update on are dropped.
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
        """The update of a CSV row; -1 for the header."""
        cells = line.decode("utf-8").rstrip("\r").split(",")
        if self.columns is None:
            self.columns = cells
            return -1
        if len(cells) != len(self.columns):
            raise ValueError(f"expected {len(self.columns)} cells, got {len(cells)}")
        # A number that was cut off is no row: `float` refuses it, and an empty cell is a missing number.
        for cell in cells:
            float(cell or "nan")
        return int(dict(zip(self.columns, cells, strict=True)).get("update", -1))

    def update(self, row: dict[str, float]) -> None:
        """Write the numbers of update ``row["update"]``."""
        if self.folder is None:
            return
        path = self.folder / UPDATES
        # Names of losses are known with the first update only.
        if self.columns is None:  # the file has no header, and thus nothing
            self.columns = list(row)
            with writing(path):
                path.write_text(",".join(self.columns) + "\n", encoding="utf-8")
        with writing(path), path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, extrasaction="ignore").writerow(row)
        self._track("train", row)

    def evaluation(self, row: dict[str, Any]) -> None:
        """Write the numbers of the evaluation after update ``row["update"]``."""
        if self.folder is None:
            return
        path = self.folder / EVALUATIONS
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json_text(row) + "\n")
        self._track("evaluation", row)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.finish()

    def _track(self, tag: str, row: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "update"}
        for tracker in self.trackers:
            tracker.log({f"{tag}/{name}": value for name, value in numbers.items()}, step=row["update"])


def _evaluation_of(line: bytes) -> int:
    """The update of a line of evaluations."""
    row = json.loads(line)
    if not isinstance(row, dict) or type(row.get("update")) is not int:
        raise ValueError("expected an object with the number of an update")
    return cast(int, row["update"])


def _keep(path: Path, update_of: Callable[[bytes], int], last: int) -> None:
    """Drop the lines after update ``last`` from a file, if it exists."""
    if path.exists():
        lines, _ = whole_lines(path, lambda line: (update_of(line), line))
        with replaced(path) as beside:
            beside.write_bytes(b"".join(line + b"\n" for update, line in lines if update <= last))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a one-line `VitrimError`, which mentions resuming, for an `OSError` on ``path``."""
    try:
        yield
    except OSError as error:
        why = error.strerror or first_line(error)
        raise VitrimError(f"cannot write to {path}: {why}; a run that was saved can be resumed") from error


# ---- accelerate's trackers -------------------------------------------------------------------------------------------


def check_trackers(trackers: Iterable[str | GeneralTracker]) -> None:
    """Refuse trackers that accelerate does not know, or whose package is not installed.

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
            raise not_installed("logging", name)  # its package may have another name, which accelerate knows


def start_trackers(
    trackers: Iterable[str | GeneralTracker], folder: Path, *, from_update: int, values: Mapping[str, Any]
) -> list[GeneralTracker]:
    """Start the trackers of a run, each once, for files in ``folder``. Only the first process calls this."""
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
        tracker.store_init_configuration(simple)  # lists and null as text, which all trackers accept
        started.append(tracker)
    return started
