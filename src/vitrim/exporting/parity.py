"""The comparison of an exported file with its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.core.registry import ask
from vitrim.errors import VitrimError
from vitrim.exporting.exported import Exported
from vitrim.exporting.format import Array, as_array
from vitrim.exporting.program import Program

ATOL = 1e-4
ATOL_HALF = 2e-2
FLIPS_HALF = 0.1
"""Share of images that may differ by more in half precision: two tokens nearly alike may change places in a ranking."""


@dataclass(frozen=True)
class Parity:
    """The comparison of a file with its model.

    Attributes:
        images: compared, over all batch sizes.
        batches: their sizes.
        largest: difference between two logits.
        beyond: images with a difference above ``atol``.
        same_top1: images with the same largest logit; None for outputs other than one row of logits per image.
        atol: allowed.
        tolerated: images that may be beyond it, or have another top-1.
    """

    images: int
    batches: tuple[int, ...]
    largest: float
    beyond: int
    same_top1: int | None
    atol: float
    tolerated: int = 0

    @property
    def holds(self) -> bool:
        """Tell whether the file computes what the model does."""
        other = 0 if self.same_top1 is None else self.images - self.same_top1
        return max(self.beyond, other) <= self.tolerated

    def __str__(self) -> str:
        top1 = "" if self.same_top1 is None else f", same top-1 in {self.same_top1}"
        sizes = ", ".join(map(str, self.batches))
        return (
            f"{self.images} images in batches of {sizes}: largest difference {self.largest:.1e} "
            f"({self.beyond} beyond {self.atol:g}){top1}"
        )


def check(exported: Exported, model: nn.Module, images: Tensor | Array, *, atol: float | None = None) -> Parity:
    """Compare a file with the model it was made of, at batch 1, 2 and the rest of the images in one batch.

    Args:
        exported: the file.
        model: reduced as it was exported, in eval mode.
        images: as the file takes them. A file for one batch size gets batches of that size.
        atol: largest difference of two logits; by default 1e-4, of fp16 weights 2e-2 for 9 images of 10.

    Raises:
        VitrimError: fewer images than a batch.
    """
    given = as_array(images)
    half = exported.metadata.get("weights") == "fp16"
    in_graph = exported.metadata.get("input", {}).get("dtype") == "uint8"
    module = Program(model, ask(model).preprocessing(model) if in_graph else None).eval()
    sizes = _batches(len(given), exported.batch)
    differences: list[Array] = []
    same: list[Array] = []
    start = 0
    for size in sizes:
        batch = np.ascontiguousarray(given[start : start + size])
        with torch.inference_mode():
            wanted = as_array(module(torch.from_numpy(batch)))
        found = exported.run(batch)
        if found.shape != wanted.shape:
            raise VitrimError(f"{exported.path} gives {found.shape} where the model gives {wanted.shape}")
        differences.append(_worst(found, wanted))
        same.append(_same(found, wanted))
        start += size
    worst, alike = np.concatenate(differences), np.concatenate(same)
    allowed = (ATOL_HALF if half else ATOL) if atol is None else atol
    classified = exported.metadata.get("output", {}).get("name") == "logits" and found.ndim == 2
    return Parity(
        images=start,
        batches=tuple(sizes),
        largest=float(worst.max()),
        beyond=int((~(worst <= allowed)).sum()),  # counts what is not a number, too
        same_top1=int(alike.sum()) if classified else None,
        atol=allowed,
        tolerated=int(FLIPS_HALF * start) if half else 0,
    )


def _batches(images: int, fixed: int | None) -> list[int]:
    """Sizes of batches that cover so many images: 1, 2 and the rest, or as many as possible of one size."""
    if fixed is not None:
        if images < fixed:
            raise VitrimError(f"a file for batches of {fixed} cannot be checked with {images} images")
        return [fixed] * (images // fixed)
    if images < 1:
        raise VitrimError("there are no images to check the file with")
    sizes = [1, min(2, images - 1), images - 3]
    return [size for size in sizes if size > 0]


def _worst(found: Array, wanted: Array) -> Any:
    """(B,) largest difference of each image."""
    return np.abs(found - wanted).reshape(len(found), -1).max(axis=1)


def _same(found: Array, wanted: Array) -> Any:
    """(B,) whether the largest logit (B, K) is the same."""
    return found.argmax(axis=1) == wanted.argmax(axis=1)
