"""Two runs are never at work in one folder; a process that was killed leaves no lock behind."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tiny_training import recipe, trainer
from vitrim.errors import VitrimError
from vitrim.training.run_folder import LOCK, only_run


class Another:
    """A process that holds the lock of a folder, until it is told to end. Forked, as importing takes longer than all
    else; it touches nothing but files.

    Args:
        folder: of a run.
        with_a_child: it has started a process of its own, as one that reads images has.
    """

    def __init__(self, folder: Path, *, with_a_child: bool = False) -> None:
        until, self.until = os.pipe()
        self.told, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.close(self.until)
                with only_run(folder):
                    started = with_a_child and os.fork() == 0
                    if started or not with_a_child:  # the last one to be there: a lock is let go of behind a fork
                        os.write(told, b"!")
                    if started:
                        time.sleep(600)
                        os._exit(0)
                    os.read(until, 1)  # a pipe, which ends when its writer does
            finally:
                os._exit(0)
        os.close(until)
        os.close(told)
        assert os.read(self.told, 1) == b"!"

    def end(self) -> None:
        os.close(self.until)
        os.waitpid(self.pid, 0)
        os.close(self.told)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end()


def test_another_process_is_refused_until_this_one_ends_and_changes_nothing(images: Path, tmp_path: Path) -> None:
    """By the lock itself, and by a run."""
    out = tmp_path / "new"
    process = Another(out)
    with (
        pytest.raises(VitrimError, match=f"process {process.pid} on .* is at work in .*new: wait for it"),
        only_run(out),
    ):
        pass
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(VitrimError, match="is at work in"):
        trainer(recipe(), images, out).run()
    assert sorted(path.name for path in out.iterdir()) == before
    process.end()
    with only_run(out):
        assert str(os.getpid()) in (out / LOCK).read_text()
    assert not (out / LOCK).exists()
    trainer(recipe(), images, out, max_updates=1).run()


def test_a_killed_process_leaves_no_lock_though_one_that_it_started_lives_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    process = Another(out, with_a_child=True)
    try:
        process.kill()
        assert (out / LOCK).exists()
        with only_run(out):
            pass
    finally:
        os.killpg(process.pid, signal.SIGKILL)


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


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def without(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"), only_run(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()
