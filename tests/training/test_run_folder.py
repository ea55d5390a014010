"""Two runs are never at work in one folder; a process that was killed leaves no lock behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tiny_training import recipe, trainer
from vitrim.errors import VitrimError
from vitrim.training.run_folder import LOCK, only_run

HOLD = """
import json, os, signal, sys, time
from pathlib import Path
from vitrim.training.run_folder import only_run
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
for line in sys.stdin:
    folder, until, more = json.loads(line)
    if os.fork():
        continue
    with only_run(Path(folder)):
        if more and not os.fork():  # as a process that reads images
            time.sleep(600)
            os._exit(0)
        print(os.getpid(), flush=True)
        Path(until).read_text()  # a pipe, which ends when its writer does
    os._exit(0)
"""
"""Starts a process for each line that it reads; the lock is held until the pipe of that line ends."""
SECONDS = 60  # far more than it takes where the cores are free


class Another:
    """A process that holds the lock of a folder."""

    def __init__(self, holder: subprocess.Popen[str], folder: Path, *, with_a_child: bool = False) -> None:
        assert holder.stdin is not None
        assert holder.stdout is not None
        pipe = folder.with_name("until")
        os.mkfifo(pipe)
        print(json.dumps([str(folder), str(pipe), with_a_child]), file=holder.stdin, flush=True)
        self.pid = int(holder.stdout.readline())
        self.until = pipe.open("w")

    def end(self) -> None:
        self.until.close()
        self._wait()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._wait()
        self.until.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + SECONDS
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(self.pid, 0)
                time.sleep(0.01)
            pytest.fail("the process did not end")


@pytest.fixture(scope="module")
def holder() -> Iterator[subprocess.Popen[str]]:
    """What starts such processes: importing once takes longer than all else."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD], start_new_session=True, **pipes)  # type: ignore[call-overload]
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_another_process_is_refused_until_this_one_ends_and_changes_nothing(
    holder: subprocess.Popen[str], images: Path, tmp_path: Path
) -> None:
    """By the lock itself, and by a run."""
    out = tmp_path / "new"
    process = Another(holder, out)
    with (
        pytest.raises(VitrimError, match=f"process {process.pid} on .* is at work in .*new: wait for it") as refused,
        only_run(out),
    ):
        pass
    assert "\n" not in str(refused.value)
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(VitrimError, match="is at work in"):
        trainer(recipe(), images, out).run()
    assert sorted(path.name for path in out.iterdir()) == before
    process.end()
    with only_run(out):
        assert str(os.getpid()) in (out / LOCK).read_text()
    assert not (out / LOCK).exists()
    trainer(recipe(), images, out, max_updates=1).run()


def test_a_killed_process_leaves_no_lock_though_one_that_it_started_lives_on(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    Another(holder, out, with_a_child=True).kill()
    assert (out / LOCK).exists()
    with only_run(out):
        pass


def test_two_runs_of_one_process(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = (trainer(recipe(), images, out, max_updates=2) for _ in range(2))
    step = first._step

    def meanwhile(batches: Any, update: int) -> dict[str, float]:
        with pytest.raises(VitrimError, match="another run of this process is at work"):
            second.run()
        return step(batches, update)

    first._step = meanwhile
    first.run()
    with pytest.raises(VitrimError, match=r"another run has just been at work in .*: start this one again"):
        second.run()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["update-00000002"]
    assert not (out / LOCK).exists()


def test_a_finished_run_is_not_overwritten_by_one_that_was_set_up_before(images: Path, tmp_path: Path) -> None:
    first, second = (trainer(recipe(epochs=1), images, tmp_path) for _ in range(2))
    first.run()
    weights = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(VitrimError, match="another run has just been at work"):
        second.run()
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def without(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"), only_run(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()
