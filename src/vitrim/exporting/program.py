"""A model as a program of torch.export: images in, one tensor out; and the comparison of an exported file with it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrim.core.plan import Preprocessing
from vitrim.core.reduce import HANDLE
from vitrim.core.registry import ask
from vitrim.errors import VitrimError, first_line
from vitrim.exporting.exported import Exported
from vitrim.exporting.formats.base import Array, as_array

MAX_BATCH = 2**16
"""Most images in a batch of a program whose batch is dynamic."""


class Program(nn.Module):
    """``model`` as it is exported.

    Takes (B, C, H, W) float32 as the model does, or with ``normalise`` (B, H, W, C) uint8 as images are read: then it
    scales to [0, 1] and normalises. Gives one float32 tensor: the logits, or else the embedding that the library means,
    or else the first thing the model gives.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, normalise: Preprocessing | None = None) -> None:
        super().__init__()
        self.model = model
        self.library = ask(model)
        self.normalise = normalise is not None
        if normalise is not None:
            for name, value in zip(("mean", "std"), normalisation(normalise), strict=True):
                self.register_buffer(name, value, persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        if self.normalise:
            image = self.normalised(image)
        weights = next(self.model.parameters())
        output: Any = self.model(image.to(weights.dtype))
        return self.tensor(output).to(torch.float32)

    def normalised(self, image: Tensor) -> Tensor:
        """Images (B, H, W, C) uint8 as the model takes them, (B, C, H, W)."""
        return (image.permute(0, 3, 1, 2).to(self.mean.dtype) / 255.0 - self.mean) / self.std

    def tensor(self, output: Any) -> Tensor:
        """The logits in an output, else the embedding, else the first tensor in it.

        Raises:
            VitrimError: there is no tensor.
        """
        if not isinstance(output, Tensor):
            logits, vectors = getattr(output, "logits", None), self.library.vector(self.model, output)
            output = logits if logits is not None else output[0] if vectors is None else vectors
        if not isinstance(output, Tensor):
            raise VitrimError(
                f"{type(self.model).__name__} gives no tensor but {type(output).__name__}, which a file cannot: export "
                "classifiers, segmenter: models and models without a head"
            )
        return output


def as_read(images: Tensor, told: Preprocessing) -> Tensor:
    """Normalised images (B, C, H, W) back as (B, H, W, C) uint8: what a program that normalises takes.

    Raises:
        VitrimError: the preprocessing has no mean or no standard deviation.
    """
    mean, std = normalisation(told)
    return ((images * std + mean) * 255.0).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def normalisation(told: Preprocessing) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (1, C, 1, 1) each.

    Raises:
        VitrimError: the model does not say them.
    """
    if told.mean is None or told.std is None:
        raise VitrimError(
            "the model does not say the mean and standard deviation of its images, which preprocessing in the graph "
            "needs: export without it"
        )
    return torch.tensor(told.mean).view(1, -1, 1, 1), torch.tensor(told.std).view(1, -1, 1, 1)


def trace(module: Program, images: Tensor, dynamic: bool) -> ExportedProgram:
    """Export ``module``, run on ``images``, for that number of images or, if ``dynamic``, for any.

    Raises:
        VitrimError: the model has a forward that torch.export cannot follow.
    """
    shapes = ({0: Dim("batch", min=1, max=MAX_BATCH)},) if dynamic else None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about itself
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.export(module, (images,), dynamic_shapes=shapes, strict=False)
    except VitrimError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        name = type(module.model).__name__
        if dynamic and "Constraints violated" in str(error):
            raise VitrimError(
                f"{name} takes the size of a batch for a constant, as len(x) does: write x.shape[0] in its forward, or "
                "a file for one size (batch=8, --batch 8)"
            ) from error
        raise VitrimError(f"torch.export cannot follow {name}: {first_line(error)}") from error


ATOL = 1e-4
ATOL_HALF = 2e-2
FLIPS = 0.1
"""Share of images that may differ by more: in half precision, in which tokens nearly alike change places; in float32 if
each of them is a near tie (`_near_ties`)."""

NUDGES = (1e-6, 3e-6, 1e-5)
"""Changes to an image, over its standard deviation, that are no larger than what rounding in float32 makes of it on its
way: engines disagree by up to 3e-5 on the logits of ViT-Ti, which changes of 1e-5 move by 2e-5."""

TRIES = (16, 256)
"""Random changes of each size; the second number is for images that the first ones do not explain. Where several pairs
of an image are near ties, rounding must decide all of them as the file does: of 320 photographs under `saint`, which
compares 98 x 98 cosines with a threshold in each of six blocks, three differ in OpenVINO; 16 changes of each size
explain two of them, 256 all."""


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
        differing: images with a difference above ``atol``, or another top-1.
        tolerated: of these, as many as may be.
        near_ties: of these, those in which two tokens are so nearly alike that rounding decides between them: the
            model itself, of an image changed by as much, gives what the file gives.
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
        """True if the file computes what the model does."""
        return self.differing - self.near_ties <= self.tolerated and self.near_ties <= max(1, FLIPS * self.images)

    def __str__(self) -> str:
        top1 = "" if self.same_top1 is None else f", same top-1 in {self.same_top1}"
        sizes = ", ".join(map(str, dict.fromkeys(self.batches)))  # each once: a file for single images has 64 of them
        ties = f", {self.near_ties} of them near ties, which rounding decides" if self.near_ties else ""
        return (
            f"{self.images} images in batches of {sizes}: largest difference {self.largest:.1e} "
            f"({self.beyond} beyond {self.atol:g}{ties}){top1}"
        )


def check(exported: Exported, model: nn.Module, images: Tensor | Array, *, atol: float | None = None) -> Parity:
    """Compare a file with the model it was made of, at batch 1, 2 and the rest of the images in one batch.

    Two engines round differently, and where two tokens are nearly equally similar another one then merges: that is no
    fault of the file. An image that differs is a near tie if the model itself gives what the file gives, within
    ``atol``, when the image changes by no more than rounding (`NUDGES`). Any other one is a fault, and so are near ties
    in more than one image of ten.

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
    allowed = (ATOL_HALF if half else ATOL) if atol is None else atol
    classified = exported.metadata.get("output", {}).get("name") == "logits"
    sizes = _batches(len(given), exported.batch)
    differences: list[Array] = []  # the largest of each image
    same: list[Array] = []  # of each image: the same top-1
    odd: list[tuple[Array, Array, Array, Array]] = []  # batches in which images differ, with both outputs
    start = 0
    for size in sizes:
        batch = np.ascontiguousarray(given[start : start + size])
        with torch.inference_mode():
            wanted = as_array(module(torch.from_numpy(batch)))
        found = exported.run(batch)
        if found.shape != wanted.shape:
            raise VitrimError(f"{exported.path} gives {found.shape} where the model gives {wanted.shape}")
        largest, alike = _compared(found, wanted, classified)
        differences.append(largest)
        same.append(alike)
        differs = ~((largest <= allowed) & alike)
        if differs.any():
            odd.append((batch, wanted, found, differs))
        start += size
    worst, alike = np.concatenate(differences), np.concatenate(same)
    beyond = ~(worst <= allowed)  # what is not a number, too
    differing = int((beyond | ~alike).sum())
    near_ties = 0
    if not half and differing <= max(1, FLIPS * start):  # more are a fault, whatever they are
        near_ties = sum(_near_ties(module, *each, allowed, classified) for each in odd)
    return Parity(
        images=start,
        batches=tuple(sizes),
        largest=float(worst.max()),
        beyond=int(beyond.sum()),
        same_top1=int(alike.sum()) if classified and found.ndim == 2 else None,
        atol=allowed,
        differing=differing,
        tolerated=int(FLIPS * start) if half else 0,
        near_ties=near_ties,
    )


def _compared(ones: Array, others: Array, classified: bool) -> tuple[Array, Array]:
    """(B,) the largest difference of each image, and whether its top-1 is the same, if outputs have one."""
    largest = np.abs(ones - others).reshape(len(ones), -1).max(axis=1)
    if not classified or ones.ndim != 2:
        return largest, np.ones(len(ones), dtype=bool)
    return largest, ones.argmax(axis=1) == others.argmax(axis=1)


def _near_ties(
    module: Program, batch: Array, wanted: Array, found: Array, differs: Array, atol: float, classified: bool
) -> int:
    """The number of images of ``batch`` among ``differs`` (B,) bool of which the model, rounded otherwise, gives what
    the file ``found``, and not what it gave, ``wanted``."""
    images = torch.from_numpy(batch)
    if module.normalise:
        images = module.normalised(images)
    plain = Program(module.model).eval()
    config = getattr(getattr(module.model, HANDLE, None), "config", None)
    together = config is not None and config.batch_dependent  # then no image is what it is without the others
    chosen = np.arange(len(batch)) if together else np.flatnonzero(differs)
    some, deviation = images[torch.from_numpy(chosen)], images.std()
    generator = torch.Generator().manual_seed(0)
    explained = ~differs[chosen]
    for tries, nudge in product(TRIES, NUDGES):
        left = np.arange(len(chosen)) if together else np.flatnonzero(~explained)
        if explained.all():
            break
        changed = some[left] + torch.randn(tries, *some[left].shape, generator=generator) * deviation * nudge
        with torch.inference_mode():
            others = [plain(each) for each in (changed if together else changed.flatten(0, 1).split(len(batch)))]
        for other in as_array(torch.cat(others)).reshape(tries, len(left), *wanted.shape[1:]):
            near, like = _compared(other, found[chosen][left], classified)
            far, alike = _compared(other, wanted[chosen][left], classified)
            explained[left] |= (near <= atol) & like & ~((far <= atol) & alike)
    return int((explained & differs[chosen]).sum())


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
