"""Starting weights for small data: mimetic initialisation.

Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers" (ICML 2023): attention starts with the two
patterns that pretrained Vision Transformers show, a query-key product near the identity and a value-projection product
near its negative, over positions of sines and cosines. It costs nothing in training and helps most where data or time
is short.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models import VisionTransformer
from torch import Tensor, nn

from vitrim.errors import VitrimError

QUERY_KEY = (0.7, 0.7)
VALUE_PROJECTION = (0.4, -0.4)
"""Weights of the noise and of the identity, section 4 of the paper."""


@torch.no_grad()
def mimetic_(model: nn.Module) -> None:
    """Set attention and positions of a timm ``VisionTransformer`` in place; everything else stays as it is.

    Draws from torch's global generator.

    Args:
        model: with a joint query, key and value projection (C, 3 C) and learned positions in every block's own order.

    Raises:
        VitrimError: it is no plain timm VisionTransformer.

    Example:
        >>> import timm
        >>> mimetic_(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2))
    """
    if not isinstance(model, VisionTransformer) or model.pos_embed is None:
        raise VitrimError(
            f"init=mimetic is for timm's VisionTransformer with learned positions, not {type(model).__name__}"
        )
    for block in model.blocks:
        attention = cast(Any, block).attn
        dim, heads = attention.qkv.in_features, attention.num_heads
        head_dim = dim // heads
        for head in range(heads):
            query, key = _factors(dim, *QUERY_KEY, rank=head_dim)
            place = slice(head * head_dim, (head + 1) * head_dim)
            attention.qkv.weight[:dim][place] = query.T
            attention.qkv.weight[dim : 2 * dim][place] = key.T
        value, projection = _factors(dim, *VALUE_PROJECTION, rank=dim)
        attention.qkv.weight[2 * dim :] = value.T
        attention.proj.weight.copy_(projection)
    grid = list(cast(Any, model.patch_embed).grid_size)
    positions = build_sincos2d_pos_embed(grid, dim=model.embed_dim)
    model.pos_embed[:, -len(positions) :] = positions


def _factors(dim: int, noise: float, identity: float, *, rank: int) -> tuple[Tensor, Tensor]:
    """Two (dim, rank) matrices A, B whose product A B^T is nearest to noise * Z + identity * I, Z normal of
    variance 1 / dim."""
    target = noise * torch.randn(dim, dim) / dim**0.5 + identity * torch.eye(dim)
    u, s, vh = torch.linalg.svd(target)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, vh[:rank].T * root
