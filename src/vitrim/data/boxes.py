"""Boxes of objects: checked as arrays, and the objects of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrim.data.errors import DataError

SLACK = 1.0
"""Pixels that a box may reach beyond its image, as rounded coordinates do: they are cut off."""

Objects = dict[str, Tensor]


class Boxes(list[Objects]):
    """The objects of the images of a batch: one dict of tensors per image.

    * `boxes` (n, 4) float32, x1 y1 x2 y2 in pixels; `labels` (n,) int64 in [0, K);
    * `masks` (n, H, W), where there are outlines;
    * in training `size` (2,) int64: height and width of the image within the padded one;
    * in evaluation also `iscrowd` (n,) int64 and `area` (n,) float32, and `original` (2,) int64: height and width of
      the image as it is stored, in whose pixels boxes, masks and areas then are.

    Example:
        >>> batch = Boxes([{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}])
        >>> len(batch.to("cpu")), type(batch.to("cpu")).__name__
        (1, 'Boxes')
    """

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Boxes:
        """Return the same objects on a device."""
        return Boxes(
            {name: value.to(device, non_blocking=non_blocking) for name, value in image.items()} for image in self
        )


def checked_boxes(boxes: Any, where: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return boxes as an array (n, 4).

    Raises:
        DataError: a box of other than four numbers, with its number.

    Example:
        >>> checked_boxes([[1, 2, 3, 4]], "image 0").shape, checked_boxes([], "image 1").shape
        ((1, 4), (0, 4))
    """
    if len(boxes) == 0:
        return np.zeros((0, 4), dtype=np.float32)
    for number, box in enumerate(boxes):
        if np.ndim(box) != 1 or len(box) != 4 or not all(map(_is_number, box)):
            raise DataError(f"box {number} of {where} is {box!r}; expected 4 numbers")
    with np.errstate(over="ignore"):  # becomes infinite, which is refused with the image and the box
        return np.asarray(boxes, dtype=np.float32)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def from_corner_and_size(boxes: Any, where: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Turn boxes written x, y, width, height (COCO's) into x1, y1, x2, y2.

    Raises:
        DataError: a box of other than four numbers, with its number.

    Example:
        >>> from_corner_and_size([[1, 2, 30, 40]], "image 0").tolist()
        [[1.0, 2.0, 31.0, 42.0]]
    """
    array = checked_boxes(boxes, where).astype(np.float64)
    array[:, 2:] += array[:, :2]
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def clamped(boxes: np.ndarray[Any, Any], size: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Cut off what reaches beyond an image of ``size`` (height, width)."""
    height, width = size
    limits = np.array([width, height, width, height], dtype=np.float32)
    clipped: np.ndarray[Any, np.dtype[np.float32]] = np.clip(boxes, 0, limits).astype(np.float32)
    return clipped


def areas(boxes: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The areas of boxes (n, 4) in square pixels: (n,)."""
    found: np.ndarray[Any, np.dtype[np.float32]] = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    return found
