"""LookupViT (Koner et al., *LookupViT: Compressing visual information to a limited number of tokens*, ECCV 2024).

Few compressed tokens go through transformer blocks. The many lookup tokens keep the details: only updates from the
compressed tokens and a narrow MLP change them. One attention matrix A serves both directions ("multi-head bidirectional
cross-attention", MHBC): compressed tokens gather with A, lookup tokens are infused with its transpose.

There are two classes, because the paper's block differs from the one that the authors of ViTTM measured:

* `LookupViT` is the paper's: own parameters in every layer, output projections, residuals around pre-norms, no class
  token; the compressed tokens are the resized lookup tokens. It follows descriptions of the paper: no code is public.
* `SharedLookupViT` is the re-implementation of the ViTTM authors, measured in their Table 8: all layers share one
  exchange, one lookup MLP and two LayerNorms. It can load their checkpoints.

``_3``, ``_5``, ``_7`` and ``_10`` in the names are the sides of the square grid of compressed tokens. Both classes
accept images of any size that divides into patches, and any other compressed grid (`set_compressed_grid`). The
classifier of the compressed tokens predicts; training adds the loss of a second one, on the lookup tokens
(`vitrim.models.streams.objective`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm, Mlp, PatchEmbed, calculate_drop_path_rates, to_2tuple
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from vitrim.core.attention import merge_heads, split_heads
from vitrim.core.block import Exchange, is_bare
from vitrim.core.plan import Grid
from vitrim.errors import VitrimError
from vitrim.models.common import create, fit_positions, pretrained_cfg, renamed, resample_positions, unwrapped
from vitrim.models.streams import (
    TwoStreamClassifier,
    grid_of,
    initialise,
    join_keys_and_values,
    position_table,
    transformer_blocks,
)

# ---- exchange --------------------------------------------------------------------------------------------------------


class Gather(Exchange):
    """Attention of compressed to lookup tokens, returned with its weights for the way back."""

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
        """Return the output (B, M, C) for the compressed, and the attention (B, H, M, N) to the lookup tokens."""
        q, k, v = (split_heads(x, self.num_heads) for x in self.project(compressed, lookup))
        attention = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
        return merge_heads(attention @ v), attention


class SharedGather(Gather):
    """`Gather` with LayerNorms on queries, keys, and the values that compressed tokens send back."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.q_norm, self.k_norm, self.v_norm = (nn.LayerNorm(dim) for _ in range(3))

    def project(self, compressed: Tensor, lookup: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(compressed, lookup)
        return self.q_norm(q), self.k_norm(k), v

    def values(self, compressed: Tensor) -> Tensor:
        """Values (B, M, C) of the compressed tokens, by the projection of the lookup tokens' values."""
        dim = self.q.out_features
        # The second half of `kv` makes values: a bare layer applies it alone, an adapter needs the whole call.
        if is_bare(self.kv):
            values = F.linear(compressed, self.kv.weight[dim:], self.kv.bias[dim:])
        else:
            values = self.kv(compressed)[..., dim:]
        return self.v_norm(values)  # type: ignore[no-any-return]


class Infuse(Exchange):
    """Send values of the compressed tokens to the lookup tokens by the transposed attention, which is not normalised
    again.
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
        # Gather first, so that the block processes what the lookup tokens know.
        compressed = self.block(compressed + self.drop_path(self.gather_proj(gathered)))
        infused = self.infuse(attention, self.infuse_values(self.infuse_norm(compressed)))
        lookup = lookup + self.drop_path(self.infuse_proj(infused))
        return compressed, lookup + self.drop_path(self.mlp(self.mlp_norm(lookup)))


class SharedLayer(nn.Module):
    """One layer of `SharedLookupViT`, in which only the transformer block is not shared.

    t, c = LN_t(t), LN_c(c)                      norms replace the streams
    c = Block(c + A V(t));  c = LN_c(c)
    t = t + A^T LN(V(c));   t = t + MLP(t)
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, compressed: Tensor, lookup: Tensor, shared: SharedParts) -> tuple[Tensor, Tensor]:
        """Update compressed (B, M, C) and lookup tokens (B, N, C) with the ``shared`` parts."""
        lookup, compressed = shared.lookup_norm(lookup), shared.compressed_norm(compressed)
        gathered, attention = shared.gather(compressed, lookup)
        compressed = shared.compressed_norm(self.block(compressed + gathered))
        lookup = lookup + shared.infuse(attention, shared.gather.values(compressed))
        return compressed, lookup + shared.mlp(lookup)


