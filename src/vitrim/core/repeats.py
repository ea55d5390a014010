"""Cells of images that repeat a neighbour, found as a lossless codec predicts pixels: for PixelPrune."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitrim.core.options import Options

Distance = Literal["max", "mae", "rmse"]
Alike = Callable[[Tensor, Tensor], Tensor]
"""From cells (..., V) and (..., V) to bool (...)."""


class RepeatOptions(Options):
    """Options of what leaves out the cells of an image that repeat a neighbour."""

    tau: float = Field(
        0.0, ge=0.0, le=1.0, description="largest distance of alike cells, of pixels in [0, 1]; 0: equal"
    )
    distance: Distance = Field("max", description="of all pixels and channels of a cell: the largest, mean, or rms")
    anchored: bool = Field(
        True, description="compare with neighbours as they are shown, so that errors do not add up; false: as they are"
    )

    def kept_cells(self, cells: Tensor) -> Tensor:
        """(..., R, C) bool: the cells (..., R, C, V) of images that stay, from their pixels in the scale of [0, 1].

        A constant may be added to the pixels of a channel.

        Example:
            >>> page = torch.tensor([[1, 1, 1, 1], [1, 5, 5, 1], [1, 1, 1, 1]])
            >>> RepeatOptions().kept_cells(page[:, :, None]).int().tolist()
            [[1, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 0]]
        """
        alike = within(self.tau, self.distance)
        return (anchored if self.anchored and self.tau > 0 else sliding)(cells, alike)


def within(tau: float, distance: Distance) -> Alike:
    """The test of two cells: a distance of at most ``tau``."""

    def alike(first: Tensor, second: Tensor) -> Tensor:
        if tau == 0:
            return (first == second).all(dim=-1)
        apart = (first - second).abs()
        if distance == "max":
            return apart.amax(dim=-1) <= tau
        return (apart.mean(dim=-1) if distance == "mae" else apart.square().mean(dim=-1).sqrt()) <= tau

    return alike


def sliding(cells: Tensor, alike: Alike) -> Tensor:
    """(..., R, C) bool: the cells (..., R, C, V) that differ from the neighbour that predicts them.

    In the first row that is the cell on the left, in the first column the one above. Elsewhere it is the one above if
    the cell above left is alike the left one, but not alike the one above: an edge runs downwards; else the left one.
    """
    left, above = alike(cells[..., 1:, :], cells[..., :-1, :]), alike(cells[..., 1:, :, :], cells[..., :-1, :, :])
    down = above[..., :-1] & ~left[..., :-1, :]
    inside = (down & above[..., 1:]) | (~down & left[..., 1:, :])  # not every engine has `where` of flags
    first, others = F.pad(left[..., :1, :], (1, 0)), torch.cat([above[..., :1], inside], dim=-1)
    return ~torch.cat([first, others], dim=-2)


def anchored(cells: Tensor, alike: Alike) -> Tensor:
    """The same, where neighbours have the values that they are shown with: a cell left out has its prediction's.

    So no cell differs from what stands for it by more than the threshold. In a loop over anti-diagonals, whose cells do
    not depend on each other.
    """
    rows, columns = cells.shape[-3:-1]
    shown = cells.flatten(-3, -2).clone()
    kept = torch.ones_like(shown[..., 0], dtype=torch.bool)
    for diagonal in range(1, rows + columns - 1):
        row = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=cells.device)
        column = diagonal - row
        here = row * columns + column
        left, above, corner = here - 1, here - columns, (here - columns - 1).clamp_min(0)
        inside = (row > 0) & (column > 0)
        a, b, d = shown[..., left, :], shown[..., above.clamp_min(0), :], shown[..., corner, :]
        down = (inside & alike(d, a) & ~alike(d, b)) | (column == 0)
        own, predicted = shown[..., here, :], torch.where(down[..., None], b, a)
        gone = alike(own, predicted)
        kept[..., here] = ~gone
        shown[..., here, :] = torch.where(gone[..., None], predicted, own)
    return kept.view(cells.shape[:-1])
