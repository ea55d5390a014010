"""Processes that do not outlive a run of the tests, however that ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

GUARD = """
import contextlib, os, signal, sys
sys.stdin.read()  # ends when the process at the other end closes it, or is gone
with contextlib.suppress(ProcessLookupError):
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], out: Any, patience: float = 60
) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes ``out``; it ends with the block, and so do its children.

    They are asked to, and killed after ``patience`` seconds; at once, if this process is itself killed in the block.
    """
    run = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    guard = subprocess.Popen([sys.executable, "-c", GUARD, str(run.pid)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield run
    finally:
        run.terminate()
        with suppress(subprocess.TimeoutExpired):
            run.wait(timeout=patience)
        guard.communicate()
        run.wait()
