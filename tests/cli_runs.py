"""Runs the command ``vitrim`` as a user does, within this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
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


FORKED = """
import os, runpy, signal, sys
from functools import partial
what, *given = sys.argv[1:]
if what == "-m":
    what, *given = given
    run = partial(runpy.run_module, what, alter_sys=True)
else:
    sys.path[0] = os.path.dirname(what)
    run = partial(runpy.run_path, what)
run(run_name="imported")
sys.argv = [what, *given]
running = set()
for rank in ("0", "1"):
    child = os.fork()
    if not child:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        run(run_name="__main__")
        sys.exit()
    running.add(child)
failed = False
while running:
    child, status = os.wait()
    running.remove(child)
    if status and not failed:  # the other one would wait for it
        failed = True
        for other in running:
            os.kill(other, signal.SIGKILL)
sys.exit(failed)
"""
"""Runs a script, or a module, in two processes that are forked when all that it imports is there."""


def in_two_processes(*arguments: object) -> str:
    """The standard output of Python with these arguments, in two processes, on the CPU with gloo.

    With the variables that torchrun and ``accelerate launch`` set. The launcher itself starts them in `make test-full`;
    it imports torch once more, and each process does; there ``--multi_gpu`` is what makes it start several processes. A
    command needs ``--device cpu``, too.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if FULL_MATRIX:
        start = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        start += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    else:
        start = ["-c", FORKED]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, *start, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> Run:
    """Runs ``vitrim``, or the given command of it, with the arguments it is called with."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *command, *arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def succeeded(run: Run, *arguments: object) -> str:
    """The standard output of the command, which exits with 0."""
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def refused(run: Run, message: str, *arguments: object) -> None:
    """The command prints nothing, exits with 2, and says ``message`` in one short line."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) < 600
    assert message in err
