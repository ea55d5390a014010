"""Rev-ViT: a ViT of reversible blocks, which keeps no activations for training (Mangalam et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from timm.layers.drop import calculate_drop_path_rates
from timm.layers.patch_embed import PatchEmbed
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from vitrim.core.block import draw_linear_
from vitrim.core.plan import Grid
from vitrim.errors import VitrimError
from vitrim.models.common import create, fit_positions, pretrained_cfg, renamed, resample_positions, unwrapped
from vitrim.models.reversible import RevBlock, reversible

LAYER_NORM = partial(nn.LayerNorm, eps=1e-6)


class RevViT(nn.Module):
    """Rev-ViT: two equal streams of patches with positions, reversible blocks, concatenation, norm, mean, head.

    In training only the activations of one branch at a time exist, at any depth, for one more forward of the blocks
    within backward. Drop path and dropout draw the same numbers again. ``model.reversible = False`` trains like any
    other model, with all activations.

    Deviation: the published model adds a class token and drops it before the blocks, with a row in its table of
    positions: 2 C parameters without effect. They do not exist here, and `checkpoint_filter_fn` drops them.

    Not a host: methods reduce one stream of tokens, and a reduction is not reversible. Arguments are those of timm's
    `VisionTransformer`; C is the width of one stream, ``global_pool`` is "avg", or "" for all tokens.

    Example:
        >>> import timm, vitrim.models
        >>> model = timm.create_model("rev_vit_base", img_size=32, depth=2, num_classes=10)
        >>> model(torch.zeros(1, 3, 32, 32)).sum().backward()
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: Callable[..., nn.Module] = LAYER_NORM,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = check_pool(global_pool)
        self.embed_dim = embed_dim
        # Both streams side by side reach the norm and the head.
        self.num_features = self.head_hidden_size = 2 * embed_dim
        self.reversible = True
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim, **place)
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches, embed_dim, **place))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.blocks = nn.ModuleList(
            RevBlock(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                qkv_bias=qkv_bias,
                proj_drop=proj_drop_rate,
                attn_drop=attn_drop_rate,
                drop_path=rate,
                norm_layer=cast(Any, norm_layer),
                **place,
            )
            for rate in cast(list[float], calculate_drop_path_rates(drop_path_rate, depth))
        )
        self.norm = norm_layer(self.num_features, **place)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes, **place) if num_classes > 0 else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        draw_linear_(self)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^pos_embed|patch_embed", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Refuse gradient checkpointing: reversible blocks keep less than checkpoints would."""
        if enable:
            raise VitrimError("Rev-ViT keeps no activations to begin with: gradient checkpointing has nothing to save")

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        before = cast(Grid, self.patch_embed.grid_size)
        self.patch_embed.set_input_size(img_size=img_size)
        resampled = resample_positions(self.pos_embed.detach(), before, cast(Grid, self.patch_embed.grid_size))
        self.pos_embed = nn.Parameter(resampled, requires_grad=self.pos_embed.requires_grad)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            self.global_pool = check_pool(global_pool)
        self.num_classes = num_classes
        place: dict[str, Any] = {"device": self.pos_embed.device, "dtype": self.pos_embed.dtype}
        self.head = nn.Linear(self.num_features, num_classes, **place) if num_classes > 0 else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to normalised tokens (B, P, 2C), both streams side by side."""
        x = self.pos_drop(self.patch_embed(x) + self.pos_embed)
        # Without gradients there is nothing to save; exporters know no autograd function.
        if self.reversible and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            x1, x2 = reversible(list(self.blocks), x, x)
        else:
            x1 = x2 = x
            for block in self.blocks:
                x1, x2 = block(x1, x2)
        return self.norm(torch.cat([x1, x2], dim=-1))  # type: ignore[no-any-return]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens (B, P, 2C) to logits (B, K), or with ``pre_logits`` to the pooled feature (B, 2C)."""
        if self.global_pool == "avg":
            x = x.mean(dim=1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def check_pool(global_pool: str) -> str:
    """Return ``global_pool``; `VitrimError` if the model does not have it."""
    if global_pool not in ("avg", ""):
        raise VitrimError(f"Rev-ViT pools by 'avg' or not at all (''), not by '{global_pool}': it has no class token")
    return global_pool


RENAMED = (
    (r"^backbone\.", ""),
    (r"^patch_embed\.projection\.", "patch_embed.proj."),
    (r"^layers\.(\d+)\.ln1\.", r"blocks.\1.norm1."),
    (r"^layers\.(\d+)\.ln2\.", r"blocks.\1.norm2."),
    (r"^layers\.(\d+)\.ffn\.layers\.0\.0\.", r"blocks.\1.mlp.fc1."),
    (r"^layers\.(\d+)\.ffn\.layers\.1\.", r"blocks.\1.mlp.fc2."),
    (r"^layers\.(\d+)\.", r"blocks.\1."),
    (r"^(ln1|norm1)\.", "norm."),
    (r"^head\.(fc|layers\.head)\.", "head."),
)
"""Rules from mmpretrain's names to ours, applied in turn; they follow its conventions, without a published file."""


def checkpoint_filter_fn(checkpoint: Mapping[str, Any], model: RevViT) -> dict[str, Tensor]:
    """Turn a checkpoint in mmpretrain's names, or in ours, into a state dict of ``model``.

    Drops the unused class token and its row of the table of positions; resamples positions to the model's grid.
    """
    state = renamed(unwrapped(checkpoint), RENAMED)
    state.pop("cls_token", None)
    table = state.get("pos_embed")
    if table is not None and round(table.shape[1] ** 0.5) ** 2 != table.shape[1]:
        state["pos_embed"] = table[:, 1:]  # a table that is not square begins with the class token's row
    fit_positions(state, "pos_embed", cast(Grid, model.patch_embed.grid_size))
    return state


default_cfgs = generate_default_cfgs({"rev_vit_base.in1k": pretrained_cfg(first_conv="patch_embed.proj")})


@register_model
def rev_vit_base(pretrained: bool = False, **kwargs: Any) -> RevViT:
    """Rev-ViT-B: 87.3 M parameters, 17.49 GMACs at 224 pixels."""
    return create(RevViT, checkpoint_filter_fn, "rev_vit_base", pretrained, kwargs)
