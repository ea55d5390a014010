"""The blocks: pre-norm, LayerScale, stochastic depth; a nested one takes a list of images of several sizes, too."""

from __future__ import annotations

from typing import Any

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from dinov2.layers.attention import Attention, MemEffAttention


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(nn.init.constant_(nn.Linear(dim, 1).weight[0].detach(), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(
        self, dim: int, num_heads: int, drop_path: float = 0.0, attn_class: type[Attention] = Attention
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attn_class(dim, num_heads)
        self.ls1 = LayerScale(dim)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 2 * dim)
        self.ls2 = LayerScale(dim)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.sample_drop_ratio = drop_path

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.sample_drop_ratio > 0.0):
            x = x + self.ls1(self.attn(self.norm1(x)))
            return x + self.ls2(self.mlp(self.norm2(x)))
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path1(self.ls2(self.mlp(self.norm2(x))))


class NestedTensorBlock(Block):
    def __init__(self, dim: int, num_heads: int, drop_path: float = 0.0) -> None:
        super().__init__(dim, num_heads, drop_path, MemEffAttention)

    def forward(self, x_or_x_list: Any) -> Any:
        if isinstance(x_or_x_list, list):
            return [super(NestedTensorBlock, self).forward(x) for x in x_or_x_list]
        return super().forward(x_or_x_list)