class SharedParts(nn.Module):
    """Parts that all layers of `SharedLookupViT` share: exchange, lookup MLP, a LayerNorm for each stream."""

    def __init__(self, dim: int, num_heads: int, lookup_mlp_ratio: float) -> None:
        super().__init__()
        self.lookup_norm, self.compressed_norm = LayerNorm(dim), LayerNorm(dim)
        self.gather = SharedGather(dim, num_heads)
        self.infuse = Infuse()
        self.mlp = Mlp(dim, int(dim * lookup_mlp_ratio))


# ---- both classes ----------------------------------------------------------------------------------------------------


class LookupBase(TwoStreamClassifier):
    """Base class of both models, with the arguments of `LookupViT`. A subclass creates its ``embed`` and its layers."""

    num_prefix_tokens = 0
    """Prefix tokens among the lookup tokens."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        compressed_grid: int | tuple[int, int] = 5,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        lookup_mlp_ratio: float = 0.5,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__(img_size, in_chans, embed_dim, num_classes, global_pool, drop_rate)
        self.patch_size = patch_size
        self.grid = grid_of(self.img_size, patch_size)
        self.patch_embed = PatchEmbed(
            self.img_size, patch_size, in_chans, embed_dim, strict_img_size=False, output_fmt="NCHW"
        )
        self.set_compressed_grid(compressed_grid)
        self.pos_embed = position_table(self.grid, embed_dim, self.num_prefix_tokens)
        self.add_parts(num_heads, lookup_mlp_ratio)
        options = {"mlp_ratio": mlp_ratio, "qkv_bias": qkv_bias, "proj_drop": proj_drop_rate}
        blocks = transformer_blocks(embed_dim, num_heads, depth, drop_path_rate, **options)
        rates: Any = calculate_drop_path_rates(drop_path_rate, depth)
        # Depths of drop path grow by layer, for the blocks and for what is around them.
        self.layers = nn.ModuleList(
            self.layer(block, num_heads, lookup_mlp_ratio, rate) for block, rate in zip(blocks, rates, strict=True)
        )
        for table in self.parameters(recurse=False):
            nn.init.trunc_normal_(table, std=0.02)
        initialise(self.layers, *self.shared_parts)

    def add_parts(self, num_heads: int, lookup_mlp_ratio: float) -> None:
        """Create further parts, besides layers, patches and their positions."""

    def layer(self, block: nn.Module, num_heads: int, lookup_mlp_ratio: float, drop_path: float) -> nn.Module:
        """Create one layer around a transformer block."""
        raise NotImplementedError

    def set_compressed_grid(self, grid: int | tuple[int, int]) -> None:
        """Change the rows and columns of compressed tokens, at least 1, from now on, with the same parameters."""
        rows, columns = to_2tuple(grid)
        if min(rows, columns) < 1:
            raise VitrimError(f"a compressed grid needs at least one row and column, got {(rows, columns)}")
        self.compressed_grid: Grid = (rows, columns)


# ---- the paper's model -----------------------------------------------------------------------------------------------


class LookupViT(LookupBase):
    """The paper's model. ``model(images)`` returns the logits of the compressed tokens' classifier.

    Args:
        compressed_grid: rows and columns of compressed tokens, or one number for both.
        global_pool: only ``avg``.
        lookup_mlp_ratio: hidden channels of the lookup MLP over C (1 / q, with q = 2 in the paper).

    Example:
        >>> model = LookupViT(img_size=64, patch_size=8, compressed_grid=3, embed_dim=32, depth=1, num_heads=2)
        >>> [stream.shape[1] for stream in model.forward_features(torch.zeros(2, 3, 64, 64))]
        [9, 64]
    """

    def layer(self, block: nn.Module, num_heads: int, lookup_mlp_ratio: float, drop_path: float) -> nn.Module:
        return LookupLayer(self.embed_dim, num_heads, block, lookup_mlp_ratio, drop_path)

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embed images (B, 3, H, W) as compressed (B, M, C) and lookup tokens (B, N, C)."""
        grid = grid_of(images.shape[-2:], self.patch_size)
        lookup = self.patch_embed(images).flatten(2).transpose(1, 2)
        lookup = lookup + resample_positions(self.pos_embed, self.grid, grid)
        # resizing is linear: resize the sum of patches and positions once, antialiased
        patches = lookup.transpose(1, 2).unflatten(2, grid)
        resized = F.interpolate(patches, size=self.compressed_grid, mode="bilinear", antialias=True)
        return resized.flatten(2).transpose(1, 2), lookup


# ---- the model of Table 8 --------------------------------------------------------------------------------------------


