"""Images made smaller in front of a tower, so that fewer tokens come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrim.core.selection import FrameGrid
from vitrim.core.tokens import ImagePlaces, decision_dtype
from vitrim.selectors.pool import cells

Shrink = Callable[[FrameGrid], FrameGrid]
"""From the grid of an image's tokens to that of the smaller one."""


@dataclass(frozen=True)
class SmallerImages:
    """The images of a prompt, or its videos, made smaller.

    Attributes:
        inputs: of the model, that replace those of the whole images.
        grids: of every image, of the tokens before and after.
        options: that the encoder needs.
        further: tokens of every image without a place in its grid, such as a class token; negative if places lack one.
    """

    inputs: Mapping[str, Tensor]
    grids: Sequence[tuple[FrameGrid, FrameGrid]]
    options: Mapping[str, Any] = field(default_factory=dict)
    further: int = 0

    def places(self) -> list[ImagePlaces]:
        """The tokens of every image: each has the place of the middle of its cell in the whole image."""
        found = []
        for grid, few in self.grids:
            front = torch.arange(max(self.further, 0))
            own = cells(grid, few)[1][max(-self.further, 0) :] + self.further
            kept = torch.zeros(prod(grid) + self.further, dtype=torch.bool)
            kept[own] = True
            merged = kept.clone() if few != grid else torch.zeros_like(kept)
            kept[front] = True
            found.append(ImagePlaces(kept, merged))
        return found


def resized(images: Tensor, rows: int, columns: int) -> Tensor:
    """``images`` (B, C, H, W) at ``rows`` x ``columns`` pixels: bicubic with antialiasing, as processors resize.

    Example:
        >>> resized(torch.ones(1, 3, 8, 8), 4, 2).shape
        torch.Size([1, 3, 4, 2])
    """
    if images.shape[-2:] == (rows, columns):
        return images
    wide = images.to(decision_dtype(images.dtype))
    return F.interpolate(wide, size=(rows, columns), mode="bicubic", antialias=True).to(images.dtype)


def smaller_pixels(pixels: Tensor, shrink: Shrink, side: tuple[int, int]) -> tuple[Tensor, FrameGrid, FrameGrid]:
    """``pixels`` (B, C, H, W) made smaller, and the grids of tokens before and after.

    ``side`` are rows and columns of pixels of a token.
    """
    grid = (1, pixels.shape[-2] // side[0], pixels.shape[-1] // side[1])
    few = shrink(grid)
    return resized(pixels, few[1] * side[0], few[2] * side[1]), grid, few


def smaller_patches(
    config: Any, patches: Tensor, grids: Tensor, shrink: Shrink
) -> tuple[Tensor, Tensor, list[tuple[FrameGrid, FrameGrid]]]:
    """Packed ``patches`` (sum, values) made smaller, their grids, and those of tokens before and after.

    Args:
        config: of the tower.
        patches: cell by cell.
        grids: (n, 3) frames, rows and columns of patches of every image or video.
        shrink: keeps the frames.
    """
    cell = config.spatial_merge_size
    own, rows_of_grids, tokens = [], [], []
    for part, grid in zip(patches.split(grids.prod(dim=1).tolist()), grids.tolist(), strict=True):
        fine = (grid[0], grid[1] // cell, grid[2] // cell)
        few = shrink(fine)
        clip = unpacked(config, part, (grid[0], grid[1], grid[2]))
        scale = cell * config.patch_size
        own.append(packed(config, resized(clip, few[1] * scale, few[2] * scale)))
        rows_of_grids.append([few[0], few[1] * cell, few[2] * cell])
        tokens.append((fine, few))
    return torch.cat(own), grids.new_tensor(rows_of_grids), tokens


class PackedImages:
    """Mixin of families whose towers read patches of images of any size, packed cell by cell."""

    @classmethod
    def resizes(cls, model: Any) -> bool:
        return True

    @classmethod
    def smaller(cls, model: Any, given: Mapping[str, Any], kind: str, shrink: Shrink) -> SmallerImages:
        pixels, grids = "pixel_values" if kind == "image" else "pixel_values_videos", f"{kind}_grid_thw"
        patches, grid, tokens = smaller_patches(model.config.vision_config, given[pixels], given[grids], shrink)
        return SmallerImages({pixels: patches, grids: grid}, tokens)


def unpacked(config: Any, patches: Tensor, grid: FrameGrid) -> Tensor:
    """(F, C, H, W) frames of the packed ``patches`` (t h w, values) of one clip of ``grid`` (t, h, w)."""
    cell, side, together = config.spatial_merge_size, config.patch_size, config.temporal_patch_size
    times, rows, columns = grid
    shape = (times, rows // cell, columns // cell, cell, cell, -1, together, side, side)
    clip = patches.reshape(shape).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    return clip.reshape(times * together, -1, rows * side, columns * side)


def packed(config: Any, clip: Tensor) -> Tensor:
    """(t h w, values) patches, cell by cell, of a ``clip`` (F, C, H, W) with a multiple of the frames of a patch."""
    cell, side, together = config.spatial_merge_size, config.patch_size, config.temporal_patch_size
    rows, columns = clip.shape[2] // side // cell, clip.shape[3] // side // cell
    shape = (-1, together, clip.shape[1], rows, cell, side, columns, cell, side)
    return clip.reshape(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).flatten(0, 4).flatten(1)
