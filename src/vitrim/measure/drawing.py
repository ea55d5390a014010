"""Draws that depend on a seed alone, and leave the global generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawing(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from generators of the CPU and of ``device`` that start from ``seed``.

    Only generators that are put back afterwards are seeded: `torch.manual_seed` would seed those of all accelerators.
    On an accelerator that is not CUDA, whose generators torch cannot fork in one way, all are, and its own stay so.

    Example:
        >>> import torch
        >>> with drawing(torch.device("cpu"), 0):
        ...     first = torch.rand(2)
        >>> with drawing(torch.device("cpu"), 0):
        ...     bool((torch.rand(2) == first).all())
        True
    """
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        if device.type not in ("cpu", "cuda", "meta"):
            torch.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        if on_cuda:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
