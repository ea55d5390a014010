"""EViT: keep attentive tokens, fuse the others (Liang et al., Not All Patches Are What You Need, ICLR 2022)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitrim.core import loops
from vitrim.core.assignment import Hard, merge
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.plan import Layer
from vitrim.core.registry import reduces, register_method
from vitrim.core.schedule import KeepRule
from vitrim.core.scoring import ScoredPruning, patch_score
from vitrim.core.tokens import TokenState
from vitrim.methods.topk import TopKReducer


@register_method
class EViT(ScoredPruning):
    """Keep the patches with the highest class attention; with ``fuse_token`` the others become one token.

    Keeps ceil(r N) of the N current patches, earlier fused tokens included, at each stage. The fused token is the plain
    sum of the dropped tokens, each times its score s_j = mean over heads of A[cls, j]: not a mean, so its norm is
    small. It comes last, has no special standing later, and may be dropped or fused again. ``keep_rate`` may follow a
    warm-up from 1 through ``reduction.set(keep_rate=...)``. Gradients flow through the fused token's weights s_j into
    this block's queries and keys, as published; the choice of tokens has none.

    Without the fused token it acts at the query, with it between attention and MLP.

    Deviations: the distillation token and registers are protected, where the published code ranks them among the
    patches. ``rule="floor_initial_power"`` gives the counts of the comparative study. Where the rule keeps every patch,
    nothing is fused either. Sizes are tracked for the source map and for pooling heads, but do not enter attention.

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
        if loops.suit(score) and not state.banking:
            return fuse_by_loop(score, keep, state)
        order = score.argsort(dim=1, descending=True)
        # the fused token grows from the best of the dropped ones; the others join it
        kept, joining = order[:, : keep + 1], order[:, keep + 1 :]
        weight = state.pad_prefix(score).scatter(1, order[:, :keep] + state.num_prefix, 1.0)
        into = torch.full_like(joining, keep)
        dropped = order[:, keep:] if state.banking else None  # the sum is no value for the patches in it
        return merge(state, kept, joining, into, weight=weight, normalise=False, dropped=dropped)


def fuse_by_loop(score: Tensor, keep: int, state: TokenState) -> Hard:
    """As `EViTReducer.assign` for scores (B, P) of which ``keep`` are kept, in one call."""
    batch, p, joining = score.shape[0], state.num_prefix, state.num_patches - keep - 1
    index = torch.empty(batch, state.num_tokens + joining, dtype=torch.int64)
    weight = score.new_empty(batch, state.num_tokens)
    _FUSE(score, keep, p, index, weight)
    end = p + keep + 1
    moved, into = index[:, end : end + joining], index[:, end + joining :]
    return Hard(index[:, :end], moved=moved, into=into, weight=weight, normalise=False)


def _fuse(score: Any, keep: int, num_prefix: int, index: Any, weight: Any) -> None:
    """Fill ``index`` with the prefix, the patches by descending ``score`` (B, P) and what the last ones join, and
    ``weight`` (B, N) with 1 for what is kept and the score of the others, as a loop."""
    for b in range(score.shape[0]):
        # NaN comes first, as with operators
        order = np.argsort(np.where(np.isnan(score[b]), -np.inf, -score[b]), kind="mergesort")
        for n in range(num_prefix):
            index[b, n] = n
            weight[b, n] = 1
        for m in range(len(order)):
            patch = order[m]
            index[b, num_prefix + m] = num_prefix + patch
            weight[b, num_prefix + patch] = 1 if m < keep else score[b, patch]
        for m in range(num_prefix + len(order), index.shape[1]):
            index[b, m] = num_prefix + keep


_FUSE = loops.Loop(_fuse)


@reduces(EViT)
def _reducer(config: EViT, layer: Layer) -> type[Reducer[Any]] | None:
    if layer.amount is None:
        return None
    return EViTReducer if config.fuse_token else TopKReducer
