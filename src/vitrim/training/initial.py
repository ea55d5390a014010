"""Starting weights for small data: mimetic initialisation.

Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers" (ICML 2023): attention starts with the two
patterns that pretrained Vision Transformers show, a query-key product near the identity and a value-projection product
near its negative, over positions of sines and cosines. It costs nothing in training and helps most where data or time
is short.
"""

from __future__ import annotations

import torch
from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn

from vitrim.core.registry import ask
from vitrim.errors import VitrimError

QUERY_KEY = (0.7, 0.7)
VALUE_PROJECTION = (0.4, -0.4)
"""Weights of the noise and of the identity, section 4 of the paper."""


@torch.no_grad()
def mimetic_(model: nn.Module) -> None:
    """Set attention and positions of a ``model`` in place; everything else stays as it is.

    Draws from torch's global generator.

    Args:
        model: with a joint query, key and value projection (C, 3 C) and learned positions in every block's own order.

    Raises:
        VitrimError: it has no such projection, or no such positions.

    Example:
        >>> import timm
        >>> mimetic_(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=2))
    """
    library = ask(model)
    host, weights = library.host, library.starting(model)
    if host is None or weights is None:
        raise VitrimError(
            f"init=mimetic sets one projection to queries, keys and values per block, and learned positions: this "
            f"{type(model).__name__} does not have both"
        )
    facts = host.facts(model)
    head_dim = facts.dim // facts.num_heads
    for query, key, value, output in weights.attention:
        for head in range(facts.num_heads):
            place = slice(head * head_dim, (head + 1) * head_dim)
            of_query, of_key = _factors(facts.dim, *QUERY_KEY, rank=head_dim)
            query[place], key[place] = of_query.T, of_key.T
        of_value, of_output = _factors(facts.dim, *VALUE_PROJECTION, rank=facts.dim)
        value.copy_(of_value.T)
        output.copy_(of_output)
    weights.positions.copy_(build_sincos2d_pos_embed(list(facts.grid_size), dim=facts.dim))


def _factors(dim: int, noise: float, identity: float, *, rank: int) -> tuple[Tensor, Tensor]:
    """Two (dim, rank) matrices A, B whose product A B^T is nearest to noise * Z + identity * I, Z normal of
    variance 1 / dim."""
    target = noise * torch.randn(dim, dim) / dim**0.5 + identity * torch.eye(dim)
    u, s, vh = torch.linalg.svd(target)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, vh[:rank].T * root
