"""Attention of Qwen2.5-VL's unreduced tower, for selectors: of its last block that attends to all patches.

As in LightCompress, a cell of 2 x 2 patches gets the mean over its patches of the attention they receive from all
queries of their frame, and of their keys after rotary embedding, in raster order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_window_index

from vitrim.core.attention import Attention
from vitrim.core.tokens import decision_dtype
from vitrim.hosts.shared.hooks import Hook, ThreadHooks


class LastWholeMap(ThreadHooks):
    """Context that keeps the attention inputs of the last block without windows.

    ``grids`` are (n, 3) frames, rows and columns of patches of every image or video of the call.
    """

    def __init__(self, tower: Any, grids: Tensor) -> None:
        self.tower, self.grids = tower, grids
        self.attention: Any = tower.blocks[max(tower.fullatt_block_indexes)].attn
        self.projected: Tensor | None = None
        self.given: Mapping[str, Any] = {}

    def hooks(self) -> list[Hook]:
        begins = partial(self.attention.register_forward_pre_hook, with_kwargs=True)
        return [(begins, self.begin), (self.attention.qkv.register_forward_hook, self.project)]

    def begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.given = kwargs

    def project(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.projected = output

    @torch.no_grad()
    def seen(self) -> list[dict[str, Tensor]]:
        """Entries of `vitrim.core.selection.Seen` per image or video: scores (N,) and keys (N, d) of cells."""
        assert self.projected is not None
        tower, attention = self.tower, self.attention
        q, k, _ = self.projected.unflatten(1, (3, attention.num_heads, -1)).unbind(1)  # (P, H, d), cell by cell
        q, k = apply_rotary_pos_emb_vision(q, k, *self.given["position_embeddings"])
        frames = (self.grids[:, 1] * self.grids[:, 2]).repeat_interleave(self.grids[:, 0]).tolist()
        scores = []
        for queries, keys in zip(q.split(frames), k.split(frames), strict=True):
            own_q, own_k = queries.transpose(0, 1).unsqueeze(0), keys.transpose(0, 1).unsqueeze(0)
            scores.append(Attention(own_q, own_k, None, scale=attention.scaling).column_mean()[0])
        sizes = {"spatial_merge_size": tower.spatial_merge_size, "patch_size": tower.patch_size}
        # The tower sorts its cells by windows: the order is undone after the means.
        order, _ = get_vision_window_index(self.grids, window_size=tower.window_size, **sizes)
        area = tower.spatial_merge_size**2
        cells = [(int(grid.prod()) // area) for grid in self.grids]
        raster = order.argsort().to(q.device)

        def by_cell(values: Tensor) -> list[Tensor]:
            return list(values.unflatten(0, (-1, area)).mean(dim=1)[raster].split(cells))

        means = by_cell(k.mean(dim=1, dtype=decision_dtype(k.dtype)))
        return [{"scores": own, "keys": mean} for own, mean in zip(by_cell(torch.cat(scores)), means, strict=True)]
