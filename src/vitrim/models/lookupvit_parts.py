"""The exchange between compressed and lookup tokens, and the layers of both LookupViTs around it."""

from __future__ import annotations

import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm, Mlp
from torch import Tensor, nn

from vitrim.core.attention import merge_heads, split_heads
from vitrim.core.block import Exchange, is_bare

__all__ = ["Gather", "Infuse", "LookupLayer", "SharedGather", "SharedLayer", "SharedParts"]


# ---- exchange --------------------------------------------------------------------------------------------------------


class Gather(Exchange):
    """Attention of compressed to lookup tokens, returned with its weights for the way back.

    Keys and values are one projection.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)

    def project(self, compressed: Tensor, lookup: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, M, C) of the compressed, keys and values (B, N, C) of the lookup tokens."""
        k, v = self.kv(lookup).chunk(2, dim=-1)
        return self.q(compressed), k, v

    def forward(self, compressed: Tensor, lookup: Tensor) -> tuple[Tensor, Tensor]:
        """Gather from lookup (B, N, C) to compressed tokens (B, M, C): output (B, M, C), attention (B, H, M, N)."""
        q, k, v = (split_heads(x, self.num_heads) for x in self.project(compressed, lookup))
        attention = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
        return merge_heads(attention @ v), attention


class SharedGather(Gather):
    """`Gather` with LayerNorms on queries, on keys, and on the values that compressed tokens send back."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.q_norm, self.k_norm, self.v_norm = (nn.LayerNorm(dim) for _ in range(3))

    def project(self, compressed: Tensor, lookup: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, M, C) of the compressed, keys and values (B, N, C) of the lookup tokens."""
        q, k, v = super().project(compressed, lookup)
        return self.q_norm(q), self.k_norm(k), v

    def values(self, compressed: Tensor) -> Tensor:
        """Values (B, M, C) of the compressed tokens, by the projection that makes those of the lookup tokens."""
        dim = self.q.out_features
        if is_bare(self.kv):
            values = F.linear(compressed, self.kv.weight[dim:], self.kv.bias[dim:])
        else:
            values = self.kv(compressed)[..., dim:]
        return self.v_norm(values)  # type: ignore[no-any-return]


class Infuse(Exchange):
    """Way back: values of the compressed tokens go to the lookup tokens by the transposed attention.

    It is not normalised again: lookup tokens that got little attention get little.
    """

    def forward(self, attention: Tensor, values: Tensor) -> Tensor:
        """Send values (B, M, C) by the attention (B, H, M, N): (B, N, C)."""
        return merge_heads(attention.transpose(-2, -1) @ split_heads(values, attention.shape[1]))


# ---- layers ----------------------------------------------------------------------------------------------------------


class LookupLayer(nn.Module):
    """One layer (section 3.2): gather, process, infuse, lookup MLP; each with its own parameters and a residual."""

    def __init__(self, dim: int, num_heads: int, block: nn.Module, lookup_mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.compressed_norm, self.lookup_norm, self.infuse_norm, self.mlp_norm = (LayerNorm(dim) for _ in range(4))
        self.gather = Gather(dim, num_heads)
        self.gather_proj = nn.Linear(dim, dim)
        self.block = block
        self.infuse_values = nn.Linear(dim, dim)
        self.infuse = Infuse()
        self.infuse_proj = nn.Linear(dim, dim)
        self.mlp = Mlp(dim, int(dim * lookup_mlp_ratio))
        self.drop_path = DropPath(drop_path)

    def forward(self, compressed: Tensor, lookup: Tensor) -> tuple[Tensor, Tensor]:
        """Update compressed (B, M, C) and lookup tokens (B, N, C)."""
        gathered, attention = self.gather(self.compressed_norm(compressed), self.lookup_norm(lookup))
        compressed = self.block(compressed + self.drop_path(self.gather_proj(gathered)))
        infused = self.infuse(attention, self.infuse_values(self.infuse_norm(compressed)))
        lookup = lookup + self.drop_path(self.infuse_proj(infused))
        return compressed, lookup + self.drop_path(self.mlp(self.mlp_norm(lookup)))


class SharedLayer(nn.Module):
    """One layer of `SharedLookupViT`, of which only the transformer block is its own.

        t, c = LN_t(t), LN_c(c)                      norms replace the streams
        c = Block(c + A V(t));  c = LN_c(c)
        t = t + A^T LN(V(c));   t = t + MLP(t)

    The caller passes the shared parts.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, compressed: Tensor, lookup: Tensor, shared: SharedParts) -> tuple[Tensor, Tensor]:
        """Update compressed (B, M, C) and lookup tokens (B, N, C)."""
        lookup, compressed = shared.lookup_norm(lookup), shared.compressed_norm(compressed)
        gathered, attention = shared.gather(compressed, lookup)
        compressed = shared.compressed_norm(self.block(compressed + gathered))
        lookup = lookup + shared.infuse(attention, shared.gather.values(compressed))
        return compressed, lookup + shared.mlp(lookup)


class SharedParts(nn.Module):
    """Parts that exist once for all layers of `SharedLookupViT`: exchange, lookup MLP, a LayerNorm for each stream."""

    def __init__(self, dim: int, num_heads: int, lookup_mlp_ratio: float) -> None:
        super().__init__()
        self.lookup_norm, self.compressed_norm = LayerNorm(dim), LayerNorm(dim)
        self.gather = SharedGather(dim, num_heads)
        self.infuse = Infuse()
        self.mlp = Mlp(dim, int(dim * lookup_mlp_ratio))
