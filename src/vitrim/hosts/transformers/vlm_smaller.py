"""Images made smaller in front of a tower, so that fewer tokens come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrim.core.selection import FrameGrid, ImageSelector
from vitrim.core.tokens import ImagePlaces, decision_dtype
from vitrim.selectors.pool import cells


@dataclass(frozen=True)
class SmallerImages:
    """The images of a prompt, or its videos, with fewer patches.

    Attributes:
        inputs: of the model, that replace those of the whole images.
        places: the tokens of every image, among those of the whole one.
        options: that the encoder needs.
    """

    inputs: Mapping[str, Tensor]
    places: Sequence[ImagePlaces]
    options: Mapping[str, Any] = field(default_factory=dict)


def middles(grid: FrameGrid, few: FrameGrid, further: int = 0) -> ImagePlaces:
    """The tokens of an image of ``grid`` made smaller to ``few``: each has the place of the middle of its cell.

    ``further`` tokens have no place in the grid, such as a class token; negative if places lack a token.
    """
    front = torch.arange(max(further, 0))
    own = cells(grid, few)[1][max(-further, 0) :] + further
    kept = torch.zeros(prod(grid) + further, dtype=torch.bool)
    kept[own] = True
    merged = kept.clone() if few != grid else torch.zeros_like(kept)
    kept[front] = True
    return ImagePlaces(kept, merged)


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


def smaller_pixels(
    pixels: Tensor, selector: ImageSelector, side: tuple[int, int]
) -> tuple[Tensor, FrameGrid, FrameGrid]:
    """``pixels`` (B, C, H, W) made smaller, and the grids of tokens before and after.

    ``side`` are rows and columns of pixels of a token.
    """
    grid = (1, pixels.shape[-2] // side[0], pixels.shape[-1] // side[1])
    few = selector.smaller(grid)
    return resized(pixels, few[1] * side[0], few[2] * side[1]), grid, few


def smaller_patches(
    config: Any, patches: Tensor, grids: Tensor, selector: ImageSelector
) -> tuple[Tensor, Tensor, list[ImagePlaces]]:
    """Packed ``patches`` (sum, values) made smaller, their grids, and the places of their tokens.

    Args:
        config: of the tower.
        patches: cell by cell.
        grids: (n, 3) frames, rows and columns of patches of every image or video.
        selector: keeps the frames.
    """
    cell = config.spatial_merge_size
    own, rows_of_grids, places = [], [], []
    for part, grid in zip(patches.split(grids.prod(dim=1).tolist()), grids.tolist(), strict=True):
        fine = (grid[0], grid[1] // cell, grid[2] // cell)
        few = selector.smaller(fine)
        clip = unpacked(config, part, (grid[0], grid[1], grid[2]))
        scale = cell * config.patch_size
        own.append(packed(config, resized(clip, few[1] * scale, few[2] * scale)))
        rows_of_grids.append([few[0], few[1] * cell, few[2] * cell])
        places.append(middles(fine, few))
    return torch.cat(own), grids.new_tensor(rows_of_grids), places


class PackedImages:
    """Mixin of families whose towers read patches of images of any size, packed cell by cell."""

    @classmethod
    def resizes(cls, model: Any) -> bool:
        return True

    @classmethod
    def smaller(cls, model: Any, given: Mapping[str, Any], kind: str, selector: ImageSelector) -> SmallerImages:
        pixels, grids = "pixel_values" if kind == "image" else "pixel_values_videos", f"{kind}_grid_thw"
        patches, grid, places = smaller_patches(
            model.base_model.config.vision_config, given[pixels], given[grids], selector
        )
        return SmallerImages({pixels: patches, grids: grid}, places)


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
