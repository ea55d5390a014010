"""Kills a run of `vitrim train` in the middle, as a machine that fails would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from vitrim.training import checkpoint

SECONDS = 300  # far more than it takes where the cores are free


def killed(recipe: Path, data: Path, out: Path) -> None:
    """Start a run in a process of its own, and end it by SIGKILL at whatever update it is with two checkpoints."""
    command = [sys.executable, "-m", "vitrim", "train", str(recipe), "--data", str(data), "--out", str(out)]
    command += ["--device", "cpu", "--threads", "1", "--save-minutes", "0", "--log-every", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS
    while len(list((out / "checkpoints").glob("update-*"))) < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.latest(out / "checkpoints") is not None
