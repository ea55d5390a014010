"""LV-ViT: a ViT trained with a label for every token (Jiang et al., NeurIPS 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from timm.models import checkpoint_seq, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitrim.core.block import draw_linear_
from vitrim.core.versions import require
from vitrim.errors import VitrimError
from vitrim.models.common import Stem, create, fit_positions, pretrained_cfg, unwrapped

if TYPE_CHECKING:
    from vitrim.tasks.step import Step


class Box(NamedTuple):
    """Rows ``top`` to ``bottom`` and columns ``left`` to ``right`` of a grid of patches, ends excluded."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


class DenseLogits(NamedTuple):
    """Logits of the class token (B, K) and of every patch (B, P, K)."""

    class_token: Tensor
    patches: Tensor


class ConvStem(Stem):
    """Stem of LV-ViT: three convolutions at half resolution, then one on patches (section 3.3, "4_2" in the code).

    7 x 7 with stride 2, two of 3 x 3, each ``width`` channels wide with batch norm and ReLU; then p/2 x p/2 with stride
    p/2, for patches of p pixels.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        *,
        width: int = 64,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs)
        place = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False, **place)
        self.bn1 = nn.BatchNorm2d(width, **place)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False, **place)
        self.bn2 = nn.BatchNorm2d(width, **place)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False, **place)
        self.bn3 = nn.BatchNorm2d(width, **place)
        step = patch_size // 2
        self.proj = nn.Conv2d(width, embed_dim, step, stride=step, bias=bias, **place)

    def feature_map(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        return self.proj(x)  # type: ignore[no-any-return]


class SkipScale(nn.Module):
    """Divide a residual branch by the skip lambda of its block, in place of timm's `LayerScale`."""

    def __init__(self, skip_lambda: float) -> None:
        super().__init__()
        self.skip_lambda = skip_lambda

    def forward(self, x: Tensor) -> Tensor:
        return x / self.skip_lambda

    def extra_repr(self) -> str:
        return f"skip_lambda={self.skip_lambda}"


