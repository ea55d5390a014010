"""PixelPrune: cells of an image that their neighbours predict are left out, before the tower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import ImageSelector
from vitrim.errors import VitrimError

Distance = Literal["max", "mae", "rmse"]
Alike = Callable[[Tensor, Tensor], Tensor]
"""From cells (..., V) and (..., V) to bool (...)."""


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
    """(R, C) bool: the cells (R, C, V) that differ from the neighbour that predicts them.

    In the first row that is the cell on the left, in the first column the one above. Elsewhere it is the one above if
    the cell above left is alike the left one, but not alike the one above: an edge runs downwards; else the left one.
    """
    left, above = alike(cells[:, 1:], cells[:, :-1]), alike(cells[1:], cells[:-1])
    down = above[:, :-1] & ~left[:-1]
    kept = torch.ones(cells.shape[:2], dtype=torch.bool, device=cells.device)
    kept[0, 1:] = ~left[0]
    kept[1:, 0] = ~above[:, 0]
    kept[1:, 1:] = ~torch.where(down, above[:, 1:], left[1:])
    return kept


def anchored(cells: Tensor, alike: Alike) -> Tensor:
    """The same, where neighbours have the values that they are shown with: a cell left out has its prediction's.

    So no cell differs from what stands for it by more than the threshold. In a loop over anti-diagonals, whose cells do
    not depend on each other.
    """
    rows, columns = cells.shape[:2]
    kept = torch.ones(rows * columns, dtype=torch.bool, device=cells.device)
    shown = cells.flatten(0, 1).clone()
    for diagonal in range(1, rows + columns - 1):
        row = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=cells.device)
        column = diagonal - row
        here = row * columns + column
        left, above, corner = here - 1, here - columns, (here - columns - 1).clamp_min(0)
        inside = (row > 0) & (column > 0)
        a, b, d = shown[left], shown[above.clamp_min(0)], shown[corner]
        down = torch.where(inside, alike(d, a) & ~alike(d, b), column == 0)
        own, predicted = shown[here], torch.where(down[:, None], b, a)
        gone = alike(own, predicted)
        kept[here] = ~gone
        shown[here] = torch.where(gone[:, None], predicted, own)
    return kept.view(rows, columns)


@register_selector
class PixelPrune(ImageSelector):
    """Leave out cells of an image that repeat their neighbours, in front of the tower: for documents and screens.

    The number depends on the image, and on its pixels alone. What stays keeps its place, in the tower and in the
    language model, and text continues as behind the whole image. With ``tau=0``, cells equal in every pixel go.
    Images only. Differences from the release: pixels are scaled to [0, 1] by the deviations of the model's published
    processor, not always by 0.5; text behind an image is numbered as in its version for transformers, not for vLLM.

    Example:
        >>> import vitrim
        >>> page = torch.tensor([[1, 1, 1, 1], [1, 5, 5, 1], [1, 1, 1, 1]])
        >>> vitrim.parse_selector("pixelprune").kept_cells(page[:, :, None]).int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 0]]
    """

    name = "pixelprune"
    paper = "PixelPrune, 2026 (2604.00886); after the released code"
    published_with = "Qwen3-VL"
    default_keep = None
    drops_cells = True

    tau: float = Field(
        0.0, ge=0.0, le=1.0, description="largest distance of alike cells, of pixels in [0, 1]; 0: equal"
    )
    distance: Distance = Field("max", description="of all pixels and channels of a cell: the largest, mean, or rms")
    anchored: bool = Field(
        True, description="compare with neighbours as they are shown, so that errors do not add up; false: as they are"
    )

    def faults(self) -> Iterator[str]:
        if self.tokens is not None or self.keep is not None:
            yield "the image decides how many cells stay: leave tokens and keep out"

    def count(self, grid: Sequence[int] | int) -> int:
        raise VitrimError(f"{self.describe()} finds its number image by image, from the pixels: see kept_cells")

    def kept_cells(self, cells: Tensor) -> Tensor:
        alike = within(self.tau, self.distance)
        return (anchored if self.anchored and self.tau > 0 else sliding)(cells, alike)
