"""EViT: keep attentive tokens, fuse the others (Liang et al., Not All Patches Are What You Need, ICLR 2022)."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, merge
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import KeepRule
from vitrim.core.scoring import ScoredPruning, patch_score
from vitrim.core.tokens import TokenState
from vitrim.methods.topk import TopKReducer


class EViT(ScoredPruning):
    """Keep the patches with the highest class attention; with ``fuse_token`` fuse the others into one token.

    Formulas and deviations are in docs/methods/evit.md.

    Example:
        >>> EViT(keep_rate=0.7, fuse_token=False).counts(196, 12)[-1]
        68
    """

    name = "evit"
    paper = "Not All Patches Are What You Need: Expediting Vision Transformers via Token Reorganizations (ICLR 2022)"

    rule: KeepRule = Field("ceil_current", description="how keep_rate becomes a count")
    fuse_token: bool = Field(True, description="sum the dropped tokens, weighted by score, into one more token")

    def added_tokens(self) -> int:
        return int(self.fuse_token)


class EViTReducer(Reducer[EViT]):
    site = "between"

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return patch_score(attention, state, self.config.score)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        keep = self.num_keep(state)
        score = patch_score(attention, state, self.config.score, gradient=True)
        order = score.argsort(dim=1, descending=True)
        # the fused token has the place of the best dropped token; the rest join it
        kept, joining = order[:, : keep + 1], order[:, keep + 1 :]
        # Plain sums: kept patches have weight 1, and those in the fused token their scores.
        weight = state.pad_prefix(score.scatter(1, order[:, :keep], 1.0))
        into = torch.full_like(joining, keep)
        dropped = order[:, keep:] if state.banking else None  # the sum is no value for the patches in it
        return merge(state, kept, joining, into, weight=weight, normalise=False, dropped=dropped)


@register(EViT)
def _reducer(config: EViT, layer: Layer) -> type[Reducer[Any]] | None:
    if layer.amount is None:
        return None
    return EViTReducer if config.fuse_token else TopKReducer
