"""Batches of images, distributed over processes, and rows of numbers: inputs and outputs of measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrim.data import DataError, spread
from vitrim.errors import check_installed


@dataclass(frozen=True)
class Batch:
    """Images, targets, and their position in the pass over the data; `DataError` for images whose scores would be
    wrong.

    Attributes:
        images: (B, C, H, W), floating point, normalised as the model takes them.
        targets: targets of the task; labels (B,) int64 for classification.
        ids: (B,) int64, indices of the images in the dataset.
        index: number of the batch in the entire pass, over all processes; it seeds methods that draw at random.
        counts: False for a batch that only keeps a process in step with the others.
        resized: the same images at other sizes, by side in pixels.
    """

    images: Tensor
    targets: Any
    ids: Tensor
    index: int
    counts: bool = True
    resized: Mapping[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.images.ndim != 4:
            raise DataError(f"expected images (B, C, H, W), got a tensor of {tuple(self.images.shape)}")
        if not self.images.is_floating_point():
            raise DataError(
                f"expected images as the model takes them, normalised, got {self.images.dtype}: convert them to floats "
                "and normalise them, e.g. with vitrim.data.eval_transform(model)"
            )

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """The batch on ``device``, with images in ``dtype``; targets without ``to`` stay."""
        targets = self.targets.to(device) if hasattr(self.targets, "to") else self.targets
        resized = {size: images.to(device, dtype) for size, images in self.resized.items()}
        return replace(self, images=self.images.to(device, dtype), targets=targets, resized=resized)

    def at(self, size: int | None) -> Tensor:
        """The images at this size; None: the model's own."""
        return self.images if size is None else self.resized[size]


class Row(dict[str, Any]):
    """The numbers of one model under one ``method``, by name; names include units, such as ``latency_ms``."""

    def __init__(self, method: str, numbers: Mapping[str, Any], *, model: str | None = None) -> None:
        super().__init__({**({} if model is None else {"model": model}), "method": method, **numbers})

    @property
    def method(self) -> str:
        return str(self["method"])


def as_batches(batches: Iterable[Batch | tuple[Tensor, Any]]) -> Iterator[Batch]:
    """Number pairs of images (B, C, H, W) and targets in order; pass `Batch` objects through."""
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise DataError(f"expected a source, a dataset or pairs of images and targets, got {type(batches).__name__}")
    seen = 0
    for index, batch in enumerate(batches):
        if not isinstance(batch, Batch):
            if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[0], Tensor):
                raise DataError(f"expected pairs of images (B, C, H, W) and targets, got {type(batch).__name__}")
            images, targets = batch
            batch = Batch(images, targets, torch.arange(seen, seen + len(images)), index)
        seen += len(batch)
        yield batch


@dataclass(frozen=True)
class Processes:
    """This process and the number of processes.

    Attributes:
        index: index of this process; process 0 prints and writes.
        count: number of processes; more than one with ``accelerate launch``.
        device: accelerator of this process if there are several processes, else None.
    """

    index: int = 0
    count: int = 1
    device: torch.device | None = None

    @classmethod
    def launched(cls, device: str | None = None) -> Processes:
        """Join the processes of ``accelerate launch``, if there are any; with "cpu", without an accelerator."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        check_installed("a run of several processes", "accelerate")
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu")
        return cls(state.process_index, state.num_processes, state.device)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in order. Every process must call this; it blocks until all have."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        gathered: list[Any] = gather_object([value])
        return gathered


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
    """Read a dataset in its own order, in the same batches for any number of processes.

    Process p of n reads batches p, p + n, p + 2 n and so on, and all read equally many.

    Args:
        dataset: map-style; items are pairs of image and target.
        batch_size: B, at least 1; the last batch of the dataset may be smaller.
        limit: largest number of images, spread evenly over the dataset; None for all.
        workers: processes that decode images, 0 for this one.
        done: number of this process's batches to skip.
        collate: makes images (B, C, H, W) and targets from B items; by default they are stacked.

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
    # The parts of a sharded model run together: if there are too few batches, the last is repeated and does not count.
    # Rounded up: every process has a turn for each batch of another.
    turns = -(-len(every) // processes.count)
    numbers = [processes.index + turn * processes.count for turn in range(done, turns)]
    mine = [every[min(number, len(every) - 1)] for number in numbers]
    # a separate generator, because DataLoader would draw a seed from the global one
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, batch_sampler=mine, num_workers=workers, generator=generator, collate_fn=collate)
    for number, ids, (images, targets) in zip(numbers, mine, loader, strict=True):
        ids, counts = torch.from_numpy(np.asarray(ids)), number < len(every)
        yield Batch(images_at(images, None), targets, ids, number, counts, resized_of(images))


def images_at(images: Tensor | Mapping[int | None, Tensor], size: int | None) -> Tensor:
    """The images of a dataset's item or batch at one size: those of `vitrim.data.transforms.AtSizes` have several."""
    return images if isinstance(images, Tensor) else images[size]


def resized_of(images: Tensor | Mapping[int | None, Tensor]) -> dict[int, Tensor]:
    """The images at other sizes than the model's own."""
    return {} if isinstance(images, Tensor) else {size: one for size, one in images.items() if size is not None}