class SharedLookupViT(LookupBase):
    """LookupViT as re-implemented by the authors of ViTTM, with most parameters shared by all layers.

    The compressed tokens are averages of the patch embeddings, with their own position table; the lookup tokens have a
    class token (unless ``class_token=False``), which counts in their mean.
    """

    def __init__(self, *args: Any, class_token: bool = True, **kwargs: Any) -> None:
        self.num_prefix_tokens = int(class_token)
        super().__init__(*args, **kwargs)

    def add_parts(self, num_heads: int, lookup_mlp_ratio: float) -> None:
        """Create the class token, the positions of compressed tokens, and the `SharedParts`."""
        self.compressed_table_grid = self.compressed_grid
        self.compressed_pos_embed = position_table(self.compressed_grid, self.embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, self.embed_dim)) if self.num_prefix_tokens else None
        self.shared = SharedParts(self.embed_dim, num_heads, lookup_mlp_ratio)

    def layer(self, block: nn.Module, num_heads: int, lookup_mlp_ratio: float, drop_path: float) -> nn.Module:
        return SharedLayer(block)

    @property
    def shared_parts(self) -> tuple[nn.Module, ...]:
        return (self.shared,)

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of `LookupViT.embed`, class token first."""
        grid = grid_of(images.shape[-2:], self.patch_size)
        patches = self.patch_embed(images)
        # Averages of cells, which need not divide the grid of patches.
        compressed = F.adaptive_avg_pool2d(patches, self.compressed_grid).flatten(2).transpose(1, 2)
        compressed = compressed + resample_positions(
            self.compressed_pos_embed, self.compressed_table_grid, self.compressed_grid
        )
        prefix = self.num_prefix_tokens
        table = resample_positions(self.pos_embed[:, prefix:], self.grid, grid)
        lookup = patches.flatten(2).transpose(1, 2) + table
        # The class token has the first row of the table, which no resampling touches.
        if self.cls_token is not None:
            class_token = (self.cls_token + self.pos_embed[:, :1]).expand(images.shape[0], -1, -1)
            lookup = torch.cat((class_token, lookup), dim=1)
        return compressed, lookup


# ---- checkpoints -----------------------------------------------------------------------------------------------------

_RENAMED = (
    (r"^blocks\.(\d+)\.", r"layers.\1.block."),
    (r"^mhbc\.", "shared.gather."),
    (r"^global_mlp\.", "shared.mlp."),
    (r"^(lookup|compressed)_norm\.", r"shared.\1_norm."),
    (r"^fc_norm\.", "auxiliary_fc_norm."),
    (r"^fc_norm_compressed\.", "fc_norm."),
    (r"^head\.", "auxiliary_head."),
    (r"^compressed_head\.", "head."),
)
"""Rules from the ViTTM authors' names to ours, applied in turn."""


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: LookupBase) -> dict[str, Tensor]:
    """Rename the weights of a checkpoint for ``model``, and resample its position tables to the model's grids.

    Checkpoints of the ViTTM authors' LookupViT fit `SharedLookupViT`: their ``head`` and ``fc_norm`` are those of the
    lookup tokens, here the auxiliary ones. Unknown weights keep their names, so that loading reports them.
    """
    state = unwrapped(state_dict)
    if any(name.startswith("mhbc.") for name in state):
        state = renamed(state, _RENAMED)
        join_keys_and_values(state, "shared.gather")
    if isinstance(model, SharedLookupViT):
        fit_positions(state, "compressed_pos_embed", model.compressed_table_grid)
        fit_positions(state, "pos_embed", model.grid, model.num_prefix_tokens)
    else:
        fit_positions(state, "pos_embed", model.grid)
    return state


# ---- the models of the papers ----------------------------------------------------------------------------------------

FAMILIES: dict[str, tuple[type[LookupBase], str]] = {
    "lookupvit_base": (LookupViT, "the paper"),
    "lookupvit_shared_base": (SharedLookupViT, "ViTTM's Table 8"),
}
VARIANTS = {f"{family}_{side}": (family, side) for family in FAMILIES for side in (3, 5, 7, 10)}
"""Family and side of the compressed grid of every registered name."""

_CFG = pretrained_cfg(fixed_input_size=False, classifier=("head", "auxiliary_head"))
default_cfgs = generate_default_cfgs(dict.fromkeys(VARIANTS, _CFG))


def _entrypoint(variant: str, family: str, side: int) -> Callable[..., LookupBase]:
    kind, source = FAMILIES[family]

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> LookupBase:
        return create(kind, checkpoint_filter_fn, variant, pretrained, kwargs, compressed_grid=side)

    entrypoint.__name__ = entrypoint.__qualname__ = variant
    entrypoint.__doc__ = f"LookupViT-B/16 of {source} with {side}x{side} compressed tokens."
    return entrypoint


for _variant in VARIANTS:
    globals()[_variant] = register_model(_entrypoint(_variant, *VARIANTS[_variant]))
