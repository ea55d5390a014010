"""Latency of several models, timed for a comparison."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from math import isnan, nan
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from vitrim.checked import Natural, Positive, checked
from vitrim.errors import VitrimError

FloatArray = NDArray[np.float64]

ENOUGH = 8
"""Fewest rounds whose halves are compared."""
APART = 1.05
"""Ratio of the medians of two halves that indicates a disturbance."""
STARVED = 0.8
"""CPU seconds per second below which this process had to wait."""


# ---- timing ----------------------------------------------------------------------------------------------------------


@checked
class Budget:
    """The time to spend on a measurement, in rounds in which every candidate runs once.

    It ends after ``min_rounds`` that took ``min_seconds`` per candidate, without warm-up, or after ``max_rounds``.

    Attributes:
        warmup_rounds: initial rounds that do not count, for caches, lazy set-up and compilation.
        slice: `vitrim.bench` also times the limit of every static method, a plain slice (`vitrim.measure.limit`).

    Example:
        >>> Budget(min_rounds=5, min_seconds=1.0).spent(rounds=7, seconds=2.5, candidates=2)
        True
    """

    min_rounds: Positive = 10
    min_seconds: Annotated[float, Field(ge=0)] = 1.0
    max_rounds: Positive = 1000
    warmup_rounds: Natural = 3
    slice: bool = False

    def __post_init__(self) -> None:
        if self.max_rounds < self.min_rounds:
            raise VitrimError(f"max_rounds must be at least min_rounds, {self.min_rounds}, got {self.max_rounds}")

    def spent(self, rounds: int, seconds: float, candidates: int) -> bool:
        """True if ``rounds`` with a total of ``seconds`` are enough for this number of candidates."""
        if rounds >= self.max_rounds:
            return True
        return rounds >= self.min_rounds and seconds >= self.min_seconds * candidates


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device | str = "cpu",
    budget: Budget | None = None,
) -> dict[str, FloatArray]:
    """Time callables in turn, one call each per round, in a random order per round.

    ``candidates`` are callables by name; on an accelerator, ``device``, they may return before their work is done.

    Returns:
        Per name the latency of every round, (R,) float64 in milliseconds; entry i of all belongs to the same round.

    Example:
        >>> times = time_interleaved({"short": lambda: sum(range(10)), "long": lambda: sum(range(1000))},
        ...                          budget=Budget(min_rounds=5, min_seconds=0.0))
        >>> times["short"].shape, list(times)
        ((5,), ['short', 'long'])
    """
    if not candidates:
        raise VitrimError("there is nothing to time: give at least one candidate")
    budget = budget or Budget()
    device = torch.device(device)
    # Other jobs slow a machine down for seconds. In turn, a slow moment hits all candidates alike, and speed-ups are
    # ratios within a round.
    for _ in range(budget.warmup_rounds):
        for run in candidates.values():
            run()
    order, draw = list(candidates), random.Random(0)
    rounds: list[dict[str, float]] = []
    while True:
        before, seconds = len(rounds), 0.0
        while not budget.spent(len(rounds) - before, seconds, len(candidates)):
            rounds.append({})
            # A call runs with the caches and memory that its predecessor left: in a fixed order, `tome:r=2` of ViT-S
            # took 109 ms after a model of 186 ms, and 99 ms after another one, in all rounds, so that a median does not
            # help.
            draw.shuffle(order)
            for name in order:
                # Before and after: what the predecessor left running must not count, and this call must be over.
                _synchronise(device)
                start = time.perf_counter()
                candidates[name]()
                _synchronise(device)
                rounds[-1][name] = time.perf_counter() - start
            seconds += sum(rounds[-1].values())
        found = {name: np.array([took[name] for took in rounds]) * 1e3 for name in candidates}
        # measure longer on a disturbed machine, at most three times
        if before >= 2 * (len(rounds) - before) or not restless(found):
            return found


def in_turn(run: Callable[[Any], object], batches: Sequence[Any]) -> Callable[[], object]:
    """A callable that runs the next of ``batches``, of any shapes, and starts over after the last.

    With it, a method whose counts depend on the image is timed on many, and all candidates run the same one in a round.

    Example:
        >>> seen = []
        >>> call = in_turn(lambda batch: seen.append(int(batch)), [torch.tensor(1), torch.tensor(2)])
        >>> _ = call(), call(), call()
        >>> seen
        [1, 2, 1, 2, 1]
    """
    if len(batches) == 1:
        return partial(run, batches[0])
    # All run once first, because engines compile kernels for every new shape.
    for batch in batches:
        run(batch)
    ring = cycle(batches)
    return lambda: run(next(ring))


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latency:
    """Summary of a candidate's rounds in milliseconds: median, 95th percentile, fastest, interquartile range."""

    p50_ms: float
    p95_ms: float
    min_ms: float
    iqr_ms: float


@dataclass(frozen=True)
class Speedup:
    """Speed-up over the baseline: median and quartiles over rounds of the ratio within a round."""

    median: float
    q1: float
    q3: float
    halves: tuple[float, float] = field(default=(nan, nan), repr=False, compare=False)
    """Medians of the first and the last half of the rounds; nan for fewer rounds than `ENOUGH`."""

    @property
    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = {"speedup": self.median, "speedup_q1": self.q1, "speedup_q3": self.q3}
        return found if isnan(self.halves[0]) else {**found, "speedup_halves": list(self.halves)}


