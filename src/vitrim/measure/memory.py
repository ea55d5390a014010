"""Peak memory of one forward pass: the memory it needs beyond the weights and inputs."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 2**20
SILENT = "99"
"""Above all levels of the profiler's log, which otherwise reports every start and stop on standard error."""


def peak_memory_mib(run: Callable[[], object], device: torch.device | str = "cpu") -> float | None:
    """The most memory that tensors made by ``run()`` hold at any one time, its result included, in MiB (2**20 bytes).

    Memory that was allocated before (weights, inputs) does not count. On CUDA: torch's own peak counter. On CPU: every
    allocation and release of torch's allocator, summed in order; exact, except that scratch memory which libraries such
    as oneDNN get elsewhere is not seen, and that a tensor from before which ``run`` releases is not subtracted.

    Call ``run`` once before: a first call may also set up caches that stay.

    Args:
        run: one forward pass, with autograd off if that is what should be measured.

    Returns:
        MiB, or None on other devices: they have no such counter.

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
    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)  # read when the profiler starts for the first time
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorder = profiler.profiler
    assert recorder is not None
    assert recorder.kineto_results is not None
    # the tree, because only it has addresses; operations nest, and so do the allocations they make
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
    """The highest total, in bytes, of allocations and releases in the order in which they happened.

    Args:
        allocations: pairs of address and bytes, bytes below 0 for a release. Releases of addresses that were not
            allocated here do not count.

    Example:
        >>> running_peak([(1, 100), (2, 50), (1, -100), (3, 70), (9, -1000), (4, 20)])
        150
    """
    alive: dict[int, int] = {}
    total = peak = 0
    for address, size in allocations:
        if size > 0:
            alive[address] = size
            total += size
            peak = max(peak, total)
        else:
            total -= alive.pop(address, 0)
    return peak
