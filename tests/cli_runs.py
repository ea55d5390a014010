"""Runs the command ``vitrim`` as a user does, within this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from tempfile import TemporaryFile
from typing import Any

import pytest
import typer

from full_matrix import FULL_MATRIX
from vitrim import cli

Run = Callable[..., tuple[int, str, str]]
"""Exit code, standard output and standard error of ``vitrim`` with the given arguments."""


@cache
def built() -> Any:
    """The command that typer makes of all functions: for every call anew it takes as long as most calls do."""
    return typer.main.get_command(cli.app)


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``vitrim`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["vitrim", *map(str, arguments)])
    if isinstance(cli.app, typer.Typer):  # and nothing that a test put in its place
        monkeypatch.setattr(cli, "app", built())
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def in_two_processes(*arguments: object) -> str:
    """The standard output of Python with these arguments, started twice, on the CPU with gloo.

    With the variables that torchrun and ``accelerate launch`` set. The launcher itself, which imports torch once more,
    starts them in `make test-full`; there ``--multi_gpu`` is what makes it start several processes. A command needs
    ``--device cpu``, too.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    if FULL_MATRIX:
        launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
        done = subprocess.run([sys.executable, *launch, *command[1:]], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(command, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, stdout=out, stderr=errors)
            for rank in ("0", "1")
        ]
        while None in (codes := [process.poll() for process in processes]):
            if any(codes):  # the other one would wait for it
                for process in processes:
                    process.kill()
            time.sleep(0.05)
        for file in (out, errors):
            file.seek(0)
        assert codes == [0, 0], errors.read()
        return out.read()


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> Run:
    """Runs ``vitrim``, or the given command of it, with the arguments it is called with."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *command, *arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call
