"""V-CAST: tokens of a video that stand out of their frame; frames where the video turns get more."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, as_grid, descending, unit_rows
from vitrim.core.tokens import decision_dtype

LEAST = 1e-6
"""Smallest length that anything is divided by."""

Remainders = Literal["largest", "released"]


def curvature(means: Tensor) -> Tensor:
    """(T,) 1 - cosine of the steps to and from every frame, of the ``means`` (T, D) of unit length; 1 at both ends."""
    bends = torch.ones_like(means[:, 0])
    steps = unit_rows(means.diff(dim=0), LEAST)
    bends[1:-1] -= (steps[:-1] * steps[1:]).sum(dim=1)
    return bends


def shared_out(weights: Sequence[float], count: int, size: int, least: int, remainders: Remainders) -> list[int]:
    """The number of tokens of every frame, ``count`` in all: ``least`` each, and the others by weight.

    Fractions are rounded down. What is left over goes to the frames with the largest fractions, one each and then one
    each again; "released": all of it to the first of them until it is full, because its fraction stays the largest.

    Args:
        weights: of the frames, sum 1.
        count: from ``least`` times the frames to ``size`` times the frames.
        size: tokens of a frame.
        least: at most ``size``.
        remainders: as above.

    Example:
        >>> weights = [0.4, 0.1, 0.1, 0.4]
        >>> shared_out(weights, 6, 3, 1, "largest"), shared_out(weights, 6, 3, 1, "released")
        ([2, 1, 1, 2], [3, 1, 1, 1])
    """
    # floating-point error rounded off: equal frames stay equal
    raw = [round(weight * (count - least * len(weights)), 9) for weight in weights]
    counts = [least + min(floor(own), size - least) for own in raw]
    order = sorted(range(len(raw)), key=lambda frame: floor(raw[frame]) - raw[frame])
    left = count - sum(counts)
    while left:
        for frame in order:
            extra = min(left, size - counts[frame], left if remainders == "released" else 1)
            counts[frame] += extra
            left -= extra
    return counts


def outstanding(video: Tensor, count: int, least: int, temperature: float, remainders: Remainders) -> Tensor:
    """(``count``,) tokens of a ``video`` (T, n, D), in raster order: of a frame those unlike its mean, and long ones.

    Args:
        video: its T frames of n tokens.
        count: of all frames.
        least: tokens of every frame.
        temperature: of the softmax of the frames' `curvature`.
        remainders: see `shared_out`.
    """
    x = video.to(decision_dtype(video.dtype))
    means = unit_rows(x.mean(dim=1), LEAST)
    weights = (curvature(means).double() / temperature).softmax(dim=0).tolist()
    counts = shared_out(weights, count, x.shape[1], least, remainders)
    length = x.norm(dim=2)
    low, high = length.amin(dim=1, keepdim=True), length.amax(dim=1, keepdim=True)
    unlike = 1 - (unit_rows(x, LEAST) * means[:, None]).sum(dim=2)
    rank = descending(unlike + (length - low) / (high - low + LEAST)).argsort(dim=1)
    return (rank < rank.new_tensor(counts)[:, None]).flatten().nonzero().squeeze(1)


@register_selector
class VCast(Selector):
    """Select the tokens of a video that stand out of their frame; frames where the video turns keep more.

    Images, as videos of one frame, stay complete. Tokens that are left over after rounding go to different frames, not
    all to one as in the release: see ``remainders``.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("vcast:keep=0.25").count((6, 5, 5))
        38
    """

    name = "vcast"
    paper = "Lin et al., V-CAST, 2026 (2603.27650)"
    published_with = "Qwen3-VL"

    least: int = Field(1, ge=0, description="tokens that every frame keeps")
    temperature: Annotated[float, Field(gt=0.0)] = Field(0.7, description="of the softmax of the frames' curvatures")
    remainders: Remainders = Field(
        "largest",
        description="what is left over by rounding: one token each to the frames with the largest fractions, or as "
        "released all to the first of them",
    )

    def count(self, grid: Sequence[int] | int) -> int:
        frames, rows, columns = as_grid(grid)
        size = rows * columns
        return size if frames == 1 else max(self.budget(frames * size), frames * min(self.least, size))

    def select(self, seen: Seen) -> list[Choice]:
        grid = seen.known_grid(self)
        count, least = self.count(grid), min(self.least, grid[1] * grid[2])
        videos = seen.features.unflatten(1, (grid[0], -1))
        return [Choice(outstanding(video, count, least, self.temperature, self.remainders)) for video in videos]
