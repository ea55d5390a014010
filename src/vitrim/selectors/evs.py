"""EVS, efficient video sampling: tokens of a video that differ from those of the frame before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, as_grid, descending, unit_rows

FIRST = 255.0
"""Change assigned to the tokens of the first frame, which are all kept."""


def change(features: Tensor, frames: int) -> Tensor:
    """(B, N) 1 - cosine of every token of ``features`` (B, N, D) with that at its place in the frame before."""
    # By frame, so that a token and its predecessor have the same index.
    x = unit_rows(features.unflatten(1, (frames, -1)), 1e-8)
    moved = 1 - (x[:, 1:] * x[:, :-1]).sum(dim=-1)
    return torch.cat([torch.full_like(x[:, :1, :, 0], FIRST), moved], dim=1).flatten(1)


def most_changed(features: Tensor, frames: int, count: int) -> Tensor:
    """(B, ``count``) tokens of videos (B, N, D) that change most, frame by frame in raster order.

    Includes the first frame; on ties the earlier token.
    """
    return descending(change(features, frames))[:, :count].sort(dim=1).values


@register_selector
class EVS(Selector):
    """Select tokens of a video that differ from those of the frame before, and its first frame. Images stay complete.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("evs:keep=0.25").count((6, 5, 5))
        37
    """

    name = "evs"
    paper = "Bagrov et al., Efficient Video Sampling: Pruning Temporally Redundant Tokens, 2025 (2510.14624)"
    rounding = "floor"
    published_with = "Nemotron Nano VL, Qwen2.5-VL, Qwen3-VL (vLLM)"

    def count(self, grid: Sequence[int] | int) -> int:
        frames, rows, columns = as_grid(grid)
        return max(rows * columns, self.budget(frames * rows * columns))

    def select(self, seen: Seen) -> list[Choice]:
        grid = seen.known_grid(self)
        return [Choice(kept) for kept in most_changed(seen.features, grid[0], self.count(grid))]
