"""PixelPrune for plain ViTs: patches of an image that their neighbours predict are left out (PixelPrune, 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, Site, StepOutput
from vitrim.core.method import MethodConfig, Needs, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.repeats import RepeatOptions
from vitrim.core.scoring import prune_flagged
from vitrim.core.tokens import TokenState

Deviation = Annotated[float, Field(gt=0.0)]


class PixelPruneViT(RepeatOptions, MethodConfig):
    """Leave out patches that repeat their neighbours, before the first block: for scanned pages and screens.

    Formulas and deviations are in docs/methods/pixelprune.md.

    Example:
        >>> PixelPruneViT().stages(12), PixelPruneViT(tau=0.05).describe()
        ((0,), 'pixelprune:tau=0.05')
    """

    name = "pixelprune"
    paper = "PixelPrune, 2026 (2604.00886); after the released code"
    traits = Traits(single_images=True, aligns=False)
    tunable = Tunable("tau", 0.0, 0.5, digits=3)

    std: Deviation | Annotated[tuple[Deviation, ...], Field(min_length=1)] | None = Field(
        None, description="what pixels in [0, 1] were divided by, of all channels or each; default: as the model says"
    )

    def faults(self) -> Iterator[str]:
        if self.std is not None and self.tau == 0:
            yield "std goes with tau above 0: with tau=0 equal pixels are equal in any scale"

    def needs(self) -> Needs:
        if self.tau == 0:
            return Needs(grid=True, pixels=True)
        given = self.std if self.std is None or isinstance(self.std, tuple) else (self.std,)
        return Needs(grid=True, pixels=True, pixel_std=given or True)

    def is_adaptive(self) -> bool:
        return True

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return (0,)


class PixelPruneReducer(Reducer[PixelPruneViT]):
    site = "before"
    spares_block = True

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        x, state = super().reduce(site, x, attention, state)
        return x, replace(state, pixels=None) if site == self.site else state

    @torch.no_grad()
    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        pixels = state.known_pixels(self.config.name)
        kept = self.config.kept_cells(pixels.flatten(-2)).flatten(1)
        return prune_flagged(state, kept, state.num_patches, follows=True)


@register(PixelPruneViT)
def _reducer(config: PixelPruneViT, layer: Layer) -> type[PixelPruneReducer] | None:
    return PixelPruneReducer if layer.depth == 0 else None
