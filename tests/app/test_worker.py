"""The process that runs models: one user's job that hangs or kills it is that user's error alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vitrim.app.worker import Worker
from vitrim.errors import VitrimError


class Small:
    """A service without torch, so that its process starts at once."""

    def offers(self) -> list[str]:
        return ["small"]

    def pid(self) -> int:
        return os.getpid()

    def twice(self, number: int) -> int:
        if number < 0:
            raise VitrimError(f"{number} is below zero")
        return 2 * number

    def load(self, seconds: float) -> None:
        time.sleep(seconds)

    def hang(self) -> None:
        time.sleep(60)

    def die(self) -> None:
        os._exit(1)

    def fail(self) -> None:
        raise KeyError("a defect\nof two lines")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr("vitrim.app.worker.GRACE", 0.4)
    with Worker(Small, seconds=0.1) as started:
        yield started


def test_jobs_and_refusals(worker: Worker) -> None:
    assert worker.offers == ["small"]
    assert worker.call("twice", 4) == 8
    with pytest.raises(VitrimError, match="-1 is below zero"):
        worker.call("twice", -1)
    with pytest.raises(VitrimError, match="the model failed: 'a defect"):
        worker.call("fail")
    assert worker.call("pid") != os.getpid()


def test_what_comes_first_may_take_as_long_as_a_start(worker: Worker) -> None:
    assert worker.offers == ["small"]
    before = worker.call("pid")
    assert worker.call("twice", 4, first=("load", 0.8)) == 8  # beyond the limit of a job and its grace
    assert worker.call("pid") == before


def test_a_model_that_never_loads_is_not_a_matter_of_its_settings(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.offers == ["small"]
    monkeypatch.setattr("vitrim.app.worker.START_SECONDS", 0.2)
    with pytest.raises(VitrimError, match=r"more than 0\.2 s and was ended: models must load in that time"):
        worker.call("twice", 4, first=("load", 60.0))


def test_users_at_once_get_their_own_answers(worker: Worker) -> None:
    with ThreadPoolExecutor(8) as users:
        assert list(users.map(lambda number: worker.call("twice", number), range(40))) == list(range(0, 80, 2))


@pytest.mark.parametrize(("job", "message"), [("hang", "more than 0.1 s"), ("die", "ended the process")])
def test_the_next_job_runs_in_a_new_process(job: str, message: str, worker: Worker) -> None:
    before = worker.call("pid")
    with pytest.raises(VitrimError, match=message):
        worker.call(job)
    assert worker.call("twice", 3) == 6
    assert worker.call("pid") != before


def test_the_process_ends_with_its_server() -> None:
    with Worker(Small) as worker:
        process = worker.process
        assert process is not None
        assert process.is_alive()
    assert process.exitcode is not None or worker.process is None
