"""Parts of ViTTM: the tokens of both streams, read and write heads, fusions, and the memory block.

The published models use the head ``linear``, the fusion ``add`` and no memory block; the paper compares the others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from torch import Tensor, nn

from vitrim.core.attention import merge_heads, split_heads
from vitrim.core.block import Exchange
from vitrim.core.plan import Grid
from vitrim.models.common import resample_positions
from vitrim.models.streams import grid_of, position_table

LATENT_BOTTLENECK = 64  # hidden width of the two MLPs of LatentHead


# ---- tokens ----------------------------------------------------------------------------------------------------------


class StreamEmbed(nn.Module):
    """Embed the patches of one image as the tokens of both streams, with learned positions.

    With equal patch sizes one convolution makes both streams (memory in its first C outputs).
    """

    def __init__(self, img_size: Grid, process_patch: int, memory_patch: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.patch_sizes = memory_patch, process_patch
        self.grids = tuple(grid_of(img_size, patch) for patch in self.patch_sizes)
        self.shared = process_patch == memory_patch
        # Equal patches are cut once: one convolution with twice the channels makes both streams.
        widths = {memory_patch: 2 * dim} if self.shared else dict.fromkeys(self.patch_sizes, dim)
        self.patches = nn.ModuleList(
            PatchEmbed(img_size, patch, in_chans, width, strict_img_size=False) for patch, width in widths.items()
        )
        self.memory_pos, self.process_pos = (position_table(grid, dim) for grid in self.grids)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Numbers of memory and process tokens at the model's own image size."""
        return self.memory_pos.shape[1], self.process_pos.shape[1]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embed images (B, 3, H, W) as memory (B, N, C) and process tokens (B, M, C)."""
        grids = [grid_of(images.shape[-2:], patch) for patch in self.patch_sizes]
        if self.shared:
            memory, process = self.patches[0](images).chunk(2, dim=-1)
        else:
            memory, process = (embed(images) for embed in self.patches)
        memory_pos, process_pos = (
            resample_positions(table, own, grid)
            for table, own, grid in zip((self.memory_pos, self.process_pos), self.grids, grids, strict=True)
        )
        return memory + memory_pos, process + process_pos


# ---- read and write heads --------------------------------------------------------------------------------------------


class ReadWriteHead(Exchange):
    """Base class of modules by which ``target`` tokens read from ``source`` tokens.

    ``latent_dim`` are the channels L of keys and queries (or latents), ``num_target`` the target tokens at the model's
    own image size.
    """

    fixed_length = False
    """True if the head works for one number of tokens only."""

    def __init__(self, dim: int, num_heads: int, latent_dim: int, num_target: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Compute updates (B, M, C) of the target (B, M, C) from the source tokens (B, N, C)."""
        raise NotImplementedError


