"""The comparison of an exported file with the model it was made from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from math import lgamma, log, log1p

import numpy as np
import torch
from torch import Tensor, nn

from vitrim.core.reduce import HANDLE
from vitrim.core.registry import ask
from vitrim.engines.exported import Exported
from vitrim.engines.formats.base import DTYPES, Array, as_array
from vitrim.engines.program import Program
from vitrim.errors import VitrimError

ATOL = 1e-4
FLIPS = 0.1
"""Share of images that may be near ties (`_near_ties`)."""

ATOL_HALF, SPAN = 2e-2, 4.0
"""Logits in half precision may be this far from the model's, or four times as far as torch's in the median image.

On 64 images, those of `vitrim:cifar10_vit` in bf16 are 0.01 (dense) to 0.1 (`mctf`) off in the median image, and up to
1.9 where nearly equal tokens change places, in 3 (dense) to 40 % of the images; in fp16 0.001 to 0.003, and up to 0.8.
"""

CONFIDENCE = 0.95
"""Confidence at which a share is shown to be above or below a bound."""

NUDGES = (1e-6, 3e-6, 1e-5)
"""Perturbations of an image, relative to its standard deviation, no larger than float32 rounding: engines differ by up
to 3e-5 on the logits of ViT-Ti, and perturbations of 1e-5 move them by 2e-5.
"""

TRIES = (16, 256)
"""Random perturbations of each size, first for all images, then for those that the first ones do not explain.

Of 320 photographs under `saint`, which compares 98 x 98 cosines with a threshold in each of six blocks, three differ in
OpenVINO; 16 perturbations of each size explain two of them, 256 all.
"""


@dataclass(frozen=True)
class Parity:
    """The comparison of a file with its model.

    Attributes:
        beyond: images with a difference above ``atol``.
        same_top1: images with the same top-1; None for outputs other than one row of logits per image.
        differing: images with a difference above ``atol``, or another top-1.
        tolerated: largest acceptable number of these.
        near_ties: of these, images with two nearly equal tokens between which rounding decides (`check`).
    """

    images: int
    batches: tuple[int, ...]
    largest: float
    beyond: int
    same_top1: int | None
    atol: float
    differing: int
    tolerated: int = 0
    near_ties: int = 0

    @property
    def holds(self) -> bool:
        """True if the file computes the model's outputs, as far as its precision can."""
        return self.differing - self.near_ties <= self.tolerated and self.near_ties <= max(1, FLIPS * self.images)

    def __str__(self) -> str:
        top1 = "" if self.same_top1 is None else f", same top-1 in {self.same_top1}"
        sizes = ", ".join(map(str, dict.fromkeys(self.batches)))  # a file for single images has 64 equal ones
        ties = f", {self.near_ties} of them near ties, which rounding decides" if self.near_ties else ""
        return (
            f"{self.images} images in batches of {sizes}: largest difference {self.largest:.1e} "
            f"({self.beyond} beyond {self.atol:.2g}{ties}){top1}"
        )


def check(exported: Exported, model: nn.Module, images: Tensor | Array, *, atol: float | None = None) -> Parity:
    """Compare a file with the model it was made from, at batch 1, 2 and the rest of the images in one batch.

    Nearly equal similarities can lead to other merges, which is not an error of the file. An image that differs is a
    near tie if the model itself gives the file's output, within ``atol``, when the image is perturbed no more than by
    rounding (`NUDGES`). Other differences are errors, and so are near ties in more than one image of ten.

    In half precision nearly equal tokens change places in many images, so a file is held to what torch gives in its
    precision: it is wrong if more of its images are off than of torch's, by more than chance, or more than half, or if
    an output is not finite.

    Args:
        model: reduced as exported, in eval mode.
        images: as the file takes them, at least a batch. A file for one batch size gets batches of that size.
        atol: largest difference of two logits; by default 1e-4, and in half precision 2e-2, or `SPAN` times torch's
            median one.
    """
    given, known = np.ascontiguousarray(as_array(images)), exported.metadata
    precision = known.get("weights", "fp32")
    half = precision != "fp32"
    preprocessing = ask(model).preprocessing(model) if known.get("input", {}).get("dtype") == "uint8" else None
    module = Program(model, preprocessing).eval()
    classified = known.get("output", {}).get("name") == "logits"
    sizes = _batches(len(given), exported.batch)
    count, ends = sum(sizes), np.cumsum(sizes)[:-1]
    batches = np.split(given[:count], ends)
    wanted, found = zip(*(_outputs(exported, module, batch) for batch in batches), strict=True)
    compared = (_compared(file, own, classified) for file, own in zip(found, wanted, strict=True))
    largest, alike = (np.concatenate(each) for each in zip(*compared, strict=True))
    allowed, tolerated = ATOL if atol is None else atol, 0
    if half:
        cast = Program(copy.deepcopy(model).to(DTYPES[precision]), preprocessing).eval()
        own = [_compared(_output(cast, batch), own, classified)[0] for batch, own in zip(batches, wanted, strict=True)]
        allowed, tolerated = _of_torch(np.concatenate(own), atol)
        tolerated = tolerated if np.isfinite(largest).all() else 0
    beyond = ~(largest <= allowed)  # includes nan
    differs = beyond if half else beyond | ~alike
    near_ties = 0
    if not half and differs.sum() <= max(1, FLIPS * count):  # more are an error in any case
        every = zip(batches, wanted, found, np.split(differs, ends), strict=True)
        near_ties = sum(_near_ties(module, *each, allowed, classified) for each in every)
    return Parity(
        images=count,
        batches=tuple(sizes),
        largest=float(largest.max()),
        beyond=int(beyond.sum()),
        same_top1=int(alike.sum()) if classified and found[0].ndim == 2 else None,
        atol=allowed,
        differing=int(differs.sum()),
        tolerated=tolerated,
        near_ties=near_ties,
    )


