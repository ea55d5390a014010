"""The block, which takes tokens or a list of them, and the angles of each."""

from __future__ import annotations

from typing import Any

from dinov2.layers.block import LayerScale
from timm.layers import Mlp
from torch import nn

from dinov3.layers.attention import SelfAttention


class SelfAttentionBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, drop_path: float = 0.0, mask_k_bias: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, num_heads, mask_k_bias)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 2 * dim)
        self.ls2 = LayerScale(dim)
        self.sample_drop_ratio = drop_path

    def forward(self, x_or_x_list: Any, rope_or_rope_list: Any = None) -> Any:
        if not isinstance(x_or_x_list, list):
            return self.forward([x_or_x_list], [rope_or_rope_list])[0]
        found = []
        for x, rope in zip(x_or_x_list, rope_or_rope_list, strict=True):
            x = x + self.ls1(self.attn(self.norm1(x), rope=rope))
            found.append(x + self.ls2(self.mlp(self.norm2(x))))
        return found
