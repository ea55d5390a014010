"""Fixed token counts for adaptive methods, because a file has one graph for all images.

`frozen` uses the mean counts for every image; `bound` gives every image as many slots as nearly all images need.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrim.core.method import Adaptive, MethodConfig
from vitrim.core.reduce import reduce_
from vitrim.core.registry import host_of, parse_method
from vitrim.engines.copies import shared_copy, take_learned
from vitrim.errors import VitrimError

ROWS = 16
"""Rows of a matrix product that engines compute together. In int8 on AMX, products of 138 rows take as long as those of
197, and products of 144 rows a sixth less (docs/results/engines.md)."""

MULTIPLE = 8
"""Slots, prefix included, are a multiple of this: matrix units prefer such row counts."""


FITTED = 512
"""Default number of images to find counts on."""


def frozen(
    model: nn.Module, method: MethodConfig | str, images: Iterable[Tensor], *, learned: Path | None = None
) -> MethodConfig:
    """``method`` with fixed counts per block for every image: the means over ``images``, rounded by its ``align``.

    Args:
        model: a supported, unreduced host with trained weights; not changed.
        method: a method whose counts depend on the images.
        images: representative batches (B, C, H, W).
        learned: folder of `Reduction.save`, whose parameters are loaded if it is of this method, else they are random.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8).eval()
        >>> frozen(model, "atm:alpha=0.1,beta=0,theta_min=0", [torch.randn(2, 3, 32, 32)]).is_adaptive()
        False
    """
    config = adaptive_one(method, "freeze")
    return frozen_at(config, patches_per_block(model, config.changed("align"), images, learned))


def frozen_at(config: Adaptive, counts: NDArray[np.int64]) -> MethodConfig:
    """``config`` fixed at the means of `patches_per_block`."""
    return config.frozen(int(counts[0, 0]), [statistics.fmean(block) for block in counts[:, 1:].T.tolist()])


def schedules_in_words(
    model: nn.Module, methods: Iterable[MethodConfig], images: Sequence[Tensor], learned: Path | None = None
) -> list[str]:
    """A line for every one of ``methods`` that can be frozen, with its schedule on ``images``; see `frozen`."""
    return [
        f"{config.describe()} frozen on these images: {frozen(model, config, images, learned=learned).describe()} "
        "(vitrim freeze)"
        for config in methods
        if can_freeze(config)
    ]


def can_freeze(config: MethodConfig) -> bool:
    """True for a method whose counts depend on the images and can be fixed at their means."""
    return isinstance(config, Adaptive) and config.is_adaptive() and "freeze" in config.traits.fixed_by


def levelled(config: MethodConfig, patches: int) -> MethodConfig:
    """``config`` with ``align`` at `ROWS`, where it can align and does not yet, of images with at least 8 `ROWS`
    ``patches``: of fewer, rounding would take back too much.

    Example:
        >>> import vitrim
        >>> [levelled(vitrim.ToMe(r=8), patches).describe() for patches in (196, 64)]
        ['tome:r=8,align=16', 'tome:r=8']
    """
    if config.align > 1 or not config.can_align() or patches < 8 * ROWS:
        return config
    return config.changed(align=ROWS)


def bound(
    model: nn.Module,
    method: MethodConfig | str,
    images: Iterable[Tensor],
    *,
    quantile: float = 0.99,
    learned: Path | None = None,
) -> MethodConfig:
    """``method`` with fixed slots per block, enough for the share ``quantile`` of ``images``; a mask marks empty slots.

    Images that fit give the output of the adaptive method; the others are reduced further until they fit. Slots, prefix
    included, are rounded up to multiples of 8, or of the method's ``align``. ``quantile`` is above 0 and at most 1;
    `frozen` has the other arguments.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8).eval()
        >>> bound(model, "atm:alpha=0.1,beta=0,theta_min=0", [torch.randn(2, 3, 32, 32)]).obstacle() is None
        True
    """
    if not 0.0 < quantile <= 1.0:
        raise VitrimError(f"capacity={quantile} must be above 0 and at most 1: the share of images that fit")
    config = adaptive_one(method, "capacity")
    prefix = host_of(model).facts(model).num_prefix
    counts = patches_per_block(model, config, images, learned)
    slots, current, multiple = [], int(counts[0, 0]), config.align if config.align > 1 else MULTIPLE
    for block in counts[:, 1:].T:
        needed = math.ceil(float(np.quantile(block, quantile, method="higher")))
        # No block gets more slots than the one before: tokens never come back.
        current = min(current, math.ceil((needed + prefix) / multiple) * multiple - prefix)
        slots.append(current)
    return config.bounded(slots)


def adaptive_one(method: MethodConfig | str, way: Literal["freeze", "capacity"]) -> Adaptive:
    """The method, if ``way`` can fix its counts (`Traits.fixed_by`); else raise `VitrimError`."""
    config = parse_method(method) if isinstance(method, str) else method
    if isinstance(config, Adaptive) and config.is_adaptive() and way in config.traits.fixed_by:
        return config
    what = "frozen" if way == "freeze" else "given a capacity"
    why = (config.obstacle() or "") if config.is_adaptive() else "its counts are fixed already"
    raise VitrimError(f"{config.name} cannot be {what}: {why}")


def patches_per_block(
    model: nn.Module, config: MethodConfig, images: Iterable[Tensor], learned: Path | None = None
) -> NDArray[np.int64]:
    """(I, 1 + L) patches of every image, initially and after every block; ``learned`` as in `freeze`."""
    reduced = shared_copy(model).eval()
    reduction = reduce_(reduced, config, record=True)
    take_learned(reduction, learned)
    found = []
    with torch.inference_mode():
        for batch in images:
            # One by one, because some methods decide by the mean of a batch.
            for image in batch.split(1):
                reduced(image)
                found.append([state.num_patches for state in reduction.states])
    if not found:
        raise VitrimError(
            f"the counts of {config.name} depend on the images: give some to find them, with --images DATA or images="
        )
    return np.array(found)
