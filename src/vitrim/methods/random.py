"""Random pruning: the baseline that every scored method must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrim.core.attention import Attention
from vitrim.core.config import StagedConfig
from vitrim.core.registry import reduces, register_method
from vitrim.core.scoring import ScorerReducer
from vitrim.core.tokens import TokenState


@register_method
class Random(StagedConfig):
    """Keep a random share of the patch tokens, drawn anew for every image and every forward.

    Draws from torch's global generator of the tokens' device: seed it for repeatable results. Acts before the block.

    Example:
        >>> Random(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "random"
    kind = "prune"


@reduces(Random)
class RandomReducer(ScorerReducer[Random]):
    site = "before"

    def score(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        return torch.rand(x.shape[0], state.num_patches, device=x.device)

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return None  # a draw says nothing about the image
