"""Windows inside a plain trunk, as in detectors (ViTDet, section 3; Cropr, supplement, Table 4).

Tokens travel as a map (B, rows, columns, C). Most blocks attend within windows of the image, the others across all of
it. As in ViTDet, incomplete windows are padded after the norm, and attention reads the padding. Rotary positions within
a window are those of an image of its size, and across windows those of the full image.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from timm.layers.attention import Attention, AttentionRope
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_sam import window_partition, window_unpartition
from torch import Tensor, nn

from vitrim.errors import UnsupportedModelError, VitrimError


class _InWindows:
    """Attention of a map (B, rows, columns, C) within windows of ``window_size`` patches a side; 0: across all."""

    window_size: int

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        """Attend, with its own of two rotary tables, of the image and of a window."""
        if given.get("rope") is not None:
            given["rope"] = given["rope"][self.window_size > 0]
        forward: Any = super().forward  # type: ignore[misc]
        grid, side = (x.shape[1], x.shape[2]), self.window_size
        if not side:
            return forward(x.flatten(1, 2), **given).unflatten(1, grid)  # type: ignore[no-any-return]
        # Pads at right and bottom to whole windows; attention reads the padding, as in ViTDet.
        windows, whole = window_partition(x, side)
        out = forward(windows.flatten(1, 2), **given).unflatten(1, (side, side))
        return window_unpartition(out, side, grid, whole)


class WindowedAttention(_InWindows, Attention):  # type: ignore[misc]
    """timm's `Attention`, within windows or across them."""


class WindowedAttentionRope(_InWindows, AttentionRope):  # type: ignore[misc]
    """timm's `AttentionRope`, within windows or across them."""


class WindowedEvaAttention(_InWindows, EvaAttention):  # type: ignore[misc]
    """timm's `EvaAttention`, within windows or across them."""


class _Map:
    """A trunk whose blocks pass on maps; its output is (B, P, C)."""

    window_size: int

    def _pos_embed(self, x: Tensor) -> Any:
        grid = (x.shape[1], x.shape[2])
        found: Any = super()._pos_embed(x)  # type: ignore[misc]
        if isinstance(found, Tensor):
            return found.unflatten(1, grid)
        tokens, rope = found
        if rope is not None:
            side = (self.window_size, self.window_size)
            rope = rope, self.rope.get_embed(shape=side)  # type: ignore[attr-defined]
        return tokens.unflatten(1, grid), rope

    def forward_features(self, x: Tensor, **given: Any) -> Tensor:
        """Compute the tokens (B, P, C) of all patches of images (B, 3, H, W), in raster order."""
        return super().forward_features(x, **given).flatten(1, 2)  # type: ignore[misc, no-any-return]


class WindowedViT(_Map, VisionTransformer):  # type: ignore[misc]
    """timm's `VisionTransformer` with windows."""


class WindowedEva(_Map, Eva):  # type: ignore[misc]
    """timm's `Eva` with windows."""


TRUNKS: dict[type[nn.Module], type[nn.Module]] = {VisionTransformer: WindowedViT, Eva: WindowedEva}
ATTENTIONS: dict[type[nn.Module], type[nn.Module]] = {
    own.__mro__[2]: own for own in (WindowedAttention, WindowedAttentionRope, WindowedEvaAttention)
}


def windowed(model: nn.Module, window_size: int, global_blocks: Collection[int]) -> nn.Module:
    """Give the blocks of a plain ViT, or EVA, windows in place. Removes prefix tokens; other parameters and names stay.

    ``model`` is of timm, without a head, for images of any size; `UnsupportedModelError` for others. ``global_blocks``
    are those that attend across windows, from 1 as in the papers.

    Example:
        >>> import timm, torch
        >>> options = {"global_pool": "", "num_classes": 0, "dynamic_img_size": True}
        >>> trunk = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, **options)
        >>> windowed(trunk, 2, [2, 4])(torch.zeros(1, 3, 64, 96)).shape
        torch.Size([1, 24, 192])
        >>> [block.window_size for block in trunk.blocks]
        [2, 0, 2, 0]
    """
    own: Any = model
    kind = TRUNKS.get(type(model))
    if kind is None or any(type(getattr(block, "attn", None)) not in ATTENTIONS for block in own.blocks):
        raise UnsupportedModelError(
            f"window_size is for timm's plain VisionTransformer and Eva, not {type(model).__name__} with its attention"
        )
    if not getattr(own, "dynamic_img_size", False) or getattr(own, "rope_mixed", False):
        raise UnsupportedModelError(
            "window_size needs a model for images of any size (dynamic_img_size=true) whose rotary tables, if any, are "
            "the same in every block"
        )
    depth = len(own.blocks)
    wrong = [one for one in global_blocks if not 1 <= one <= depth]
    if wrong:
        raise VitrimError(f"global_blocks: {wrong[0]} is no block of a model of {depth}; the first is 1")
    # The table begins with rows of the prefix tokens, which go with them.
    if own.pos_embed is not None and not own.no_embed_class:
        own.pos_embed = nn.Parameter(own.pos_embed.detach()[:, own.num_prefix_tokens :].clone())
    own.cls_token = own.reg_token = None
    own.num_prefix_tokens = own.num_reg_tokens = 0
    own.__class__, own.window_size, own.no_embed_class = kind, window_size, True
    for number, block in enumerate(own.blocks, start=1):
        block.window_size = block.attn.window_size = 0 if number in global_blocks else window_size
        block.attn.num_prefix_tokens = 0  # without rotary positions
        block.attn.__class__ = ATTENTIONS[type(block.attn)]
    return model
