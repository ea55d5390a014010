"""Peak memory of one forward, beyond weights and inputs."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 2**20
SILENT = "99"
"""Above all log levels of the profiler, which otherwise reports every start and stop on standard error."""


def peak_memory_mib(run: Callable[[], object], device: torch.device | str = "cpu") -> float | None:
    """Peak memory in MiB (2**20 bytes) of the tensors that ``run()`` creates, with its result; None on other devices.

    Memory allocated before does not count. On CUDA: torch's own peak counter. On CPU: the running sum of all
    allocations and releases of torch's allocator, without scratch memory of libraries such as oneDNN. Disable autograd
    to exclude its memory, and call ``run`` once before: a first call may also create lasting caches.

    Example:
        >>> def two_then_one():
        ...     first, second = torch.empty(2**18), torch.empty(2**18)  # 1 MiB each in float32
        ...     del first
        ...     return second
        >>> peak_memory_mib(two_then_one)
        2.0
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    if device.type != "cpu":
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)  # read at the profiler's first start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorder = profiler.profiler
    assert recorder is not None
    assert recorder.kineto_results is not None
    # only the event tree has addresses; operations nest, and so do their allocations
    todo: list[Any] = recorder.kineto_results.experimental_event_tree()[::-1]
    found = []
    while todo:
        event = todo.pop()
        todo += event.children[::-1]
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=operator.itemgetter(0))
    return running_peak((address, size) for _, address, size in found) / MIB


def running_peak(allocations: Iterable[tuple[int, int]]) -> int:
    """The highest running total, in bytes, of pairs of address and bytes in order; negative bytes for a release."""
    alive: dict[int, int] = {}
    total = peak = 0
    for address, size in allocations:
        if size > 0:
            alive[address] = size
            total += size
            peak = max(peak, total)
        else:
            # Memory from before the forward has no known address here, and does not count.
            total -= alive.pop(address, 0)
    return peak
