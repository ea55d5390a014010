"""Plain trunks with windows, `vitrim.models.windowed`. Windows are batch rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor

from vitrim.hosts.shared.windows import WindowedHost
from vitrim.hosts.timm.common import BiasBeside, PreNorm, PreNormGamma, TimmHost, refuse_mask
from vitrim.hosts.timm.sam import TimmWindowBlock
from vitrim.hosts.vitrim.library import OwnLibrary
from vitrim.models.windowed import (
    WindowedAttention,
    WindowedAttentionRope,
    WindowedEva,
    WindowedEvaAttention,
    WindowedViT,
)


class ReducedInWindows(TimmWindowBlock):
    """Base of timm's windowed blocks, reduced; ``rope`` is a pair, the image's table and a window's."""

    output_names = ("norm", "proj", "proj_drop")

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        refuse_mask(attn_mask, is_causal)
        return self.run(x, None if rope is None else rope[not self.crosses])


class ReducedWindowedBlock(PreNorm, ReducedInWindows, Block):  # type: ignore[misc]
    attention_classes = (WindowedAttention,)


class ReducedWindowedEvaBlock(PreNormGamma, BiasBeside, ReducedInWindows, EvaBlock):  # type: ignore[misc]
    attention_classes = (WindowedEvaAttention, WindowedAttentionRope)


class WindowedTrunk(WindowedHost, TimmHost):
    """The trunk of `vitdet:` models with ``window_size``: ViT, EVA-02 and similar. [Windows](hosts.md#windows)."""

    name = "vitrim trunks with windows"
    purpose = "segmentation, detection, poses, depth"
    reduced_blocks = (ReducedWindowedBlock, ReducedWindowedEvaBlock)
    model_classes = (WindowedViT, WindowedEva)


class WindowedLibrary(OwnLibrary):
    """A library that also accepts weights of the same trunk with a class token, which is left out."""

    def resampled(self, model: Any, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        table, found = weights.get("pos_embed"), dict(weights)
        if table is not None:  # positions of tokens in front of a square of patches
            found["pos_embed"] = table[:, table.shape[1] - isqrt(table.shape[1]) ** 2 :]
        return super().resampled(model, found)
