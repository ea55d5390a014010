"""The model: class token, registers, patches; features as a dict."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dinov2.layers.block import Block, NestedTensorBlock


class PatchEmbed(nn.Module):
    def __init__(self, img_size: int, patch_size: int, dim: int) -> None:
        super().__init__()
        self.img_size, self.patch_size = (img_size, img_size), (patch_size, patch_size)
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class BlockChunk(nn.ModuleList):
    def forward(self, x: Any) -> Any:
        for block in self:
            x = block(x)
        return x


class DinoVisionTransformer(nn.Module):
    def __init__(
        self,
        img_size: int = 24,
        patch_size: int = 4,
        embed_dim: int = 32,
        depth: int = 4,
        num_heads: int = 2,
        num_register_tokens: int = 0,
        block_fn: type[Block] = NestedTensorBlock,
        block_chunks: int = 0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.patch_size = embed_dim, num_heads, patch_size
        self.num_register_tokens = num_register_tokens
        self.patch_embed = PatchEmbed(img_size, patch_size, embed_dim)
        places = (img_size // patch_size) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, places + 1, embed_dim))
        registers = torch.zeros(1, num_register_tokens, embed_dim)
        self.register_tokens = nn.Parameter(registers) if num_register_tokens else None
        blocks = [block_fn(embed_dim, num_heads, drop_path_rate) for _ in range(depth)]
        self.chunked_blocks = block_chunks > 0
        if self.chunked_blocks:
            size = depth // block_chunks
            chunks = [[nn.Identity()] * first + blocks[first : first + size] for first in range(0, depth, size)]
            self.blocks = nn.ModuleList([BlockChunk(chunk) for chunk in chunks])
        else:
            self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Identity()
        self.mask_token = nn.Parameter(torch.zeros(1, embed_dim))

    def interpolate_pos_encoding(self, count: int) -> Tensor:
        places = self.pos_embed.shape[1] - 1
        if count == places:
            return self.pos_embed
        old, new = math.isqrt(places), math.isqrt(count)
        table = self.pos_embed[:, 1:].reshape(1, old, old, -1).permute(0, 3, 1, 2)
        table = F.interpolate(table, size=(new, new), mode="bicubic").flatten(2).transpose(1, 2)
        return torch.cat((self.pos_embed[:, :1], table), dim=1)

    def prepare_tokens_with_masks(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        x = self.patch_embed(x)
        if masks is not None:
            x = torch.where(masks.unsqueeze(-1), self.mask_token.unsqueeze(0), x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.interpolate_pos_encoding(x.shape[1] - 1)
        if self.register_tokens is None:
            return x
        return torch.cat((x[:, :1], self.register_tokens.expand(x.shape[0], -1, -1), x[:, 1:]), dim=1)

    def features(self, x: Tensor, masks: Tensor | None) -> dict[str, Any]:
        normed, first = self.norm(x), 1 + self.num_register_tokens
        return {
            "x_norm_clstoken": normed[:, 0],
            "x_norm_regtokens": normed[:, 1:first],
            "x_norm_patchtokens": normed[:, first:],
            "x_prenorm": x,
            "masks": masks,
        }

    def forward_features(self, x: Any, masks: Any = None) -> Any:
        if isinstance(x, list):
            found = [self.prepare_tokens_with_masks(one, mask) for one, mask in zip(x, masks, strict=True)]
            for block in self.blocks:
                found = block(found)
            return [self.features(one, mask) for one, mask in zip(found, masks, strict=True)]
        x = self.prepare_tokens_with_masks(x, masks)
        for block in self.blocks:
            x = block(x)
        return self.features(x, masks)

    def get_intermediate_layers(self, x: Tensor, n: int = 1, return_class_token: bool = False) -> tuple[Any, ...]:
        x, found = self.prepare_tokens_with_masks(x), []
        every = [block for chunk in self.blocks for block in chunk] if self.chunked_blocks else self.blocks
        for block in every:
            x = block(x)
            if not isinstance(block, nn.Identity):
                found.append(self.norm(x))
        first = 1 + self.num_register_tokens
        return tuple((x[:, first:], x[:, 0]) if return_class_token else x[:, first:] for x in found[-n:])

    def forward(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        found = self.forward_features(*args, **kwargs)
        return found if is_training else self.head(found["x_norm_clstoken"])
