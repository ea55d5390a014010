"""Random pruning: the baseline that every scored method must beat."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.attention import Attention
from vitrim.core.method import StagedConfig
from vitrim.core.registry import register
from vitrim.core.scoring import ScorerReducer
from vitrim.core.tokens import TokenState
from vitrim.core.versions import constant


class Random(StagedConfig):
    """Keep a random share of the patch tokens, drawn anew for every image and every forward.

    Draws from torch's global generator of the tokens' device: seed it for repeatable results. With ``seed``, one draw
    fixes the same places in every image and forward, so that the model can be exported.

    Example:
        >>> Random(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "random"

    seed: int | None = Field(
        None,
        ge=0,
        description="draw once, with this seed, the same places in all images; default: anew in every forward",
    )

    def obstacle(self) -> str | None:
        if self.seed is not None:
            return None
        return "it draws other patches in every forward; give it a seed, as in random:seed=0, to draw once"


@register(Random)
class RandomReducer(ScorerReducer[Random]):
    site = "before"
    spares_block = True

    def score(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        if self.config.seed is None:
            return torch.rand(x.shape[0], state.num_patches, device=x.device)
        drawn = torch.tensor(_drawn(self.config.seed, self.layer.depth, state.num_patches), device=x.device)
        return drawn.expand(x.shape[0], -1)

    def ranking(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor | None:
        return None  # a draw says nothing about the image


@constant
def _drawn(seed: int, depth: int, patches: int) -> list[float]:
    """A random order of the patches, by NumPy, which a graph treats as a constant."""
    return [float(rank) for rank in np.random.default_rng((seed, depth)).permutation(patches)]
