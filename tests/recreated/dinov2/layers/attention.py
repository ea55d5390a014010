"""Attention with one projection for queries, keys and values."""

from __future__ import annotations

from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, n, dim = x.shape
        qkv = self.qkv(x).reshape(batch, n, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        probabilities = self.attn_drop((q @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj_drop(self.proj((probabilities @ v).transpose(1, 2).reshape(batch, n, dim)))


class MemEffAttention(Attention):
    """That of xformers, where it is installed."""
