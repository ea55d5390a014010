"""Runs the command ``vitrim`` as a user does, within this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from vitrim.cli import main

Run = Callable[..., tuple[int, str, str]]
"""Exit code, standard output and standard error of ``vitrim`` with the given arguments."""


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``vitrim`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["vitrim", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def in_two_processes(*arguments: object) -> str:
    """The standard output of Python with these arguments, started twice by accelerate, on the CPU with gloo.

    ``--multi_gpu`` is what makes it start several processes; a command needs ``--device cpu``, too.
    """
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run(
        [sys.executable, *launch, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> Run:
    """Runs ``vitrim``, or the given command of it, with the arguments it is called with."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *command, *arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call
