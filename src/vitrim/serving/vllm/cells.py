"""Images changed before Qwen's towers: made smaller, or cells of patches left out, which the towers are told of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.model_executor.layers.attention import MMEncoderAttention

from vitrim.core.selection import ImageSelector
from vitrim.errors import VitrimError
from vitrim.hosts.transformers.vlm_cells import kept_cells
from vitrim.hosts.transformers.vlm_smaller import smaller_patches
from vitrim.serving.vllm.setting import FIELD

CELLS = "vitrim_cells"
"""Name of an image's tensor of cells (rows * columns,) bool, of which those that stay are True."""
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
BYTE = 1 / 255
"""Pixels may come as bytes: vLLM normalizes them on the device."""


def changed(info: Any, found: Mapping[str, Any], modality: str, selector: ImageSelector) -> dict[str, Any]:
    """Pixels and grids of all images, or videos, that a processor ``found``, as a ``selector`` changes them.

    ``info`` is vLLM's of the processor. Where cells are left out, grids stay those of the whole images.
    """
    pixels, grids = PIXELS[modality], f"{modality}_grid_thw"
    if pixels not in found:
        raise VitrimError(
            f"{selector.name} acts on pixels, and {modality}s came as embeddings: ask for {FIELD}=none, or another"
        )
    config, patches, tables = info.get_hf_config().vision_config, found[pixels], found[grids]
    wide = patches.is_floating_point()
    if not selector.drops_cells:
        # what lies between two bytes, or beyond them, would be lost
        patches, tables, _ = smaller_patches(config, patches if wide else patches.float(), tables, selector)
        return {pixels: patches, grids: tables}
    if modality == "video":
        raise VitrimError(f"{selector.name} leaves out cells of images: for a video ask for {FIELD}=none, or another")
    std = info.get_image_processor().image_std
    kept = kept_cells(config, patches, tables, selector, std if wide else [BYTE] * len(std))
    area = config.spatial_merge_size**2
    return {pixels: patches[torch.cat(kept).repeat_interleave(area)], CELLS: kept}


def features_of(tower: Any, patches: Tensor, grids: Sequence[Sequence[int]], kept: Sequence[Tensor]) -> list[Tensor]:
    """Features (n, D) of the cells of each image that are ``kept``, from their ``patches`` alone.

    ``grids`` are frames, rows and columns of patches of the whole images: cells keep their places in these.
    """
    # The tower makes its tables for whole images.
    found, stays = tower.prepare_encoder_metadata(grids), torch.cat([*kept]).cpu()
    area, here = tower.spatial_merge_size**2, stays
    if "window_index" in found:  # whose tables go window by window
        order = found["window_index"].cpu()
        here = stays[order]
        # the number of every cell that stays, and how many do before each end of a window
        number, before = stays.long().cumsum(0) - 1, F.pad(here.long().cumsum(0), (1, 0))
        index = number[order[here]]
        ends, start = [torch.zeros(1, dtype=torch.long)], 0
        for grid, own in zip(grids, kept, strict=True):
            ends.append(tower.get_rope_by_thw(*grid)[3].long().cpu() // area + start)
            start += len(own)
        found |= {"window_index": index.to(tower.device), "reverse_indices": index.argsort().to(tower.device)}
        found |= _lengths(tower, before[torch.cat(ends)].unique_consecutive() * area, "window")
    rows = here.repeat_interleave(area).to(tower.device)
    names = ("pos_embeds", "rotary_pos_emb_cos", "rotary_pos_emb_sin")
    found |= {name: found[name][rows] for name in names if name in found}
    counts = [int(own.sum()) for own in kept]
    found |= _lengths(tower, area * torch.tensor([0, *counts]).cumsum(0), "full" if "window_index" in found else None)
    return list(tower(patches, grids, encoder_metadata=found).split(counts))


def _lengths(tower: Any, ends: Tensor, part: str | None) -> dict[str, Any]:
    """The names and numbers by which vLLM's towers tell attention where sequences end; ``part`` names some blocks'."""
    backend, table, device = tower.attn_backend, ends.numpy().astype(numpy.int32), tower.device
    width = getattr(tower, "hidden_size", None) or tower.embed_dim
    own = MMEncoderAttention.maybe_recompute_cu_seqlens(
        backend,
        table,
        width,
        getattr(tower, "tp_size", 1),
        device,
        fp8_padded_hidden_size=getattr(tower, "fp8_padded_hidden_size", None),
    )
    end = "" if part is None else f"_{part}"
    return {
        "cu_window_seqlens" if part == "window" else "cu_seqlens": own,
        f"max_seqlen{end}": torch.tensor(MMEncoderAttention.compute_max_seqlen(backend, table), dtype=torch.int32),
        f"sequence_lengths{end}": MMEncoderAttention.maybe_compute_seq_lens(backend, table, device),
    }