class LVBlock(Block):
    """Pre-norm block: x + attention(x) / lambda, then x + mlp(x) / lambda (section 3.3, "residual connection").

    ``skip_lambda`` is lambda; ``head_dim`` the channels of a head, default C / H.
    """

    ls1: Any
    ls2: Any

    def __init__(
        self, dim: int, num_heads: int, *, skip_lambda: float = 1.0, head_dim: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if head_dim is not None:
            require("timm", "1.0.23", "head_dim")
            options = ("qkv_bias", "attn_drop", "proj_drop", "device", "dtype")
            own = {option: kwargs[option] for option in options if option in kwargs}
            self.attn = Attention(dim, num_heads, attn_head_dim=head_dim, **own)
        if skip_lambda != 1.0:
            self.ls1, self.ls2 = SkipScale(skip_lambda), SkipScale(skip_lambda)


class LVViT(VisionTransformer):
    """LV-ViT: convolutional stem, residual branches divided by lambda, and a second head that labels every patch.

    A call returns logits (B, K), in training too: those of the class token plus half the maximum over the patches of
    the auxiliary head's logits, per class. `forward_dense` returns both separately, for training with labels per token
    and with mixed tokens; `objective` is its loss. The rest is timm's `VisionTransformer`. There is an auxiliary head
    only with class-token pooling; ``model.aux_head = None`` removes it.

    Deviations from the published code: a call in training mode returns logits like any other model, instead of three
    values with mixed tokens. Position tables are resampled with anti-aliasing.

    Args:
        skip_lambda: divisor of the residual branches.
        head_dim: channels of an attention head, default C / H.
        stem_width: channels of the stem's first three convolutions.
        dense_head: have the auxiliary head.
        aux_weight: weight of its maximum in the logits.

    Example:
        >>> import timm, vitrim.models
        >>> model = timm.create_model("lv_vit_tiny", num_classes=10).eval()
        >>> model.forward_dense(torch.zeros(1, 3, 224, 224)).patches.shape
        torch.Size([1, 196, 10])
    """

    aux_head: nn.Linear | None
    norm: Any

    def __init__(
        self,
        *,
        skip_lambda: float = 1.0,
        head_dim: int | None = None,
        stem_width: int = 64,
        dense_head: bool = True,
        aux_weight: float = 0.5,
        **kwargs: Any,
    ) -> None:
        defaults = {
            "mlp_ratio": 3.0,
            "qkv_bias": False,
            "norm_layer": partial(nn.LayerNorm, eps=1e-5),
            "embed_layer": partial(ConvStem, width=stem_width),
            "block_fn": partial(LVBlock, skip_lambda=skip_lambda, head_dim=head_dim),
        }
        super().__init__(**{**defaults, **kwargs})
        self.dense_head = dense_head
        self.aux_weight = aux_weight
        self.aux_head = self._aux_head()
        if self.aux_head is not None:
            draw_linear_(self.aux_head)

    def _aux_head(self) -> nn.Linear | None:
        if not self.dense_head or self.num_classes == 0 or self.global_pool != "token":
            return None
        like = self.norm.weight
        return nn.Linear(self.embed_dim, self.num_classes, device=like.device, dtype=like.dtype)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Create new heads for ``num_classes``, 0 for none; the auxiliary one only with ``global_pool="token"``."""
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = self._aux_head()

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens (B, N, C) to logits (B, K), or with ``pre_logits`` to the pooled feature (B, C)."""
        pooled: Tensor = self.head_drop(self.fc_norm(self.pool(x)))
        if pre_logits:
            return pooled
        logits: Tensor = self.head(pooled)
        if self.aux_head is None:
            return logits
        patches: Tensor = self.aux_head(x[:, self.num_prefix_tokens :])
        # Half the best patch per class, as in the published evaluation.
        return logits + self.aux_weight * patches.amax(dim=1)

    def forward_dense(self, images: Tensor, box: Box | None = None) -> DenseLogits:
        """Compute separate logits of the class token and of every patch, optionally of mixed tokens ("MixToken").

        With ``box``, e.g. of `sample_box` (section 3.2), image b gets the patches in the box from image B - 1 - b,
        after the stem, so that no patch sees two images. The logits of these patches return to their own image:
        ``patches[b]`` belong to image b, ``class_token[b]`` to the mixture. In a model reduced by `vitrim.reduce_`,
        merged patches have the logits of their group; those of pruned patches (where ``reduction.state.source`` is -1)
        are meaningless. `VitrimError` without an auxiliary head.
        """
        if self.aux_head is None:
            raise VitrimError("this model has no auxiliary head: create it with dense_head=True and num_classes > 0")
        x = self.patch_embed(images)
        grid = self.patch_embed.dynamic_feat_size(images.shape[-2:])
        # Before positions are added: a patch takes the place that it comes to.
        if box is not None:
            x = swap_box(x.view(len(x), *grid, -1), box).view_as(x)
        x = self.norm_pre(self.patch_drop(self._pos_embed(x)))
        x = checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x)
        x = self.norm(x)
        patches = self.aux_head(x[:, self.num_prefix_tokens :])
        # Back to their own images: swapping twice changes nothing.
        if box is not None:
            patches = swap_box(patches.view(len(x), *grid, -1), box).view_as(patches)
        return DenseLogits(self.head(self.head_drop(self.pool(x))), patches)

    def losses(self, step: Step) -> dict[str, Tensor]:
        """Training losses of one batch: `objective`, where every patch has the label of its image.

        In training mode a random box of tokens is mixed, unless the model drops patches. Without an auxiliary head, or
        reduced, the model learns the task from its logits (B, K), as DynamicViT and GTP train it: the auxiliary logits
        of removed patches are meaningless. A teacher, whose logits are of images, is refused.
        """
        if self.aux_head is None or step.reduction is not None:
            return {"total": step.criterion(step.logits(), step.targets)}
        if step.teacher is not None:
            raise VitrimError(
                "LV-ViT learns a label per patch, which a teacher of images does not give: leave teacher and distil "
                "out, or create the model with dense_head=False"
            )
        grid = self.patch_embed.dynamic_feat_size(step.images.shape[-2:])
        mixes = self.training and isinstance(self.patch_drop, nn.Identity)  # a box needs the whole grid
        box = sample_box(grid) if mixes else Box(0, 0, 0, 0)
        logits = self.forward_dense(step.images, box if box.area else None)
        patches = grid[0] * grid[1]
        # a criterion that sums over rows would count every patch in full, and the mean is needed
        weight = 1.0 / patches if getattr(step.criterion, "reduction", "mean") == "sum" else 1.0
        share = box.area / patches
        return objective(logits, step.targets, criterion=step.criterion, box_share=share, dense_weight=weight)


