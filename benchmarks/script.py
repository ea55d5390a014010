"""Runs a measurement from the shell, where bad input is one line and exit code 2, as with `vitrim`; its records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vitrim.errors import VitrimError, one_line
from vitrim.files import json_text, write_text


def write_json(target: str | Path | None, record: Mapping[str, Any]) -> None:
    """Write a record to a file, whole or not at all; for None, none."""
    if target is not None:
        write_text(Path(target), json_text(record, indent=2) + "\n")


def from_shell(main: Callable[[], object]) -> None:
    """Call ``main``; a `VitrimError` ends the process with its message alone, any other is a defect and is raised."""
    try:
        main()
    except VitrimError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


def at_speed(curve: Sequence[tuple[float, float]], speed: float) -> float | None:
    """The value at which a line through the points (value, speed) first reaches a speed; None: nowhere."""
    for (before, slow), (after, fast) in pairwise(curve):
        if slow <= speed <= fast:
            return before + (after - before) * (speed - slow) / (fast - slow)
    return None
