"""Outlines of objects in COCO's forms, decoded by the optional package `pycocotools`."""

from __future__ import annotations

import importlib
import json
from typing import Any

import numpy as np

from vitrim.data.errors import DataError
from vitrim.errors import MissingPackageError, first_line

LEAST_NUMBERS = 6
"""Fewest numbers of a polygon: x and y of three corners."""


def import_pycocotools() -> Any:
    """Import `pycocotools.mask`.

    Raises:
        MissingPackageError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module("pycocotools.mask")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pycocotools":  # something that it needs is missing
            raise
        message = "outlines and average precision need the package 'pycocotools': pip install 'vitrim[dense]'"
        raise MissingPackageError(message) from error


def decode_outline(encoded: bytes, size: tuple[int, int], where: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Fill the outline of one object.

    Args:
        encoded: JSON of a list of polygons [x1, y1, x2, y2, ...] in pixels, or of a run-length encoding
            {"counts": ..., "size": [H, W]}, compressed (a text) or not (a list).
        size: H and W of the image.
        where: what it is, for messages.

    Returns:
        (H, W) uint8, 1 inside.

    Raises:
        DataError: the outline has another form, or is of an image of another size.
        MissingPackageError: `pycocotools` is not installed.

    Example:
        >>> decode_outline(b"[[0, 0, 2, 0, 2, 2, 0, 2]]", (3, 4), "a square").tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    """
    masks = import_pycocotools()
    outline = json.loads(encoded)
    if isinstance(outline, list):
        return _filled(masks.decode(masks.merge(masks.frPyObjects(_polygons(outline, where), *size))))
    if not isinstance(outline, dict) or not isinstance(outline.get("counts"), (str, list)):
        raise DataError(f"{where} is neither polygons nor a run-length encoding")
    if outline.get("size") != list(size):
        raise DataError(f"{where} is of an image of size {outline.get('size')}, the image's is {list(size)}")
    try:
        compressed = isinstance(outline["counts"], str)
        return _filled(masks.decode(outline if compressed else masks.frPyObjects(outline, *size)))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} cannot be decoded: {first_line(error)}") from error


def _polygons(outline: list[Any], where: str) -> list[list[float]]:
    for polygon in outline:
        numbers = isinstance(polygon, list) and all(isinstance(number, (int, float)) for number in polygon)
        if not numbers or len(polygon) < LEAST_NUMBERS or len(polygon) % 2:
            given = f"{len(polygon)} numbers" if numbers else repr(polygon)
            raise DataError(f"{where} has a polygon of {given}; expected x and y of at least three corners")
    if not outline:
        raise DataError(f"{where} has no polygon")
    return outline


def _filled(mask: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(mask, dtype=np.uint8)
