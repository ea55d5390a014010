"""Timing in turn, and the statistics of it, on a clock that the tests set."""

import numpy as np
import pytest
import torch

from vitrim.errors import VitrimError
from vitrim.measure import latency
from vitrim.measure.latency import (
    Budget,
    Latency,
    Speedup,
    fastest,
    images_per_second,
    paired_speedup,
    summarise,
    time_interleaved,
)


class Clock:
    """Stands in for `time`: a callable that "takes" some seconds moves it."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def perf_counter(self):
        return self.now

    def job(self, name, *seconds):
        """A callable that takes the given seconds in turn, then the last of them for ever."""
        remaining = list(seconds)

        def run():
            self.calls.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)
    return clock


# ---- timing


def test_candidates_run_in_turn_and_rounds_are_paired(clock):
    jobs = {"a": clock.job("a", 9.0, 1.0, 2.0, 3.0), "b": clock.job("b", 9.0, 0.5, 0.25)}
    times = time_interleaved(jobs, budget=Budget(min_rounds=3, min_seconds=0.0, warmup_rounds=1))
    assert [sorted(clock.calls[first : first + 2]) for first in range(0, 8, 2)] == [["a", "b"]] * 4
    assert list(times) == ["a", "b"]
    np.testing.assert_allclose(times["a"], [1000.0, 2000.0, 3000.0])  # the warm-up of 9 s is not among them
    np.testing.assert_allclose(times["b"], [500.0, 250.0, 250.0])


def test_every_round_has_an_order_of_its_own_that_no_other_run_changes(clock):
    """None has always the same one before it, whose memory it would find."""
    jobs = {name: clock.job(name, 1.0) for name in "abc"}
    budget = Budget(min_rounds=24, min_seconds=0.0, max_rounds=24, warmup_rounds=0)
    time_interleaved(jobs, budget=budget)
    orders = ["".join(clock.calls[first : first + 3]) for first in range(0, 72, 3)]
    assert len(set(orders)) > 4
    first, clock.calls = clock.calls, []
    time_interleaved(jobs, budget=budget)
    assert clock.calls == first


@pytest.mark.parametrize(
    ("budget", "rounds"),
    [
        (Budget(min_rounds=4, min_seconds=0.0), 4),
        (Budget(min_rounds=1, min_seconds=10.0), 5),  # a round takes 1 + 3 s, so 2 candidates need 5 for 20 s
        (Budget(min_rounds=7, min_seconds=10.0), 7),
        (Budget(min_rounds=1, min_seconds=10.0, max_rounds=3), 3),
        (Budget(min_rounds=1, min_seconds=float("inf"), max_rounds=2), 2),
    ],
)
def test_budget(clock, budget, rounds):
    times = time_interleaved({"a": clock.job("a", 1.0), "b": clock.job("b", 3.0)}, budget=budget)
    assert {name: len(values) for name, values in times.items()} == {"a": rounds, "b": rounds}
    assert len(clock.calls) == 2 * (rounds + budget.warmup_rounds)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_rounds": 0}, "min_rounds=0: must be at least 1"),
        ({"min_seconds": -1.0}, "min_seconds=-1.0: must be at least 0"),
        ({"warmup_rounds": -1}, "warmup_rounds=-1: must be at least 0"),
        ({"min_rounds": 9, "max_rounds": 8}, "max_rounds must be at least min_rounds, 9, got 8"),
    ],
)
def test_wrong_budgets(wrong, message):
    with pytest.raises(VitrimError, match=message):
        Budget(**wrong)


def test_nothing_to_time():
    with pytest.raises(VitrimError, match="nothing to time"):
        time_interleaved({})


def test_accelerator_work_is_waited_for_within_the_measured_time(clock, monkeypatch):
    """A kernel that is still running when the call returns counts for its own candidate, not for the next one."""
    pending = []
    devices = []

    def synchronize(device):
        devices.append(device)
        clock.now += sum(pending)
        pending.clear()

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    jobs = {"short": lambda: pending.append(1.0), "long": lambda: pending.append(5.0)}
    times = time_interleaved(jobs, "cuda:1", Budget(min_rounds=2, min_seconds=0.0, warmup_rounds=1))
    np.testing.assert_allclose(times["short"], [1000.0, 1000.0])
    np.testing.assert_allclose(times["long"], [5000.0, 5000.0])
    assert set(devices) == {torch.device("cuda:1")}


def test_the_real_clock_is_in_milliseconds():
    times = time_interleaved(
        {"sleep": lambda: latency.time.sleep(0.002)}, budget=Budget(min_rounds=2, min_seconds=0.0, warmup_rounds=0)
    )
    assert (times["sleep"] >= 1.9).all()  # a sleep is never shorter than asked


# ---- statistics


def test_summary():
    times = np.arange(101.0)[::-1]
    assert summarise(times) == Latency(p50_ms=50.0, p95_ms=95.0, min_ms=0.0, iqr_ms=50.0)
    assert summarise([7.0]) == Latency(p50_ms=7.0, p95_ms=7.0, min_ms=7.0, iqr_ms=0.0)


def test_a_few_slow_rounds_do_not_move_median_and_speedup():
    quiet = summarise([10.0] * 20)
    noisy = summarise([10.0] * 17 + [500.0] * 3)
    assert (noisy.p50_ms, noisy.min_ms, noisy.iqr_ms) == (quiet.p50_ms, quiet.min_ms, quiet.iqr_ms)
    assert noisy.p95_ms == 500.0
    assert paired_speedup([20.0] * 20, [10.0] * 17 + [500.0] * 3).median == 2.0


def test_speedup_is_paired():
    """Dense is twice as slow in every round, while the machine becomes ten times slower half-way."""
    reduced = np.array([1.0, 1.0, 1.0, 10.0, 10.0, 10.0])
    assert paired_speedup(2 * reduced, reduced) == Speedup(median=2.0, q1=2.0, q3=2.0)
    # medians of each alone would say otherwise when rounds are shuffled against each other
    assert paired_speedup(2 * reduced[::-1], reduced).median != 2.0


def test_speedup_quartiles_and_direction():
    assert paired_speedup([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == Speedup(median=3.0, q1=2.0, q3=4.0)
    assert paired_speedup([1.0], [4.0]).median == 0.25  # slower than dense


@pytest.mark.parametrize("other", [[1.0], [1.0, 2.0, 3.0]])
def test_unpaired_rounds_are_refused(other):
    with pytest.raises(ValueError, match="not paired"):
        paired_speedup([1.0, 2.0], other)


def test_images_per_second():
    assert images_per_second(32, 250.0) == 128.0


def test_fastest_is_by_median_and_among_the_named():
    times = {"fused": [5.0, 5.0, 5.0], "unfused": [1.0, 6.0, 6.0], "tome": [1.0, 1.0, 1.0]}
    assert fastest(times, ["fused", "unfused"]) == "fused"


def test_a_restless_machine_is_measured_longer() -> None:
    """A clock of its own: the second candidate is slow from the fifth round to the tenth."""
    now, rounds = [0.0], [0]

    def plain() -> None:
        now[0] += 1.0

    def disturbed() -> None:
        rounds[0] += 1
        now[0] += 2.0 if 5 <= rounds[0] <= 10 else 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrim.measure.latency.time.perf_counter", lambda: now[0])
        budget = Budget(min_rounds=10, min_seconds=0.0, warmup_rounds=0)
        times = time_interleaved({"plain": plain, "disturbed": disturbed}, budget=budget)
        # of ten rounds the halves are 1 and 0.5, of twenty 0.5 and 1
        assert len(times["plain"]) == 30
        rounds[0] = 100
        assert len(time_interleaved({"plain": plain, "other": disturbed}, budget=budget)["other"]) == 10


def test_halves_are_medians_of_both_halves_of_the_rounds() -> None:
    found = paired_speedup([4.0] * 4 + [2.0] * 4, [2.0] * 8)
    assert found.halves == (2.0, 1.0)
    assert found.row == {"speedup": 1.5, "speedup_q1": 1.0, "speedup_q3": 2.0, "speedup_halves": [2.0, 1.0]}
    assert "speedup_halves" not in paired_speedup([2.0] * 7, [1.0] * 7).row
