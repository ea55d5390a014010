"""The model: class token, storage tokens, patches with rotary positions; blocks get lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dinov3.layers.block import SelfAttentionBlock


class PatchEmbed(nn.Module):
    def __init__(self, img_size: int, patch_size: int, dim: int) -> None:
        super().__init__()
        self.img_size, self.patch_size = (img_size, img_size), (patch_size, patch_size)
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).permute(0, 2, 3, 1)  # as a map


class RopePositionEmbedding(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("periods", 100 ** torch.linspace(0, 1, head_dim // 4))

    def forward(self, *, H: int, W: int) -> tuple[Tensor, Tensor]:
        rows, columns = torch.meshgrid(torch.arange(H) / H, torch.arange(W) / W, indexing="ij")
        places = torch.stack([rows, columns], dim=-1).to(self.periods).flatten(0, 1)
        angles = (6.28 * places[:, :, None] / self.periods).flatten(1).tile(2)
        return angles.sin(), angles.cos()


class DinoVisionTransformer(nn.Module):
    def __init__(
        self,
        img_size: int = 24,
        patch_size: int = 4,
        embed_dim: int = 32,
        depth: int = 4,
        num_heads: int = 2,
        n_storage_tokens: int = 0,
        mask_k_bias: bool = False,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.patch_size = embed_dim, num_heads, patch_size
        self.n_storage_tokens = n_storage_tokens
        self.patch_embed = PatchEmbed(img_size, patch_size, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.storage_tokens = nn.Parameter(torch.zeros(1, n_storage_tokens, embed_dim))
        self.rope_embed = RopePositionEmbedding(embed_dim // num_heads)
        blocks = [SelfAttentionBlock(embed_dim, num_heads, drop_path_rate, mask_k_bias) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Identity()

    def prepare_tokens_with_masks(self, x: Tensor, masks: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        x = self.patch_embed(x)
        batch, height, width, _ = x.shape
        prefix = torch.cat((self.cls_token, self.storage_tokens), dim=1).expand(batch, -1, -1)
        return torch.cat((prefix, x.flatten(1, 2)), dim=1), (height, width)

    def forward_features_list(self, x_list: list[Tensor], masks_list: list[Any]) -> list[dict[str, Any]]:
        found = [self.prepare_tokens_with_masks(x, masks) for x, masks in zip(x_list, masks_list, strict=True)]
        x = [tokens for tokens, _ in found]
        for block in self.blocks:
            x = block(x, [self.rope_embed(H=height, W=width) for _, (height, width) in found])
        first = 1 + self.n_storage_tokens
        return [
            {
                "x_norm_clstoken": normed[:, 0],
                "x_storage_tokens": normed[:, 1:first],
                "x_norm_patchtokens": normed[:, first:],
                "x_prenorm": tokens,
                "masks": masks,
            }
            for tokens, masks in zip(x, masks_list, strict=True)
            for normed in (self.norm(tokens),)
        ]

    def forward_features(self, x: Any, masks: Any = None) -> Any:
        if isinstance(x, Tensor):
            return self.forward_features_list([x], [masks])[0]
        return self.forward_features_list(x, masks)

    def get_intermediate_layers(self, x: Tensor, *, n: int = 1, return_class_token: bool = False) -> tuple[Any, ...]:
        x, (height, width) = self.prepare_tokens_with_masks(x)
        found, first = [], 1 + self.n_storage_tokens
        for block in self.blocks:
            x = block(x, self.rope_embed(H=height, W=width))
            found.append(self.norm(x))
        return tuple((x[:, first:], x[:, 0]) if return_class_token else x[:, first:] for x in found[-n:])

    def forward(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        found = self.forward_features(*args, **kwargs)
        return found if is_training else self.head(found["x_norm_clstoken"])
