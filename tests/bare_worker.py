"""Run commands in one process that has nothing of vitrim's extras: ``python bare_worker.py PACKAGES COMMANDS``.

Both are JSON: the names of modules and of distributions that are hidden, and a list of arguments for every run of the
command line. Writes JSON to standard output: for each run its exit code and what it printed on standard output and
standard error; a traceback is there, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any


class Without:
    """A finder of modules and of distributions, to which some are not installed."""

    def __init__(self, finder: Any, names: Sequence[str]) -> None:
        self.finder, self.names = finder, {name.lower().replace("-", "_") for name in names}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        hidden = name.partition(".")[0].lower() in self.names
        return None if hidden else self.finder.find_spec(name, path, target)

    def find_distributions(self, *context: Any) -> Iterator[Any]:
        for found in getattr(self.finder, "find_distributions", lambda *_: ())(*context):
            if str(found.metadata["Name"]).lower().replace("-", "_") not in self.names:
                yield found


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``vitrim ARGUMENTS``."""
    from vitrim import cli

    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = ["vitrim", *arguments]
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            code = 1
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    hidden, commands = (json.loads(text) for text in sys.argv[1:])
    sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]
    print(json.dumps([run(command) for command in commands]))
