"""timm's `Eva`: EVA, EVA-02, `vit_*_rope`, DINOv3 and the plain Perception Encoders.

Rotary tables are read at each token's position, so remaining tokens keep their angles. After patch dropout in training,
positions count in its shorter tables.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.attention import AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor

from vitrim.core.attention import Attention
from vitrim.core.tokens import TokenState
from vitrim.hosts.timm.common import BiasBeside, PostNorm, PreNormGamma, TimmHost, refuse_mask


class ReducedRopeBlock(BiasBeside):
    """Base of timm's reduced blocks with rotary embedding, without their norms."""

    attention_classes = (EvaAttention, AttentionRope)
    output_names = ("norm", "proj", "proj_drop")

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        refuse_mask(attn_mask, is_causal)
        return self.run(x, rope)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn: Any = self.attn
        q, k, v = self.project_all(x, rows)
        dtype = k.dtype
        # Keys of a group are shared by its heads; methods see one key per head.
        q, k = attn.q_norm(q), expand_groups(attn.k_norm(k), attn.num_heads)
        k_raw, rope = None, given
        if rope is not None:
            # (P0, 2d); (H, P0, 2d) for one depth of mixed tables; after patch dropout (B, 1 or H, P0, 2d)
            table, k_raw = state.patch_rows(rope), k
            if table.dim() == 3 and rope.dim() == 2:
                table = table.unsqueeze(1)
            q, k = (_rotate(each, table, state.num_prefix, attn.rotate_half).to(dtype) for each in (q, k))
        v = None if v is None else expand_groups(v, attn.num_heads)
        return self.attention_of(attn, state, q, k, v, k_raw=k_raw)

    def values(self, x: Tensor) -> Tensor:
        return expand_groups(super().values(x), self.attn.num_heads)


def expand_groups(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values (B, G, N, d) of grouped queries, repeated for every head: (B, H, N, d)."""
    groups = x.shape[1]
    return x if groups == num_heads else x.repeat_interleave(num_heads // groups, dim=1)


def _rotate(x: Tensor, table: Tensor, num_prefix: int, rotate_half: bool) -> Tensor:
    """Tokens (B, H, M, d), the first M of all, rotated by their patches' angles; the prefix has no position."""
    if x.shape[2] <= num_prefix:
        return x
    patches = x[:, :, num_prefix:]
    rotated = apply_rot_embed_cat(patches, table[..., : patches.shape[2], :], half=rotate_half)
    return torch.cat([x[:, :, :num_prefix], rotated], dim=2)


class ReducedEvaBlock(PreNormGamma, ReducedRopeBlock, EvaBlock):
    """timm's pre-norm `EvaBlock` under reduction."""


class ReducedEvaBlockPostNorm(PostNorm, ReducedRopeBlock, EvaBlockPostNorm):
    """timm's `EvaBlockPostNorm` under reduction."""


class TimmEva(TimmHost):
    """EVA, EVA-02, DINOv3, `vit_*_rope`, Perception Encoder (its attention pool reads prefix tokens, too).

    Rotary tables are gathered by position, including mixed ones (one table per block and head).
    """

    name = "timm Eva"
    reduced_blocks = (ReducedEvaBlock, ReducedEvaBlockPostNorm)
    model_classes = (Eva,)
    calls = (*TimmHost.calls, "pool")
