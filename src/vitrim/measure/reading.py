"""A dataset as batches for a measurement, shared out over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitrim.data import spread
from vitrim.measure.processes import Processes
from vitrim.measure.records import Batch

__all__ = ["read"]


def read(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    limit: int | None = None,
    workers: int = 0,
    processes: Processes | None = None,
    done: int = 0,
    collate: Callable[[list[Any]], tuple[Any, Any]] | None = None,
) -> Iterator[Batch]:
    """Read a dataset in its own order, in the same batches whatever the number of processes.

    Process p of n reads batches p, p + n, p + 2 n and so on. All read equally many, for the parts of a sharded model
    run together: where there are too few the last batch comes once more, and does not count.

    Args:
        dataset: map-style; items are pairs of image and target.
        batch_size: B, at least 1; the last batch of the dataset may be smaller.
        limit: read at most this many images, spread evenly over the dataset; None for all.
        workers: processes that decode images for this one, 0 for itself.
        processes: this process and its like.
        done: how many batches of this process were run before, and are not read again.
        collate: makes images (B, C, H, W) and targets of B items; by default they are stacked.

    Raises:
        DataError: while iterating, an image that cannot be read.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> images = TensorDataset(torch.zeros(5, 3, 8, 8), torch.arange(5))
        >>> for index in (0, 1):
        ...     print([(b.ids.tolist(), b.counts) for b in read(images, 2, processes=Processes(index, 2))])
        [([0, 1], True), ([4], True)]
        [([2, 3], True), ([4], False)]
    """
    processes = processes or Processes()
    places = spread(len(cast(Sized, dataset)), limit)
    every = [places[start : start + batch_size].tolist() for start in range(0, len(places), batch_size)]
    turns = -(-len(every) // processes.count)
    numbers = [processes.index + turn * processes.count for turn in range(done, turns)]
    mine = [every[min(number, len(every) - 1)] for number in numbers]
    # a generator of its own: otherwise every pass draws a seed from the global one and changes what follows it
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, batch_sampler=mine, num_workers=workers, generator=generator, collate_fn=collate)
    for number, ids, (images, targets) in zip(numbers, mine, loader, strict=True):
        yield Batch(images, targets, torch.from_numpy(np.asarray(ids)), number, counts=number < len(every))
