"""``vitrim app``: what it refuses before it serves anything. The page itself: tests/app."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from cli_runs import Run, refused, runner
from vitrim import errors


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "app", "--no-browser")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one.getsockname()[1]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here gets as far as to need gradio."""
    find = importlib.util.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: name if name == "gradio" else find(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "'--port'"),
        (["--host", "203.0.113.7"], "cannot serve at 203.0.113.7:7860"),
        (
            ["test_vit", "test_vit2", "--checkpoint", "x.pth"],
            "a checkpoint has the weights of one model, and sev",
        ),
        (["tset_vit"], "unknown model 'tset_vit'"),
    ],
)
def test_refusals(arguments: list[Any], message: str, run: Run) -> None:
    refused(run, message, *arguments)


def test_a_port_that_is_taken(taken: int, run: Run) -> None:
    code, _, error = run("--port", taken)
    assert code == 2
    assert f"cannot serve at 127.0.0.1:{taken}: Address already in use; choose another host or port" in error
