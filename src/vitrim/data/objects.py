"""Boxes and outlines of objects, in COCO's formats: checks of arrays, and batches."""

from __future__ import annotations

import importlib
import json
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrim.errors import DataError, check_installed

SLACK = 1.0
"""Pixels that a box may reach beyond its image, because coordinates are rounded; they are cut off."""

LEAST_NUMBERS = 6
"""Fewest numbers of a polygon: x and y of three corners."""
LONGEST_BORDER = 2**20
"""Most pixels along a polygon's border: pycocotools needs some hundred bytes for each, and aborts the process
without memory."""
LARGEST_IMAGE = 2**31 - 1
"""Most pixels of an image of run lengths: pycocotools counts them in 32 bits."""

Objects = dict[str, Tensor]


class Boxes(list[Objects]):
    """The objects of the images of a batch: one dict of tensors per image.

    * `boxes` (n, 4) float32, x1 y1 x2 y2 in pixels; `labels` (n,) int64 in [0, K);
    * `masks` (n, H, W), with outlines;
    * in training, `size` (2,) int64: height and width of the image within the padded one;
    * in evaluation, `iscrowd` (n,) int64, `area` (n,) float32, and `original` (2,) int64: height and width of the
      stored image, whose pixels then are the unit of boxes, masks and areas.
    """

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Boxes:
        return Boxes(
            {name: value.to(device, non_blocking=non_blocking) for name, value in image.items()} for image in self
        )


