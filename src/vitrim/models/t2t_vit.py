"""T2T-ViT: tokens from three soft splits of the image (Yuan et al., ICCV 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers.mlp import Mlp
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitrim.core.matching import full_precision
from vitrim.core.tokens import decision_dtype
from vitrim.models.common import Stem, create, fit_positions, pretrained_cfg, renamed, unwrapped

TokenModule = Literal["transformer", "performer"]
SoftSplit = tuple[int, int, int]
"""Kernel, stride and padding of a soft split."""

SPLITS: tuple[SoftSplit, ...] = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
EPSILON = 1e-8  # of the performer's denominator


class TokenAttention(nn.Module):
    """Attention with one head that changes the width of tokens: v + projection(attention), (B, N, D) to (B, N, d).

    The values are the residual, since the input has another width. The logits are divided by the root of D, not of d.
    """

    def __init__(self, in_dim: int, dim: int, **place: Any) -> None:
        super().__init__()
        self.scale = float(in_dim**-0.5)
        self.qkv = nn.Linear(in_dim, 3 * dim, bias=False, **place)
        self.proj = nn.Linear(dim, dim, **place)

    def forward(self, x: Tensor) -> Tensor:
        # Only one head: the projection made query, key and value of a head's width.
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        out: Tensor = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        out = v + self.proj(out)
        return out.squeeze(1)


class TokenTransformer(nn.Module):
    """Transformer layer on unfolded tokens, (B, N, D) to (B, N, d): attention, then x + mlp(x) (section 3.1)."""

    def __init__(self, in_dim: int, dim: int, **place: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(in_dim, **place)
        self.attn = TokenAttention(in_dim, dim, **place)
        self.norm2 = nn.LayerNorm(dim, **place)
        self.mlp = Mlp(dim, dim, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class TokenPerformer(nn.Module):
    """`TokenTransformer` with attention that is linear in N, by m = d/2 random features (Performer).

    A token's features are exp(W x - |x|^2 / 2) / sqrt(m), with fixed orthogonal rows of W of length sqrt(m), computed
    in at least float32.
    """

    def __init__(self, in_dim: int, dim: int, **place: Any) -> None:
        super().__init__()
        self.dim = dim
        self.w = nn.Parameter(torch.empty(max(dim // 2, 1), dim, **place), requires_grad=False)
        self.kqv = nn.Linear(in_dim, 3 * dim, **place)
        self.proj = nn.Linear(dim, dim, **place)
        self.norm1 = nn.LayerNorm(in_dim, **place)
        self.norm2 = nn.LayerNorm(dim, **place)
        self.mlp = nn.Sequential(nn.Linear(dim, dim, **place), nn.GELU(), nn.Linear(dim, dim, **place))
        self.dropout = nn.Dropout(0.1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.w.is_meta:
            nn.init.orthogonal_(self.w, gain=math.sqrt(len(self.w)))

    def forward(self, x: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm1(x)).chunk(3, dim=-1)
        y = v + self.dropout(self.proj(self.attend(q, k, v).to(v.dtype)))
        return y + self.dropout(self.mlp(self.norm2(y)))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map queries, keys and values (B, N, d) to the output (B, N, d)."""
        with full_precision(q):
            # Exponentials of squared norms leave half precision at once.
            q, k, v = (part.to(decision_dtype(part.dtype)) for part in (q, k, v))
            q, k = self.features(q), self.features(k)
            # Sums over keys come first, so that no N x N matrix exists.
            normaliser = q @ k.sum(dim=1).unsqueeze(-1)
            return q @ (k.transpose(1, 2) @ v) / (normaliser + EPSILON)

    def features(self, x: Tensor) -> Tensor:
        """Map (B, N, d) to (B, N, m)."""
        half_square = x.square().sum(dim=-1, keepdim=True) / 2
        projected = F.linear(x, self.w.to(x.dtype))
        return (projected - half_square).exp() / math.sqrt(len(self.w))

    def extra_repr(self) -> str:
        return f"num_features={len(self.w)}"


class Scaled(nn.Module):
    """Return ``x * factor``, in place of the norm of queries: timm's fused attention has only its own scale."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"factor={self.factor}"


class TokensToToken(Stem):
    """Three soft splits of overlapping patches, with a token module after the first two (section 3.1).

    A soft split unfolds the map into tokens of kernel x kernel neighbours; a token module mixes and narrows them to
    ``token_dim`` channels, and they become a map again. A linear layer maps the last tokens to C channels. The strides
    of the ``splits`` (kernel, stride, padding) multiply to ``patch_size``; the ``token_module`` "performer" is linear
    in the number of tokens.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 384,
        *,
        token_module: TokenModule = "transformer",
        token_dim: int = 64,
        splits: Sequence[SoftSplit] = SPLITS,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        if math.prod(stride for _, stride, _ in splits) != patch_size:
            raise ValueError(f"the strides of splits {splits} do not multiply to patch_size={patch_size}")
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs)
        place = {"device": device, "dtype": dtype}
        module = {"transformer": TokenTransformer, "performer": TokenPerformer}[token_module]
        areas = [kernel * kernel for kernel, _, _ in splits]
        self.splits = tuple(splits)
        self.attention1 = module(in_chans * areas[0], token_dim, **place)
        self.attention2 = module(token_dim * areas[1], token_dim, **place)
        self.project = nn.Linear(token_dim * areas[2], embed_dim, bias=bias, **place)

    def feature_map(self, images: Tensor) -> Tensor:
        x = images
        for split, module in zip(self.splits, (self.attention1, self.attention2, self.project), strict=True):
            tokens, (rows, columns) = soft_split(x, split)
            x = module(tokens).transpose(1, 2).unflatten(2, (rows, columns))
        return x


