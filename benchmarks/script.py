"""Runs a measurement from the shell: bad input is one line on standard error and exit code 2, as with `vitrim`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from vitrim.errors import VitrimError, one_line


def from_shell(main: Callable[[], object]) -> None:
    """Call ``main``; a `VitrimError` ends the process with its message alone, any other is a defect and is raised."""
    try:
        main()
    except VitrimError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
