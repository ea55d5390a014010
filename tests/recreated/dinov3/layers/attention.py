"""Attention with rotary positions of the patches, and a bias that the keys may not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]


class LinearKMaskedBias(nn.Linear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        third = self.out_features // 3
        self.register_buffer("bias_mask", torch.cat([torch.ones(third), torch.zeros(third), torch.ones(third)]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias * self.bias_mask.to(self.bias.dtype))


def rotated(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, mask_k_bias: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = LinearKMaskedBias(dim, 3 * dim) if mask_k_bias else nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_bias: Tensor | None = None, rope: Rope | None = None) -> Tensor:
        batch, n, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, n, 3, self.num_heads, dim // self.num_heads).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if rope is not None:
            sin, cos = rope
            prefix = n - sin.shape[-2]
            q, k = (torch.cat([y[:, :, :prefix], rotated(y[:, :, prefix:], sin, cos)], dim=2) for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, n, dim)))
