"""Signs of life: one line on a terminal, and elsewhere a line now and then, also where a command says nothing new."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from vitrim import progress as signs_of_life
from vitrim.progress import progress


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until something holds; a test that waits in vain fails."""
    until = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Standard error so far, which is no terminal, with lines every few milliseconds."""
    monkeypatch.setattr(signs_of_life, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(signs_of_life, "SECONDS_BETWEEN_LINES", 0.01)
    parts: list[str] = []

    def text() -> str:
        parts.append(capsys.readouterr().err)
        return "".join(parts)

    return text


def test_lines_come_by_themselves_and_say_what_is_being_done(said: Callable[[], str]) -> None:
    with progress("loading some_model") as signs:
        wait_for(lambda: said().count("\n") > 2)
        signs.tell("making dense ready, 3 of 10")
        wait_for(lambda: "3 of 10" in said())
        signs.move(120, 200)
        wait_for(lambda: "of 200 images" in said())
    first, *others = said().splitlines()
    assert first == "loading some_model"
    assert re.fullmatch(r"\[0:00:\d\d\] loading some_model", others[0])
    assert {line.partition("] ")[2] for line in others} == {
        "loading some_model",
        "making dense ready, 3 of 10",
        "120 of 200 images",
    }
    written = said()
    time.sleep(0.05)
    assert said() == written  # nothing comes after the end


def test_what_is_done_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("loading some_model") as signs:
        signs.tell("making dense ready, 1 of 1")
    assert capsys.readouterr().err == ""


def test_other_lines_are_signs_of_life_too(said: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "SECONDS_BETWEEN_LINES", 3600.0)
    out = Console(file=io.StringIO(), width=40)
    with progress("loading", "updates", out) as signs:
        wait_for(lambda: out.file.getvalue() == "loading\n")
        begun = signs.written
        signs.say("evaluation: top-1 50")
        signs.move(1, 2, more="; loss 0.5")
        assert out.file.getvalue() == "loading\nevaluation: top-1 50\n"
        assert signs.text == "1 of 2 updates; loss 0.5"
        assert begun is not None
        assert signs.written is not None
        assert signs.written > begun


def test_one_line_is_drawn_on_a_terminal_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_of_life, "REDRAWN_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with progress("loading some_model") as signs:
        assert "loading some_model" in err.getvalue()  # at once
        signs.tell("x" * 500)
        assert "x" * 60 not in err.getvalue()  # no more than a line
        signs.move(120, 200, "a line that stays")
        assert "120 of 200 images" in err.getvalue()
        assert "a line that stays\n" in err.getvalue()
        signs.clear()
        print("a result")
        print("warning: something", file=sys.stderr)
        signs.tell("round 2, 40 %")
    assert out.getvalue() == "a result\n"
    assert "warning: something" in err.getvalue()
    last = err.getvalue().rpartition("round 2, 40 %")[2]
    assert "\x1b[2K" in last  # the line is erased
    assert sys.stderr is err


def test_only_the_first_process_says_something(said: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress("loading") as signs:
        signs.move(1, 2, "a line")
        time.sleep(0.03)
    assert said() == ""
