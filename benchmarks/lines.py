"""Rows of a long measurement in a file, one JSON text per line: one that was stopped goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrim.errors import VitrimError
from vitrim.files import write_text

Row = dict[str, Any]


class Lines:
    """Rows by their key, kept in a file as soon as they are made.

    The first line holds the settings that all rows share (threads, rounds, device, ...). A file of other settings is
    refused: its rows could not stand beside new ones. A last line that was cut off is measured again.

    Args:
        path: the file, made if it is not there; None keeps rows in memory only.
        settings: what all rows share.
        keys: the fields that tell rows apart.
        again: forget the rows that say why they have no numbers ("skipped", "failed"), so that they are tried anew.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], keys: Sequence[str], again: bool = False
    ) -> None:
        self.path = path
        self.keys = tuple(keys)
        self.rows: list[Row] = []
        if path is None:
            return
        if path.exists():
            self._read(path, settings)
            if again:
                self._forget(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": dict(settings)}) + "\n", encoding="utf-8")

    def _read(self, path: Path, settings: Mapping[str, Any]) -> None:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        lines = [json.loads(line) for line in whole.splitlines()]
        before = lines[0].get("settings") if lines else None
        if before != json.loads(json.dumps(dict(settings))):
            raise VitrimError(f"{path} was measured with {before}, not with {dict(settings)}: name another file")
        self.rows = lines[1:]

    def _forget(self, path: Path) -> None:
        first = path.read_text(encoding="utf-8").splitlines()[0]
        self.rows = [row for row in self.rows if "skipped" not in row and "failed" not in row]
        write_text(path, "\n".join([first, *map(json.dumps, self.rows)]) + "\n")

    def key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The entries that tell a row apart."""
        return tuple(row.get(name) for name in self.keys)

    def find(self, **key: Any) -> Row | None:
        """The row of this key; None if it is still to be measured."""
        wanted = self.key(key)
        return next((row for row in self.rows if self.key(row) == wanted), None)

    def once(self, key: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> Row:
        """The row of this key, measured by ``make`` unless it is there."""
        found = self.find(**key)
        return self.add({**key, **make()}) if found is None else found

    def add(self, row: Row) -> Row:
        """Keep a row, on disk before anything else happens."""
        self.rows.append(row)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return row
