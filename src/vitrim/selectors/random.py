"""Random selection, a baseline for selectors."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector


def drawn(total: int, count: int, seed: int) -> Tensor:
    """(``count``,) places below ``total``, ascending: a uniform draw without replacement, fixed by the seed."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values


@register_selector
class RandomTokens(Selector):
    """Select tokens by a uniform draw: the baseline that every other selector must beat on your task.

    Only seed and number of tokens decide, so images of one size keep the same places in every batch, process and
    device. Average over several seeds.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("random:tokens=64,seed=1").count((24, 24))
        64
    """

    name = "random"
    paper = "none, a baseline; see VTC-Bench (2510.07143) and UniPruneBench"
    published_with = "no model: a baseline for any"

    seed: int = Field(0, ge=0, description="of the draw")

    def select(self, seen: Seen) -> list[Choice]:
        total = seen.features.shape[1]
        kept = drawn(total, self.budget(total), self.seed).to(seen.features.device)
        return [Choice(kept) for _ in seen.features]
