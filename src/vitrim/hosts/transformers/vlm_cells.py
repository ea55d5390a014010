"""Cells of patches left out in front of a tower, which gives the others the positions that they have in the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrim.core.selection import ImageSelector
from vitrim.core.tokens import ImagePlaces, decision_dtype
from vitrim.errors import VitrimError
from vitrim.hosts.transformers.vlm_smaller import PackedImages, SmallerImages


class PackedCells(PackedImages):
    """Mixin of families whose towers take tables of positions, and of windows, beside their patches."""

    drops_cells = True
    pixel_std: ClassVar[Sequence[float]] = (0.5, 0.5, 0.5)
    """The published processor divides pixels in [0, 1] by it, channel by channel."""

    @classmethod
    def smaller(cls, model: Any, given: Mapping[str, Any], kind: str, selector: ImageSelector) -> SmallerImages:
        if not selector.drops_cells:
            return super().smaller(model, given, kind, selector)
        if kind == "video" or bool((given["image_grid_thw"][:, 0] != 1).any()):
            raise VitrimError(f"{selector.name} leaves out cells of images: there is no rule for videos")
        patches, grids, tower = given["pixel_values"], given["image_grid_thw"], model.base_model.visual
        kept = kept_cells(model.base_model.config.vision_config, patches, grids, selector, cls.pixel_std)
        area = tower.spatial_merge_size**2
        every = torch.cat(kept).repeat_interleave(area)
        # The library takes such grids for the lengths of images alone, as all positions are given.
        lengths = grids.new_tensor([(1, 1, area * int(own.sum())) for own in kept])
        places = [ImagePlaces(own.cpu(), torch.zeros(len(own), dtype=torch.bool)) for own in kept]
        return SmallerImages(
            {"pixel_values": patches[every], "image_grid_thw": lengths}, places, tables(tower, grids, every)
        )


@torch.no_grad()
def kept_cells(
    config: Any, patches: Tensor, grids: Tensor, selector: ImageSelector, std: Sequence[float]
) -> list[Tensor]:
    """(cells,) bool, those of every image that ``selector`` keeps, from packed ``patches`` of all ``grids`` (n, 3)."""
    kept, side = [], config.spatial_merge_size
    for own, (_, rows, columns) in zip(patches.split(grids.prod(dim=1).tolist()), grids.tolist(), strict=True):
        pixels = cells_of(config, own, std).unflatten(0, (rows // side, columns // side))
        kept.append(selector.kept_cells(pixels).flatten())
    return kept


def cells_of(config: Any, patches: Tensor, std: Sequence[float]) -> Tensor:
    """(cells, values) pixels of the packed ``patches`` (h w, values) of one image, in the scale of [0, 1].

    Of the equal frames of a patch, the first.
    """
    side, area = config.patch_size, config.spatial_merge_size**2
    apart = patches.reshape(-1, area, len(std), config.temporal_patch_size, side * side)[:, :, :, 0]
    wide = apart.to(decision_dtype(patches.dtype))
    return (wide * wide.new_tensor(std)[:, None]).flatten(1)


def tables(tower: Any, grids: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """The tables that a ``tower`` makes of ``grids`` (n, 3) of whole images, for the ``kept`` patches (P,) bool."""
    from transformers import vision_utils as library  # newer than what other families here need

    kept = kept.to(grids.device)
    found = {"position_ids": library.get_vision_position_ids(grids, tower.spatial_merge_size)[kept]}
    if hasattr(tower, "num_grid_per_side"):  # learned positions, interpolated to the grid
        places, weights = library.get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
        found |= {"interp_indices": places[kept], "interp_weights": weights[kept]}
    if hasattr(tower, "window_size"):
        area = tower.spatial_merge_size**2
        order, ends = library.get_vision_window_index(
            grids, tower.spatial_merge_size, window_size=tower.window_size, patch_size=tower.patch_size
        )
        order, stays = order.to(grids.device), kept[::area]
        here = stays[order]
        # The number of every cell that stays, and how many do in front of each end of a window.
        number, before = stays.long().cumsum(0) - 1, F.pad(here.long().cumsum(0), (1, 0))
        found |= {
            "window_index": number[order[here]],
            "cu_window_seqlens": (before[ends.long() // area] * area).to(ends.dtype).unique_consecutive(),
        }
    return found