class AttentionHead(ReadWriteHead):
    """Base class of heads with queries from the target, and keys and values (one projection) from the source."""

    def __init__(self, dim: int, num_heads: int, latent_dim: int, num_target: int) -> None:
        super().__init__(dim, num_heads, latent_dim, num_target)
        self.q = nn.Linear(dim, latent_dim)
        self.kv = nn.Linear(dim, latent_dim + dim)

    def project(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries (B, M, L), keys (B, N, L) and values (B, N, C)."""
        k, v = self.kv(source).split((self.q.out_features, source.shape[-1]), dim=-1)
        return self.q(target), k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries (B, H, M, L / H), keys (B, H, N, L / H) and values (B, H, N, C / H): (B, H, M, C / H)."""
        raise NotImplementedError

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        q, k, v = (split_heads(x, self.num_heads) for x in self.project(source, target))
        return merge_heads(self.attend(q, k, v))


class LinearHead(AttentionHead):
    """Linear attention with the feature map elu + 1 (section 3; the head of the published models).

    out = phi(q) (phi(k)^T v) / (phi(q) sum_n phi(k_n) + 1e-6), without output projection. Its cost is linear in both
    numbers of tokens.
    """

    epsilon = 1e-6

    def project(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(source, target)
        return F.elu(q) + 1, F.elu(k) + 1, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Keys and values are summed over tokens first: the cost is linear in their number.
        weight = q @ k.sum(-2).unsqueeze(-1) + self.epsilon  # (B, H, M, 1)
        return (q / weight) @ (k.transpose(-2, -1) @ v)


class LatentCrossHead(AttentionHead):
    """Factorised cross attention: softmax of queries over channels and of keys over tokens, so that k^T v is small.

    LayerNorms on queries, keys and values, each over all channels, and an output projection.
    """

    def __init__(self, dim: int, num_heads: int, latent_dim: int, num_target: int) -> None:
        super().__init__(dim, num_heads, latent_dim, num_target)
        self.q_norm, self.k_norm = nn.LayerNorm(latent_dim), nn.LayerNorm(latent_dim)
        self.v_norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, dim)

    def project(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(source, target)
        return self.q_norm(q), self.k_norm(k), self.v_norm(v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.proj(super().forward(source, target))  # type: ignore[no-any-return]


class CrossHead(LatentCrossHead):
    """Softmax cross attention of full width, otherwise like `LatentCrossHead`."""

    def __init__(self, dim: int, num_heads: int, latent_dim: int, num_target: int) -> None:
        super().__init__(dim, num_heads, dim, num_target)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class LatentHead(ReadWriteHead):
    """Mix a few latents, which are mixtures of the source tokens, without a projection of values."""

    def __init__(self, dim: int, num_heads: int, latent_dim: int, num_target: int) -> None:
        super().__init__(dim, num_heads, latent_dim, num_target)
        self.k_norm, self.q_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.k_mlp = Mlp(dim, LATENT_BOTTLENECK, latent_dim)
        self.q_mlp = Mlp(dim, LATENT_BOTTLENECK, latent_dim)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        k: Tensor = self.k_mlp(self.k_norm(source)).softmax(-2)
        q: Tensor = self.q_mlp(self.q_norm(target)).softmax(-1)
        return q @ (k.transpose(-2, -1) @ source)


class TokenLearnerHead(ReadWriteHead):
    """TokenLearner on both streams: one learned mixture of all tokens for each target token."""

    fixed_length = True

    def __init__(self, dim: int, num_heads: int, latent_dim: int, num_target: int) -> None:
        super().__init__(dim, num_heads, latent_dim, num_target)
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, num_target, num_target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        tokens = torch.cat((source, target), dim=1)
        weights = self.mlp(self.norm(tokens)).softmax(1)
        return weights.transpose(1, 2) @ tokens  # type: ignore[no-any-return]


HEADS: dict[str, type[ReadWriteHead]] = {
    "linear": LinearHead,
    "cross": CrossHead,
    "latent_cross": LatentCrossHead,
    "latent": LatentHead,
    "token_learner": TokenLearnerHead,
}


# ---- fusions ---------------------------------------------------------------------------------------------------------


class Fusion(nn.Module):
    """Add an update to ``num_target`` tokens of C = ``dim`` channels; base class of other fusions."""

    fixed_length = False
    """True if the fusion works for one number of tokens only."""

    def __init__(self, dim: int, num_target: int) -> None:
        super().__init__()

    def forward(self, update: Tensor, target: Tensor) -> Tensor:
        """Join an update (B, M, C) with the tokens (B, M, C)."""
        return target + update


class Erase(Fusion):
    """Replace the tokens by the update."""

    def forward(self, update: Tensor, target: Tensor) -> Tensor:
        return update


class AddErase(Fusion):
    """Gate g per token, computed from the mean update: t (1 - g) + u g. All layers share one gate."""

    fixed_length = True

    def __init__(self, dim: int, num_target: int) -> None:
        super().__init__(dim, num_target)
        self.linear = nn.Linear(dim, num_target)

    def forward(self, update: Tensor, target: Tensor) -> Tensor:
        gate: Tensor = self.linear(update.mean(1)).sigmoid().unsqueeze(-1)
        return target + gate * (update - target)


FUSIONS: dict[str, type[Fusion]] = {"add": Fusion, "erase": Erase, "add_erase": AddErase}


# ---- memory block ----------------------------------------------------------------------------------------------------


class MemoryMlp(nn.Module):
    """m + MLP(LN(m)) with C / 2 hidden channels: the optional memory block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, dim // 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]
