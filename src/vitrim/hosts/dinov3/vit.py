"""DINOv3 from its original repository, as ``torch.hub`` loads it. Tokens keep the rotary angles of their place."""

from __future__ import annotations

from typing import Any

import torch
from dinov3.layers.attention import LinearKMaskedBias, SelfAttention
from dinov3.layers.block import SelfAttentionBlock
from dinov3.models.vision_transformer import DinoVisionTransformer
from torch import Tensor, nn

from vitrim.core.attention import Attention
from vitrim.core.tokens import TokenState
from vitrim.hosts.dinov2.common import DinoHost, ReducedDinoBlock
from vitrim.hosts.shared.blocks import scale_of


class ReducedSelfAttentionBlock(ReducedDinoBlock, SelfAttentionBlock):
    """Reduced `SelfAttentionBlock`, on images of one size."""

    attention_classes = (SelfAttention,)
    linear_classes = (nn.Linear, LinearKMaskedBias)

    def bias_of(self, attn: Any) -> Tensor | None:
        bias, mask = super().bias_of(attn), getattr(attn.qkv, "bias_mask", None)
        return bias if bias is None or mask is None else bias * mask.to(bias.dtype)

    def forward(self, x_or_x_list: Any, rope_or_rope_list: Any = None) -> Any:
        rope = rope_or_rope_list[0] if isinstance(rope_or_rope_list, list) else rope_or_rope_list
        return self.run_one(x_or_x_list, rope)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn = self.attn
        q, k, v = self.project_all(x, rows)
        rope: tuple[Tensor, Tensor] | None = given
        k_raw = None
        if rope is not None:
            # A token keeps the angles of its anchor, wherever it stands now.
            tables = [state.patch_rows(table) for table in rope]
            sin, cos = (table if table.dim() == 2 else table.unsqueeze(1) for table in tables)
            q, k, k_raw = _rotated(q, sin, cos, state.num_prefix), _rotated(k, sin, cos, state.num_prefix), k
        # the library's attention has no dropout
        return Attention(q, k, v, scale_of(True, attn, q), state.key_bias(q.dtype, self.proportional), k_raw=k_raw)


def _rotated(x: Tensor, sin: Tensor, cos: Tensor, num_prefix: int) -> Tensor:
    """Queries or keys (B, H, N, d) with rotated patch tokens, in the dtype of the angles."""
    prefix, patches = x[:, :, :num_prefix], x[:, :, num_prefix:].to(sin.dtype)
    first, second = patches.chunk(2, dim=-1)
    turned = patches * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([prefix, turned.to(x.dtype)], dim=2)


class Dinov3(DinoHost):
    """DINOv3 of facebookresearch: class token, storage tokens (registers), rotary positions."""

    name = "dinov3 DinoVisionTransformer"
    reduced_blocks = (ReducedSelfAttentionBlock,)
    model_class = DinoVisionTransformer
    registers = "n_storage_tokens"
