"""timm's `NaFlexVit` on batches of images: its blocks are those of `VisionTransformer` or of `Eva`.

Batches of padded patches (NaFlex) bring a mask, which a reduced block refuses.
"""

from __future__ import annotations

from typing import Any

from timm.models.naflexvit import NaFlexVit
from torch import nn

from vitrim.core.facts import HostFacts
from vitrim.core.registry import register_host
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.timm.common import TimmHost
from vitrim.hosts.timm.eva import ReducedEvaBlock
from vitrim.hosts.timm.vit import TimmViT


@register_host("timm.models.naflexvit.NaFlexVit")
class TimmNaFlexViT(TimmHost):
    """Models of class `timm.models.naflexvit.NaFlexVit`. Their own image size is that of the position table."""

    name = "timm NaFlexVit"
    reduced_blocks = (*TimmViT.reduced_blocks, ReducedEvaBlock)
    model_classes = (NaFlexVit,)
    calls = (*TimmHost.calls, "_forward_embeds", "_pool")

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if model.embeds.pos_embed_grid_size is None:  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"this {type(model).__name__} has no image size of its own: create it with img_size=..."
            )

    @classmethod
    def facts(cls, model: Any) -> HostFacts:
        rows, columns = model.embeds.pos_embed_grid_size
        height, width = model.embeds.patch_size
        return HostFacts(
            dim=model.embed_dim,
            num_heads=sum(attn.num_heads for attn in cls.attentions(model.blocks[0])),
            num_classes=model.num_classes,
            num_prefix=model.num_prefix_tokens,
            has_class_token=model.has_class_token,
            grid_size=(rows, columns),
            head_rows=cls.head_rows(model),
            input_size=(model.in_chans, rows * height, columns * width),
        )

    @classmethod
    def patch_maker(cls, model: Any) -> nn.Module | None:
        return model.embeds  # type: ignore[no-any-return]

    @classmethod
    def grid_of(cls, maker: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        grid = output[1]  # None for patches that come one by one
        return None if grid is None else (grid[0], grid[1])
