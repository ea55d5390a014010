"""Random pruning: the baseline that every scored method must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.config import Layer, StagedConfig
from vitrim.core.registry import register_method
from vitrim.core.tokens import TokenState


@register_method
class Random(StagedConfig):
    """Keep a random share of the patch tokens, another one for every image and every forward.

    Draws from torch's global generator of the tokens' device: seed it for repeatable results. Acts before the block.

    Example:
        >>> Random(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "random"
    kind = "prune"

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
