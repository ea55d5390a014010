"""Random pruning: the baseline that every scored method must beat."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from vitrim.assignment import Hard, prune
from vitrim.attention import Attention
from vitrim.block import Reducer
from vitrim.config import Layer, MethodConfig
from vitrim.registry import register_method
from vitrim.schedule import Amount, KeepRule, keep_rate, quarter_blocks
from vitrim.tokens import TokenState


@register_method
class Random(MethodConfig):
    """Keep a random share of the patch tokens, another one for every image and every forward.

    Draws from torch's global generator of the tokens' device: seed it for repeatable results. Acts before the block.

    Example:
        >>> Random(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "random"
    kind = "prune"
    runtime: ClassVar[frozenset[str]] = frozenset({"keep_rate"})

    keep_rate: float = Field(0.7, gt=0.0, le=1.0, description="share of patch tokens kept at each stage")
    blocks: tuple[int, ...] | None = Field(None, description="stages, 0-based; default a quarter of the depth apart")
    rule: KeepRule = Field("floor_initial_power", description="how keep_rate becomes a count")

    def schedule(self, num_layers: int) -> list[Amount | None]:
        blocks = quarter_blocks(num_layers) if self.blocks is None else self.blocks
        return keep_rate(self.keep_rate, blocks, self.rule, num_layers)

    def build(self, layer: Layer) -> Reducer | None:
        return RandomReducer(self, layer)


class RandomReducer(Reducer):
    site = "before"

    def assign(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | None:
        keep = self.num_keep(state)
        if keep == state.num_patches:
            return None
        score = torch.rand(x.shape[0], state.num_patches, device=x.device)
        return prune(state, score.topk(keep, dim=1).indices)
