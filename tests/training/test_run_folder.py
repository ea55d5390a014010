"""Two runs are never at work in one folder; a process that was killed leaves no lock behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tiny_training import recipe, trainer
from vitrim.errors import VitrimError
from vitrim.training.run_folder import LOCK, only_run

HOLD = """
import os, sys, time
from pathlib import Path
from vitrim.training.run_folder import only_run
with only_run(Path(sys.argv[1])):
    if len(sys.argv) > 2 and not os.fork():  # as a process that reads images
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), *more], start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_another_process_is_refused_until_this_one_ends_and_changes_nothing(images: Path, tmp_path: Path) -> None:
    """By the lock itself, and by a run."""
    out = tmp_path / "new"
    with another(out) as process:
        with (
            pytest.raises(
                VitrimError, match=f"process {process.pid} on .* is at work in .*new: wait for it"
            ) as refused,
            only_run(out),
        ):
            pass
        assert "\n" not in str(refused.value)
        before = sorted(path.name for path in out.iterdir())
        with pytest.raises(VitrimError, match="is at work in"):
            trainer(recipe(), images, out).run()
        assert sorted(path.name for path in out.iterdir()) == before
        process.communicate("")
        with only_run(out):
            assert str(os.getpid()) in (out / LOCK).read_text()
    assert not (out / LOCK).exists()
    trainer(recipe(), images, out, max_updates=1).run()


def test_a_killed_process_leaves_no_lock_though_one_that_it_started_lives_on(tmp_path: Path) -> None:
    with another(tmp_path, "fork") as process:
        process.kill()
        process.wait()
        assert (tmp_path / LOCK).exists()
        with only_run(tmp_path):
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
