"""LV-ViT, `vitrim.models.lv_vit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrim.core.plan import HostFacts
from vitrim.core.tokens import TokenState, take
from vitrim.hosts.timm.common import TimmHost
from vitrim.hosts.timm.vit import ReducedTimmBlock
from vitrim.models.lv_vit import LVBlock, LVViT


class ReducedLVBlock(ReducedTimmBlock, LVBlock):
    """LV-ViT's reduced block: x + f(x) / lambda, where f is attention, then the MLP."""

    def outgoing(self, x: Tensor, state: TokenState) -> Tensor:
        x = super().outgoing(x, state)
        # the auxiliary head takes a maximum over all rows, which padding must not change
        takes_maximum = self.last and self.head_rows is None
        padded = state.mask is not None and not state.asked.full_grids
        return without_padding(x, state) if takes_maximum and padded else x


def without_padding(x: Tensor, state: TokenState) -> Tensor:
    """(B, N, C) with padding replaced by copies of the image's first real patch, or of token 0 if none is left."""
    assert state.mask is not None
    real = state.mask.clone()
    real[:, : state.num_prefix] = False
    # The first True; token 0 where there is none.
    first = real.to(torch.int8).argmax(dim=1, keepdim=True)
    own = torch.arange(x.shape[1], device=x.device)
    return take(x, torch.where(state.mask, own, first))


class LVViTHost(TimmHost):
    """LV-ViT, with the auxiliary head or without. See [models](models/README.md).

    The auxiliary head takes a maximum over the remaining patches: merging does not change it, and pruned patches are
    excluded, as in DynamicViT and GTP. Images that keep different numbers are handled separately.
    """

    name = "vitrim LV-ViT"
    heads = ("class token",)
    reduced_blocks = (ReducedLVBlock,)
    model_classes = (LVViT,)
    calls = (*TimmHost.calls, "forward_dense", "pool")
    dense_calls = (*TimmHost.dense_calls, "forward_dense")

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        return replace(super().facts(model), takes_maximum=model.aux_head is not None)

    @classmethod
    def head_rows(cls, model: Any) -> int | None:
        return super().head_rows(model) if model.aux_head is None else None
