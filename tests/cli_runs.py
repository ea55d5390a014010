"""Runs the command ``vitrim`` as a user does, within this process."""

from __future__ import annotations

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


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> Run:
    """Runs ``vitrim``, or the given command of it, with the arguments it is called with."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *command, *arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call