def _outputs(exported: Exported, module: Program, batch: Array) -> tuple[Array, Array]:
    """The outputs of the model and of its file."""
    wanted, found = _output(module, batch), exported.run(batch)
    if found.shape != wanted.shape:
        raise VitrimError(f"{exported.path} gives {found.shape} where the model gives {wanted.shape}")
    return wanted, found


def _output(module: Program, batch: Array) -> Array:
    with torch.inference_mode():
        return as_array(module(torch.from_numpy(batch)))


def _of_torch(off: Array, atol: float | None) -> tuple[float, int]:
    """The allowed difference in half precision, and the most images beyond it, from torch's own differences (I,)."""
    middle = float(np.median(off))
    allowed = max(ATOL_HALF, SPAN * middle if np.isfinite(middle) else 0.0) if atol is None else atol
    count, theirs = len(off), int((~(off <= allowed)).sum())
    most = highest_share(theirs, count)
    # The most images off that are not shown to be a greater share than torch's could be, and at most half.
    chance = (number for number in range(count // 2, -1, -1) if 1.0 - highest_share(count - number, count) <= most)
    return allowed, next(chance, 0)


def highest_share(found: int, count: int) -> float:
    """The highest share that ``found`` of ``count`` images are compatible with, at `CONFIDENCE` (Clopper-Pearson).

    By symmetry, the lowest one is ``1 - highest_share(count - found, count)``.

    Example:
    """
    if found >= count:
        return 1.0
    those = np.arange(found + 1)
    # Logarithms of the binomial coefficients: those of thousands of images overflow.
    ways = np.array([lgamma(count + 1) - lgamma(k + 1) - lgamma(count - k + 1) for k in those])
    low, high = found / count, 1.0
    for _ in range(50):  # bisection: the chance of so few falls with the share
        middle = (low + high) / 2
        chance = np.exp(ways + those * log(middle) + (count - those) * log1p(-middle)).sum()
        low, high = (middle, high) if chance > 1.0 - CONFIDENCE else (low, middle)
    return high


def _compared(ones: Array, others: Array, classified: bool) -> tuple[Array, Array]:
    """(B,) largest difference of each image, and True for an equal top-1, or if outputs have none."""
    largest = np.abs(ones - others).reshape(len(ones), -1).max(axis=1)
    if not classified or ones.ndim != 2:
        return largest, np.ones(len(ones), dtype=bool)
    return largest, ones.argmax(axis=1) == others.argmax(axis=1)


def _near_ties(
    module: Program, batch: Array, wanted: Array, found: Array, differs: Array, atol: float, classified: bool
) -> int:
    """The number of images among ``differs`` (B,) for which the perturbed model gives ``found`` and not ``wanted``."""
    images = torch.from_numpy(batch)
    if module.normalise:
        images = module.normalised(images)
    plain = Program(module.model).eval()
    config = getattr(getattr(module.model, HANDLE, None), "config", None)
    together = config is not None and config.traits.batch_dependent  # then outputs depend on the other images
    chosen = np.arange(len(batch)) if together else np.flatnonzero(differs)
    some, deviation = images[torch.from_numpy(chosen)], images.std()
    generator = torch.Generator().manual_seed(0)
    explained = ~differs[chosen]
    # Few perturbations explain most images, so many are tried only for the rest.
    for tries, nudge in product(TRIES, NUDGES):
        if explained.all():
            break
        left = np.arange(len(chosen)) if together else np.flatnonzero(~explained)
        changed = some[left] + torch.randn(tries, *some[left].shape, generator=generator) * deviation * nudge
        with torch.inference_mode():
            # Outputs that depend on the batch need the same batch; others run in batches of the same size.
            others = [plain(each) for each in (changed if together else changed.flatten(0, 1).split(len(batch)))]
        for other in as_array(torch.cat(others)).reshape(tries, len(left), *wanted.shape[1:]):
            near, like = _compared(other, found[chosen][left], classified)
            far, alike = _compared(other, wanted[chosen][left], classified)
            explained[left] |= (near <= atol) & like & ~((far <= atol) & alike)
    return int((explained & differs[chosen]).sum())


def _batches(images: int, fixed: int | None) -> list[int]:
    """Batch sizes that cover the images: 1, 2 and the rest, or as many as possible of a fixed size."""
    if fixed is not None:
        if images < fixed:
            raise VitrimError(f"a file for batches of {fixed} cannot be checked with {images} images")
        return [fixed] * (images // fixed)
    if images < 1:
        raise VitrimError("there are no images to check the file with")
    sizes = [1, min(2, images - 1), images - 3]
    return [size for size in sizes if size > 0]