def swap_box(x: Tensor, box: Box) -> Tensor:
    """Swap the patches (B, h, w, ...) in ``box`` with those of the reversed batch; its own inverse."""
    rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
    mixed = x.clone()
    # Image b and image B - 1 - b swap: no second permutation is needed.
    mixed[:, rows, columns] = x.flip(0)[:, rows, columns]
    return mixed


def sample_box(grid: tuple[int, int], generator: torch.Generator | None = None) -> Box:
    """Draw a random box on a ``grid`` as in CutMix: a uniform share of the area, a uniform centre, cut at
    the border.
    """
    share, row, column = torch.rand(3, generator=generator).tolist()
    sides = []
    for centre, size in ((row, grid[0]), (column, grid[1])):
        # The sides of a square with this share of the area, as in CutMix; a box that leaves the grid is cut.
        half, middle = int(size * share**0.5) // 2, int(centre * size)
        sides.append((max(middle - half, 0), min(middle + half, size)))
    (top, bottom), (left, right) = sides
    return Box(top, left, bottom, right)


def objective(
    logits: DenseLogits,
    targets: Tensor,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    patch_targets: Tensor | None = None,
    box_share: float = 0.0,
    dense_weight: float = 1.0,
) -> dict[str, Tensor]:
    """Loss of token labelling (section 3.1): that of the class token plus the mean loss of all patches.

    Args:
        logits: of `LVViT.forward_dense`.
        targets: of the images, for ``criterion``: (B,) classes or (B, K) probabilities.
        criterion: a mean over rows, from logits (rows, K) and their targets.
        patch_targets: (B, P) or (B, P, K) of the patches of each image; None: each patch has its image's.
        box_share: share of the patches that were swapped, ``area / P``; the class token learns the mixture.
        dense_weight: weight of the patches' mean loss; 1 in the paper's experiments.

    Returns:
        The unweighted terms "class" and "patches", and "total", their weighted sum.
    """
    # The loss is linear in mixed labels: two losses of whole labels stand for one of the mixture.
    own, other = criterion(logits.class_token, targets), criterion(logits.class_token, targets.flip(0))
    batch, patches = logits.patches.shape[:2]
    if patch_targets is None:
        patch_targets = targets.unsqueeze(1).expand(batch, patches, *targets.shape[1:])
    terms = {
        "class": (1.0 - box_share) * own + box_share * other,
        "patches": criterion(logits.patches.flatten(0, 1), patch_targets.flatten(0, 1)),
    }
    return {"total": terms["class"] + dense_weight * terms["patches"], **terms}


def checkpoint_filter_fn(checkpoint: Mapping[str, Any], model: LVViT) -> dict[str, Tensor]:
    """Turn the authors' checkpoint into a state dict of ``model``: equal names, positions resampled to its grid."""
    state = unwrapped(checkpoint)
    fit_positions(state, "pos_embed", model.patch_embed.grid_size, num_prefix=1)
    if model.aux_head is None:
        state = {name: value for name, value in state.items() if not name.startswith("aux_head.")}
    return state


_cfg = partial(pretrained_cfg, first_conv="patch_embed.conv1", classifier=("head", "aux_head"))

default_cfgs = generate_default_cfgs(
    {
        "lv_vit_tiny.in1k": _cfg(),
        "lv_vit_small.in1k": _cfg(),
        "lv_vit_medium.in1k": _cfg(crop_pct=1.0),
    }
)


_create = partial(create, LVViT, checkpoint_filter_fn)


@register_model
def lv_vit_tiny(pretrained: bool = False, **kwargs: Any) -> LVViT:
    """LV-ViT-T: 8.5 M parameters, 2.88 GMACs at 224 pixels."""
    return _create("lv_vit_tiny", pretrained, kwargs, embed_dim=240, depth=12, num_heads=4)


@register_model
def lv_vit_small(pretrained: bool = False, **kwargs: Any) -> LVViT:
    """LV-ViT-S: 26.2 M parameters, 6.57 GMACs at 224 pixels."""
    return _create("lv_vit_small", pretrained, kwargs, embed_dim=384, depth=16, num_heads=6, skip_lambda=2.0)


@register_model
def lv_vit_medium(pretrained: bool = False, **kwargs: Any) -> LVViT:
    """LV-ViT-M: 55.8 M parameters, 12.70 GMACs at 224 pixels."""
    return _create("lv_vit_medium", pretrained, kwargs, embed_dim=512, depth=20, num_heads=8, skip_lambda=2.0)
