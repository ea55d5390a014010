"""Finished units of work in a file, one JSON line each: a command that was stopped continues where it stopped.

The first unit is the settings, with digests of everything that decides a number (`vitrim.measure.identity`). No line
differs between two runs, so the file of a resumed run equals that of an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vitrim.errors import VitrimError, os_errors
from vitrim.files import check_file, whole_lines
from vitrim.measure.identity import first_difference
from vitrim.measure.records import Processes

FORMAT = 1

SETTINGS = "settings"
"""Name of the first unit."""

TOGETHER = 8
"""Most units that are measured in one call, and then written."""

Value = TypeVar("Value")


class Store:
    """Values by the name of a unit, on disk as soon as they are measured.

    Args:
        file: JSON lines, made with the first unit; None keeps units in memory.
        settings: everything that decides the numbers; a file of other settings is refused.
        resume: continue from the file, if it exists, which else must not.
        processes: this process and its peers. The first one reads and writes, and all know the units.

    Example:
        >>> store = Store(None)
        >>> store.value("milliseconds", lambda: 12.5), store.value("milliseconds", lambda: 13.0)
        (12.5, 12.5)
    """

    def __init__(
        self,
        file: Path | None,
        settings: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        processes: Processes | None = None,
    ) -> None:
        self.file, self.processes = file, processes or Processes()
        self._settings = {"format": FORMAT, **json.loads(json.dumps(settings or {}))}
        units: dict[str, Any] = {}
        refusal: VitrimError | None = None
        if self.processes.index == 0 and file is not None:
            try:
                units = self._read(file, resume=resume)
            except VitrimError as error:
                refusal = error
        # All processes must learn of a refusal, or they would wait for the first one forever.
        self._units, refused = self.processes.gather((units, str(refusal) if refusal else None))[0]
        if refused is not None:
            raise refusal or VitrimError(refused)
        # Units of the file that this run has not come to: while there are some, it repeats what the file has.
        self._unread = set(self._units)

    def _read(self, file: Path, *, resume: bool) -> dict[str, Any]:
        """The units of a file. An incomplete last line, left by an interruption, is removed from it."""
        check_file(file)
        if not file.exists():
            return {}
        if not resume:
            raise VitrimError(f"{file} is there already: resume it (--resume), or name another folder (--out)")
        # A kill may cut the last line: it is measured again.
        units, size = whole_lines(file, _parsed)
        if file.stat().st_size and (not units or units[0][0] != SETTINGS):
            raise VitrimError(f"{file}, line 1, is damaged: it has no settings")
        other = first_difference(units[0][1], self._settings) if units else None
        if other is not None:
            name, theirs, ours = other
            raise VitrimError(f"{file} is of another run: its {name} is {theirs}, and this one's {ours}")
        if size < file.stat().st_size:
            with os_errors(f"cannot write {file}"):
                os.truncate(file, size)
        return dict(units[1:])

    def values(
        self, names: Sequence[str], measure: Callable[[Sequence[int]], Sequence[Any]], *, together: bool = False
    ) -> list[Any]:
        """The values of units of different ``names``, as JSON has them.

        ``measure`` is called with the places of those that are not in the file, `TOGETHER` at a time, and returns their
        values. ``together``: all processes call it, which returns the same for all; otherwise the first one does.
        """
        missing = [place for place, name in enumerate(names) if name not in self._units]
        for start in range(0, len(missing), TOGETHER):
            places = missing[start : start + TOGETHER]
            made = measure(places) if together or self.processes.index == 0 else None
            made = made if together else self.processes.gather(made)[0]
            # Through JSON: a value just measured must equal the same one read from the file.
            units = {names[place]: json.loads(json.dumps(one)) for place, one in zip(places, made or (), strict=True)}
            self._append(units)
            self._units |= units
        self._unread.difference_update(names)
        return [self._units[name] for name in names]

    def value(self, name: str, measure: Callable[[], Value], *, together: bool = False) -> Value:
        """The value of one unit, see `values`."""
        value: Value = self.values([name], lambda _: [measure()], together=together)[0]
        return value

    def ended(self, name: str, over: Callable[[], bool]) -> bool:
        """True if the work ends here: as in the run that wrote the file or, after its end, if ``over()`` says so."""
        if name not in self._units:
            if self._unread:  # the run that wrote the file went on from here
                return False
            if not self.processes.gather(self.processes.index == 0 and over())[0]:
                return False
        return self.value(name, lambda: True)

    def _append(self, units: Mapping[str, Any]) -> None:
        if self.file is None or self.processes.index > 0:
            return
        with os_errors(f"cannot write {self.file}"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as log:
                head = {SETTINGS: self._settings} if log.tell() == 0 else {}
                for name, value in {**head, **units}.items():
                    # A checksum in every line: a line that was cut or edited is seen as such.
                    log.write(json.dumps({"unit": name, "value": value, "sum": _sum(name, value)}) + "\n")
                log.flush()
                os.fsync(log.fileno())


def _parsed(line: bytes) -> tuple[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or set(row) != {"unit", "value", "sum"}:
        raise ValueError("it is no finished unit")
    if row["sum"] != _sum(row["unit"], row["value"]):
        raise ValueError("its content has changed since it was written")
    return row["unit"], row["value"]


def _sum(name: str, value: Any) -> str:
    return f"{zlib.crc32(json.dumps([name, value]).encode()):08x}"
