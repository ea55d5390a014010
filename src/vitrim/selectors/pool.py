"""Pooling over the cells of a coarser grid, a baseline for selectors."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod, sqrt

import torch
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, FrameGrid, Seen, Selector, as_grid
from vitrim.core.tokens import decision_dtype


def nearest_rectangle(rows: int, columns: int, cells: int) -> tuple[int, int]:
    """Rows and columns of at most ``cells`` cells, nearest to those of the grid scaled to that area.

    Ties go to more cells, then to more rows.
    """
    scale = min(sqrt(cells / (rows * columns)), 1.0)
    fitting = [(r, c) for r in range(1, min(rows, cells) + 1) for c in range(1, min(columns, cells // r) + 1)]
    far = {(r, c): round((r - rows * scale) ** 2 + (c - columns * scale) ** 2, 9) for r, c in fitting}
    return min(far, key=lambda size: (far[size], -prod(size), -size[0]))


def coarser(grid: FrameGrid, tokens: int) -> FrameGrid:
    """The grid of at most ``tokens`` cells, equal in every frame; with more frames than tokens, frames join, too."""
    frames = min(grid[0], tokens)
    return (frames, *nearest_rectangle(grid[1], grid[2], tokens // frames))


def squared(grid: Sequence[int] | int) -> FrameGrid:
    """The ``grid``, or a square in place of one row that fills one.

    Example:
        >>> squared(576), squared((2, 3)), squared(7)
        ((1, 24, 24), (1, 2, 3), (1, 1, 7))
    """
    frames, rows, columns = as_grid(grid)
    side = isqrt(columns)
    return (frames, side, side) if rows == 1 and side * side == columns else (frames, rows, columns)


def cells(grid: FrameGrid, coarse: FrameGrid) -> tuple[Tensor, Tensor]:
    """(N,) cell of every token, and (n,) token in the middle of every cell.

    Cells are disjoint; their sides differ by at most one token.
    """
    cell, middle = torch.zeros(grid, dtype=torch.long), torch.zeros(coarse, dtype=torch.long)
    for axis, (fine, few) in enumerate(zip(grid, coarse, strict=True)):
        shape = [-1 if other == axis else 1 for other in range(3)]
        # The cell of a line, rounded down: sides differ by at most one token.
        own = torch.arange(fine) * few // fine
        first = torch.searchsorted(own, torch.arange(few))
        centre = (first + torch.cat([first[1:], torch.tensor([fine])]) - 1) // 2
        cell = cell * few + own.view(shape)
        middle = middle * fine + centre.view(shape)
    return cell.flatten(), middle.flatten()


@register_selector
class Pool(Selector):
    """Replace tokens by their means over the cells of a coarser grid: a baseline that costs nothing.

    The grid is the nearest rectangle of at most that many cells, so there may be fewer tokens than requested (56 of 63,
    of 24 x 24). A mean has the position of its cell's middle. Every frame of a video is pooled separately. Tokens with
    unknown rows and columns, such as those of a reduced tower, count as a square if they fill one, else as one row.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("pool:tokens=64").count((24, 24))
        64
    """

    name = "pool"
    paper = "none, a baseline; see VTC-Bench (2510.07143) and UniPruneBench"
    merges = True
    published_with = "no model: a baseline for any"

    def grids(self, grid: Sequence[int] | int) -> tuple[FrameGrid, FrameGrid]:
        """Grid of the tokens, and grid of their cells."""
        fine = squared(grid)
        return fine, coarser(fine, self.budget(prod(fine)))

    def count(self, grid: Sequence[int] | int) -> int:
        return prod(self.grids(grid)[1])

    def select(self, seen: Seen) -> list[Choice]:
        x = seen.features
        fine, coarse = self.grids(x.shape[1] if seen.grid is None else seen.grid)
        own, middle = (places.to(x.device) for places in cells(fine, coarse))
        sizes = own.bincount(minlength=len(middle))
        wide = x.to(decision_dtype(x.dtype))
        # In at least float32: a sum of many half-precision tokens loses its last digits.
        sums = wide.new_zeros(len(x), len(middle), x.shape[2]).index_add(1, own, wide)
        means = (sums / sizes[:, None].to(wide.dtype)).to(x.dtype)
        return [Choice(middle, tokens, merged=sizes > 1) for tokens in means]