def soft_split(x: Tensor, split: SoftSplit) -> tuple[Tensor, tuple[int, int]]:
    """Unfold (B, C, H, W) into tokens (B, N, C*kernel*kernel) of overlapping neighbours; return them and their grid."""
    kernel, stride, padding = split
    # The number of positions of a kernel on a padded side, as of a convolution.
    rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side in x.shape[2:])
    return F.unfold(x, kernel, stride=stride, padding=padding).transpose(1, 2), (rows, columns)


def sinusoid_table(num_tokens: int, dim: int) -> Tensor:
    """Fixed position table (1, N, C), float64: the sine (i even) or cosine (i odd) of p / 10000^(2 floor(i/2) / C)."""
    # In float64: angles of late positions are large, and the table is rounded once, at the end.
    position = torch.arange(num_tokens, dtype=torch.float64).unsqueeze(1)
    channel = torch.arange(dim, dtype=torch.float64)
    angle = position / 10000.0 ** (2 * (channel // 2) / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).unsqueeze(0)


class T2TViT(VisionTransformer):
    """T2T-ViT: a token-to-token stem before a deep and narrow ViT with a fixed table of positions.

    The rest is timm's `VisionTransformer` without biases in q, k and v. The table is an untrained parameter, as in the
    published checkpoints. Attention of the token modules divides by the root of the width of its *input*, that of the
    blocks by the root of a head's width, as in the evaluation of the published checkpoints. ``qk_scale`` is another
    factor for the blocks; the authors' factories use C^-0.5 with ``pretrained=True``.

    Deviation: at other image sizes the table is resampled with anti-aliasing, where the published code fails.

    Args:
        token_module, token_dim, splits: of `TokensToToken`; "transformer" is T2T-ViT_t, "performer" T2T-ViT.
        qk_scale: factor of the blocks' attention logits, not with ``qk_norm``; default: a head's width^-0.5.

    Example:
        >>> import timm, vitrim.models
        >>> model = timm.create_model("t2t_vit_t_14", num_classes=10, img_size=64).eval()
        >>> model(torch.zeros(1, 3, 64, 64)).shape
        torch.Size([1, 10])
    """

    pos_embed: nn.Parameter

    def __init__(
        self,
        *,
        token_module: TokenModule = "transformer",
        token_dim: int = 64,
        splits: Sequence[SoftSplit] = SPLITS,
        qk_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        if qk_scale is not None and kwargs.get("qk_norm"):
            raise ValueError("qk_scale and qk_norm do not go together: give one of them")
        defaults = {
            "mlp_ratio": 3.0,
            "qkv_bias": False,
            "norm_layer": partial(nn.LayerNorm, eps=1e-5),
            "embed_layer": partial(TokensToToken, token_module=token_module, token_dim=token_dim, splits=splits),
        }
        super().__init__(**{**defaults, **kwargs})
        self.pos_embed.requires_grad_(False)
        if qk_scale is not None:
            block: Any
            for block in self.blocks:
                # timm scales after the norm of queries: together both factors make `qk_scale`.
                block.attn.q_norm = Scaled(qk_scale / block.attn.scale)

    def init_weights(self, mode: str = "", **options: Any) -> None:  # type: ignore[override]
        super().init_weights(mode, **options)
        with torch.no_grad():
            self.pos_embed.copy_(sinusoid_table(*self.pos_embed.shape[1:]))


def checkpoint_filter_fn(checkpoint: Mapping[str, Any], model: T2TViT) -> dict[str, Tensor]:
    """Turn the authors' checkpoint into a state dict of ``model``: their ``tokens_to_token`` is timm's ``patch_embed``.

    Positions are resampled to the grid of ``model``.
    """
    state = renamed(unwrapped(checkpoint), [(r"^tokens_to_token\.", "patch_embed.")])
    fit_positions(state, "pos_embed", model.patch_embed.grid_size, num_prefix=1)
    return state


_cfg = partial(pretrained_cfg, first_conv="")

default_cfgs = generate_default_cfgs(
    {
        "t2t_vit_14.in1k": _cfg(),
        "t2t_vit_19.in1k": _cfg(),
        "t2t_vit_t_14.in1k": _cfg(),
        "t2t_vit_t_19.in1k": _cfg(),
    }
)


_create = partial(create, T2TViT, checkpoint_filter_fn)


@register_model
def t2t_vit_14(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-14, performer token modules: 21.5 M parameters, 4.80 GMACs at 224 pixels."""
    geometry = {"embed_dim": 384, "depth": 14, "num_heads": 6, "token_module": "performer"}
    return _create("t2t_vit_14", pretrained, kwargs, **geometry)


@register_model
def t2t_vit_19(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT-19, performer token modules: 39.2 M parameters, 8.50 GMACs at 224 pixels."""
    geometry = {"embed_dim": 448, "depth": 19, "num_heads": 7, "token_module": "performer"}
    return _create("t2t_vit_19", pretrained, kwargs, **geometry)


@register_model
def t2t_vit_t_14(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT_t-14, transformer token modules: 21.5 M parameters, 6.11 GMACs at 224 pixels."""
    return _create("t2t_vit_t_14", pretrained, kwargs, embed_dim=384, depth=14, num_heads=6)


@register_model
def t2t_vit_t_19(pretrained: bool = False, **kwargs: Any) -> T2TViT:
    """T2T-ViT_t-19, transformer token modules: 39.2 M parameters, 9.81 GMACs at 224 pixels."""
    return _create("t2t_vit_t_19", pretrained, kwargs, embed_dim=448, depth=19, num_heads=7)
