"""The plain records that measurements take and give: a `Batch` of images, a `Row` of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrim.data import DataError

__all__ = ["DENSE", "Batch", "Row", "as_batches"]

DENSE = "dense"
"""Name of the row of the untouched model."""


@dataclass(frozen=True)
class Batch:
    """Images and their targets, and their place in the pass over the data.

    Attributes:
        images: (B, C, H, W).
        targets: what the task compares with; labels (B,) int64 for classification.
        ids: (B,) int64, the places of the images in the dataset.
        index: the batch's number in the whole pass, whatever process runs it. Methods that draw at random draw by it.
        counts: False for a batch that only keeps a process busy while the others still run theirs.
    """

    images: Tensor
    targets: Any
    ids: Tensor
    index: int
    counts: bool = True

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """The batch on ``device``, its images in ``dtype``; targets that cannot move stay."""
        targets = self.targets.to(device) if hasattr(self.targets, "to") else self.targets
        return replace(self, images=self.images.to(device, dtype), targets=targets)


class Row(Mapping[str, Any]):
    """The numbers of one model under one method, by name; units are part of the names, such as ``latency_ms``.

    The first is ``method``: as on the command line, ``dense`` for the untouched model. Evaluations and speeds use the
    same rows, and a row can be written to JSON as ``dict(row)``.

    Example:
        >>> row = Row("tome:r=13", {"top1": 0.71, "gmacs": {"linear": 2.5}})
        >>> row.method, row["top1"], list(row)
        ('tome:r=13', 0.71, ['method', 'top1', 'gmacs'])
    """

    def __init__(self, method: str, numbers: Mapping[str, Any]) -> None:
        self._numbers = {"method": method, **numbers}

    @property
    def method(self) -> str:
        """The method, as on the command line."""
        return str(self._numbers["method"])

    def __getitem__(self, name: str) -> Any:
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __eq__(self, other: object) -> bool:
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return f"Row({self._numbers})"


def as_batches(batches: Iterable[Batch | tuple[Tensor, Any]]) -> Iterator[Batch]:
    """Number pairs of images (B, C, H, W) and targets in the order in which they come; pass `Batch` objects on.

    Raises:
        DataError: images of another shape.

    Example:
        >>> [(batch.index, batch.ids.tolist()) for batch in as_batches([(torch.zeros(2, 3, 8, 8), torch.zeros(2))] * 2)]
        [(0, [0, 1]), (1, [2, 3])]
    """
    seen = 0
    for index, batch in enumerate(batches):
        if not isinstance(batch, Batch):
            images, targets = batch
            batch = Batch(images, targets, torch.arange(seen, seen + len(images)), index)
        if batch.images.ndim != 4:
            raise DataError(f"expected images (B, C, H, W), got a tensor of {tuple(batch.images.shape)}")
        seen += len(batch)
        yield batch
