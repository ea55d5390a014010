"""SCOPE: tokens that cover all the others, weighted by attention."""

from __future__ import annotations

import heapq
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, unit_rows
from vitrim.core.tokens import decision_dtype

AT_ONCE = 16
"""Gains computed in one call."""


@torch.no_grad()
def covering(features: Tensor, weights: Tensor, count: int) -> Tensor:
    """(T,) tokens of one image in the order of selection: each adds the largest weighted coverage.

    A token covers another by their cosine, not below 0. Its gain is its weight times what it adds to the coverage of
    all tokens by those before. Gains only fall, so an old gain is a bound: only those with the largest bounds are
    computed again, until one of them is the largest. The order is that of computing all gains for every pick, which
    costs T N^2; ties go to the earlier token.

    Args:
        features: (N, D).
        weights: (N,), at least 0.
        count: T, at most N.
    """
    normed = unit_rows(features)
    alike = (normed @ normed.T).clamp_min_(0)
    factors, gains = weights.tolist(), alike.sum(1).tolist()
    bounds = [(-factor * gain, place) for place, (factor, gain) in enumerate(zip(factors, gains, strict=True))]
    heapq.heapify(bounds)
    covered = alike.new_zeros(len(alike))
    picked: list[int] = []
    fresh: set[int] = set()
    while len(picked) < count:
        if (place := bounds[0][1]) in fresh:
            heapq.heappop(bounds)
            picked.append(place)
            fresh.clear()
            torch.maximum(covered, alike[place], out=covered)
            continue
        stale = [heapq.heappop(bounds)[1] for _ in range(min(AT_ONCE, len(bounds)))]
        rows = alike.index_select(0, torch.tensor(stale, device=alike.device))
        gains = rows.sub_(covered).clamp_min_(0).sum(1).tolist()
        for place, gain in zip(stale, gains, strict=True):
            heapq.heappush(bounds, (-factors[place] * gain, place))
        fresh.update(stale)
    return torch.tensor(picked, device=features.device)


@register_selector
class Scope(Selector):
    """Select tokens that together cover all the tokens, each weighted by class attention.

    Without a class token: by the mean attention from all tokens. ``saliency=none`` weights all equally and needs no
    attention, so it runs in servers; behind a tower that is not reduced it then reads the connector's features. Of the
    release, the sum of coverage and attention (``COMBINED=add``) is left out: the paper multiplies.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("scope:tokens=64,saliency=none").count((24, 24))
        64
    """

    name = "scope"
    paper = "Deng et al., SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodel LLMs, NeurIPS 2025"
    place = "before"
    published_with = "LLaVA-1.5, LLaVA-NeXT; Qwen2.5-VL in AngelSlim"

    saliency: Literal["attention", "none"] = Field(
        "attention", description="weight of a token's coverage: the attention it gets, or none"
    )
    alpha: Annotated[float, Field(ge=0.0)] = Field(1.0, description="exponent of the attention")

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(attention="read" if self.saliency == "attention" else "none")

    def select(self, seen: Seen) -> list[Choice]:
        features = seen.features
        weights = features.new_ones(features.shape[:2], dtype=decision_dtype(features.dtype))
        if self.saliency == "attention":
            assert seen.scores is not None
            weights = seen.scores.to(weights.dtype) ** self.alpha
        budget = self.budget(features.shape[1])
        return [
            Choice(covering(own, factors, budget).sort().values) for own, factors in zip(features, weights, strict=True)
        ]