def checked_boxes(boxes: Any, where: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``boxes`` as an array (n, 4)."""
    if len(boxes) == 0:
        return np.zeros((0, 4), dtype=np.float32)
    for number, box in enumerate(boxes):
        kinds = (int, float, np.number)
        numbers = np.ndim(box) == 1 and all(isinstance(one, kinds) and not isinstance(one, bool) for one in box)
        if not numbers or len(box) != 4:
            raise DataError(f"box {number} of {where} is {box!r}; expected 4 numbers")
    with np.errstate(over="ignore"):  # infinities are refused later, with the image and the box
        return np.asarray(boxes, dtype=np.float32)


def from_corner_and_size(boxes: Any, where: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``boxes`` from x, y, width, height (COCO's) to x1, y1, x2, y2. Errors as of `checked_boxes`."""
    array = checked_boxes(boxes, where).astype(np.float64)
    # In float64: a corner that is rounded twice could reach beyond its image.
    array[:, 2:] += array[:, :2]
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def clamped(boxes: np.ndarray[Any, Any], sizes: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``boxes`` cut off at the edges of an image of height and width ``sizes``, or each at those of its own (n, 2)."""
    limits = np.tile(np.asarray(sizes, dtype=np.float32)[..., ::-1], 2)
    clipped: np.ndarray[Any, np.dtype[np.float32]] = np.clip(boxes, 0, limits).astype(np.float32)
    return clipped


def outside(boxes: np.ndarray[Any, Any], sizes: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(n,) True for ``boxes`` beyond their images by more than `SLACK`, and (n,) for those without area in them.

    ``sizes`` as for `clamped`.

    Example:
        >>> [found.tolist() for found in outside(np.array([[0, 0, 9, 5], [0, 0, 5, 9], [4, 0, 5, 9]]), (8, 4))]
        [[True, False, False], [False, False, True]]
    """
    limits = np.asarray(sizes)[..., ::-1] + SLACK
    beyond = np.any(boxes[:, :2] < -SLACK, axis=1) | np.any(boxes[:, 2:] > limits, axis=1)
    return beyond, areas(clamped(boxes, sizes)) <= 0


def areas(boxes: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(n,) areas of ``boxes`` (n, 4) in square pixels."""
    found: np.ndarray[Any, np.dtype[np.float32]] = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    return found


# ---- outlines --------------------------------------------------------------------------------------------------------


def import_pycocotools() -> Any:
    check_installed("average precision of boxes and outlines", "pycocotools")
    return importlib.import_module("pycocotools.mask")


class Outline(NamedTuple):
    """An outline as bytes, and the result of `examine`.

    Attributes:
        problem: the reason why it cannot be decoded; empty if it can.
        size: of run lengths, height and width of their image.
        bounds: of polygons, least x and y, largest x and y.
        encoded: for `decode_outline`, if it was kept.
    """

    problem: str = ""
    size: tuple[int, int] | None = None
    bounds: tuple[float, float, float, float] | None = None
    encoded: bytes = b""


def examine(outline: Any) -> Outline:
    """Check everything about an outline, as parsed from JSON, that does not depend on its image.

    pycocotools checks next to nothing: on bad input it reads foreign memory, aborts the process, or exhausts memory.

    Example:
        >>> examine([[0, 0, 2, 0, 2, 3]]).bounds
        (0, 0, 2, 3)
        >>> examine({"counts": [3, 2], "size": [2, 3]}).problem
        'has runs of 5 pixels in all, where its size [2, 3] has 6'
    """
    if isinstance(outline, list):
        return _examine_polygons(outline)
    if isinstance(outline, dict) and isinstance(outline.get("counts"), (str, list)):
        return _examine_runs(outline["counts"], outline.get("size"))
    return Outline("is neither polygons nor a run-length encoding")


def _examine_polygons(polygons: list[Any]) -> Outline:
    bounds = []
    for polygon in polygons:
        numbers = isinstance(polygon, list) and {*map(type, polygon)} <= {int, float}
        if not numbers or len(polygon) < LEAST_NUMBERS or len(polygon) % 2:
            given = f"{len(polygon)} numbers" if numbers else shown(polygon)
            return Outline(f"has a polygon of {given}; expected x and y of at least three corners")
        try:
            finite = isfinite(sum(polygon))
        except OverflowError:  # an integer with hundreds of digits
            finite = False
        if not finite:
            return Outline("has a polygon with a number that is not finite")
        xs, ys = polygon[0::2], polygon[1::2]
        left, top, right, bottom = min(xs), min(ys), max(xs), max(ys)
        # A bound that is cheap for most polygons: no border is longer than its box's sides, once per corner.
        if (right - left + bottom - top) * len(xs) > LONGEST_BORDER:  # possibly too long: measure it
            corners = np.asarray(polygon, dtype=np.float64).reshape(-1, 2)
            if np.abs(corners - np.roll(corners, 1, axis=0)).max(axis=1).sum() > LONGEST_BORDER:
                return Outline(f"has a polygon whose border is longer than {LONGEST_BORDER} pixels")
        bounds.append((left, top, right, bottom))
    if not bounds:
        return Outline("has no polygon")
    lefts, tops, rights, bottoms = zip(*bounds, strict=True)
    return Outline(bounds=(min(lefts), min(tops), max(rights), max(bottoms)))


def _examine_runs(counts: str | list[Any], size: Any) -> Outline:
    if not isinstance(size, list) or len(size) != 2 or any(type(side) is not int or side < 1 for side in size):
        return Outline(f"is of an image of size {size}; expected its height and width")
    pixels = size[0] * size[1]
    if pixels > LARGEST_IMAGE:
        return Outline(f"is of an image of size {size}, of more than {LARGEST_IMAGE} pixels")
    runs = _runs(counts) if isinstance(counts, str) else counts
    if runs is None:
        return Outline(f"has counts {shown(counts)}; expected a text of compressed run lengths")
    if not {*map(type, runs)} <= {int} or min(runs, default=0) < 0:
        return Outline("has a run length that is no whole number from 0")
    if sum(runs) != pixels:
        return Outline(f"has runs of {sum(runs)} pixels in all, where its size {size} has {pixels}")
    return Outline(size=(size[0], size[1]))


def misfit(outline: Outline, size: tuple[int, int]) -> str:
    """The reason why an outline does not fit an image of ``size`` (height, width); empty if it does.

    Polygons may reach beyond the image, like those of truncated objects, but by no more than its size.

    Example:
        >>> misfit(examine([[0, 0, 2, 0, 2, 900]]), (4, 4))
        'reaches from 0, 0 to 2, 900, far beyond the image of 4 x 4 pixels'
    """
    if outline.size is not None and outline.size != size:
        return f"is of an image of size {list(outline.size)}, the image's is {list(size)}"
    if outline.bounds is None:
        return ""
    left, top, right, bottom = outline.bounds
    height, width = size
    if left >= -width and top >= -height and right <= 2 * width and bottom <= 2 * height:
        # It touches the image; from its size on around the image, coordinates are no pixels.
        if left < width and top < height and right > 0 and bottom > 0:
            return ""
        how = "outside of"
    else:
        how = "far beyond"
    return f"reaches from {left:g}, {top:g} to {right:g}, {bottom:g}, {how} the image of {width} x {height} pixels"


def decode_outline(encoded: bytes, size: tuple[int, int], where: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Fill the outline of one object: (H, W) uint8, 1 inside.

    Args:
        encoded: JSON of polygons [x1, y1, x2, y2, ...] in pixels, or of run lengths {"counts": ..., "size": [H, W]},
            compressed (a text) or not (a list).
        where: the object, for messages.

    Raises:
        DataError: the outline is invalid, or of an image of another size.

    Example:
        >>> decode_outline(b"[[0, 0, 2, 0, 2, 2, 0, 2]]", (3, 4), "a square").tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    """
    masks = import_pycocotools()
    outline = json.loads(encoded)
    found = examine(outline)
    problem = found.problem or misfit(found, size)
    if problem:
        raise DataError(f"{where} {problem}")
    if isinstance(outline, list):
        runs = masks.merge(masks.frPyObjects(outline, *size))
    else:
        runs = outline if isinstance(outline["counts"], str) else masks.frPyObjects(outline, *size)
    return np.ascontiguousarray(masks.decode(runs), dtype=np.uint8)


def _runs(text: str) -> list[int] | None:
    """The run lengths in a compressed text; None if invalid.

    A number is written five bits at a time, lowest first, each as a character from "0" on; 32 means that more follow,
    and 16 in the last one that the number is negative. From the fourth on, numbers are differences to the last but one.

    Example:
        >>> _runs("52203"), _runs("5P")
        ([5, 2, 2, 2, 5], None)
    """
    runs: list[int] = []
    value = shift = 0
    for code in text.encode("utf-8", "replace"):
        bits = code - 48
        if not 0 <= bits < 64 or shift > 30:
            return None
        value |= (bits & 31) << shift
        shift += 5
        # The last digit of a number: its sign bit fills the higher bits, and from the fourth number on it is a
        # difference.
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value = shift = 0
    return None if shift else runs


def shown(value: Any) -> str:
    """A value as JSON, cut off if it is long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deep"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