def restless(times_ms: Mapping[str, ArrayLike]) -> bool:
    """True if the halves of `ENOUGH` rounds disagree on a ratio to the first candidate by more than `APART`.

    Example:
        >>> calm, slow = [10.0] * 8, [10.0] * 4 + [13.0] * 4
        >>> restless({"a": calm, "b": calm}), restless({"a": calm, "b": slow})
        (False, True)
    """
    # Another job ran for a while: it slowed one half, and candidates differently.
    first, *others = (np.asarray(each) for each in times_ms.values())
    speedups = (paired_speedup(first, other) for other in others)
    return any(max(one.halves) > APART * min(one.halves) for one in speedups)  # False for nan


@dataclass(frozen=True)
class MachineWatch:
    """The share of the machine that this process had during the timing.

    ``wall`` are seconds, ``own`` CPU seconds of this process over all threads, ``load`` the average of the last minute.
    """

    wall: float
    own: float
    load: float
    cores: int

    def disturbance(self) -> str | None:
        """A phrase on other load; None if there was little.

        Example:
            >>> MachineWatch(10.0, 4.0, 5.0, 2).disturbance()
            'something else ran on this machine (40 % of one core left, load 5.0 on 2 cores)'
        """
        # An undisturbed thread has one CPU second per second, and this process itself adds one to the load.
        starved, crowded = self.own < STARVED * self.wall, self.load > self.cores + 1.0
        if not starved and not crowded:
            return None
        had = [f"{100 * self.own / self.wall:.0f} % of one core left"] if starved else []
        return (
            f"something else ran on this machine ({', '.join([*had, f'load {self.load:.1f} on {self.cores} cores'])})"
        )


@contextmanager
def watched_machine() -> Iterator[list[MachineWatch]]:
    """Yield a list that holds a `MachineWatch` of the block at its end."""
    found: list[MachineWatch] = []
    wall, own = time.perf_counter(), time.process_time()
    yield found
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # unavailable on Windows
    found.append(MachineWatch(time.perf_counter() - wall, time.process_time() - own, load, os.cpu_count() or 1))


def summarise(times_ms: ArrayLike) -> Latency:
    """The `Latency` of rounds (R,) in milliseconds, R at least 1; percentiles are interpolated linearly."""
    times = np.asarray(times_ms, dtype=np.float64)
    q1, median, q3, p95 = (float(value) for value in np.percentile(times, [25, 50, 75, 95]))
    return Latency(p50_ms=median, p95_ms=p95, min_ms=float(times.min()), iqr_ms=q3 - q1)


def paired_speedup(baseline_ms: ArrayLike, times_ms: ArrayLike) -> Speedup:
    """Speed-up over the baseline from the same rounds (R,) of both, in any unit.

    Example:
        >>> paired_speedup([2.0, 20.0, 3.0], [1.0, 10.0, 2.0])  # the second round was slow for both
        Speedup(median=2.0, q1=1.75, q3=2.0)
    """
    baseline, times = np.asarray(baseline_ms, dtype=np.float64), np.asarray(times_ms, dtype=np.float64)
    if baseline.shape != times.shape:
        raise ValueError(f"rounds of {baseline.shape} and {times.shape} are not paired")
    # Paired: a round in which the entire machine was slow is as informative as any other.
    ratios = baseline / times
    q1, median, q3 = (float(value) for value in np.percentile(ratios, [25, 50, 75]))
    half = len(ratios) // 2
    halves = (float(np.median(ratios[:half])), float(np.median(ratios[half:]))) if len(ratios) >= ENOUGH else (nan, nan)
    return Speedup(median, q1, q3, halves)


def images_per_second(batch_size: int, latency_ms: float) -> float:
    """Throughput at one batch of ``batch_size`` images per ``latency_ms``."""
    return batch_size * 1e3 / latency_ms


def speed_row(times_ms: ArrayLike, baseline_ms: ArrayLike, images: int, promised: float) -> dict[str, Any]:
    """The speed columns of a candidate for rows of reports; ``promised`` is the speed-up that its MACs promise.

    Example:
        >>> row = speed_row([5.0, 5.0], [10.0, 10.0], images=2, promised=4.0)
        >>> row["images_per_second"], row["rounds"], row["speedup"], row["ratio"]
        (400.0, 2, 2.0, 0.5)
    """
    latency, speedup = summarise(times_ms), paired_speedup(baseline_ms, times_ms)
    return {
        "images_per_second": images_per_second(images, latency.p50_ms),
        "latency_ms": {"p50": latency.p50_ms, "p95": latency.p95_ms, "min": latency.min_ms, "iqr": latency.iqr_ms},
        "rounds": np.size(times_ms),
        **speedup.row,
        "macs_speedup": promised,
        "ratio": speedup.median / promised,
    }


def fastest(times_ms: Mapping[str, ArrayLike], names: Iterable[str]) -> str:
    """The name with the lowest median."""
    return min(names, key=lambda name: float(np.median(np.asarray(times_ms[name]))))
