"""VisPruner: some of the most attended tokens, and the least similar of the others."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, descending, unit_rows

PER_ROUND = 8
"""Tokens dropped per round."""


def important_and_diverse(
    scores: Tensor, features: Tensor, tokens: int, important_ratio: float
) -> tuple[Tensor, Tensor]:
    """(B, T) kept tokens, in raster order, and (B, t) the important ones among them, by descending score.

    ``scores`` (B, N) select the share ``important_ratio`` of T, rounded down. Of the others, by score, every second one
    is compared with those between, and the eight most similar ones are dropped, round by round. Deviation where the
    release fails: if an odd number remains, one more is important, and a round drops at most half.
    """
    total = scores.shape[1]
    tokens = min(tokens, total)
    number = int(tokens * important_ratio)
    if number < tokens and (total - number) % 2:
        number += 1
    order = descending(scores)
    important, rest = order[:, :number], order[:, number:]
    wanted = tokens - number
    if wanted == 0:
        rest = rest[:, :0]
    elif rest.shape[1] > wanted:
        images = torch.arange(len(rest), device=rest.device)[:, None]
        normed = unit_rows(features)[images, rest]
        rest = rest.gather(1, diverse(normed @ normed.transpose(1, 2), wanted))
    return torch.cat([important, rest], dim=1).sort(dim=1).values, important


def diverse(alike: Tensor, tokens: int) -> Tensor:
    """(B, T) places of the tokens that remain after the rounds of `important_and_diverse`.

    ``alike`` (B, S, S) are cosines, the first row of the token with the highest score.
    """
    if compiled.suit(alike[:1, :1]):  # for any size: rounds depend on each other
        left = torch.empty(len(alike), tokens, dtype=torch.int64)
        DIVERSE(alike, PER_ROUND, left)
        return left
    images = torch.arange(len(alike), device=alike.device)[:, None]
    own = left = torch.arange(alike.shape[1], device=alike.device).expand(alike.shape[:2])
    while (drop := min(PER_ROUND, left.shape[1] - tokens, left.shape[1] // 2)) > 0:
        if 4 * left.shape[1] < 3 * own.shape[1]:  # the cost of a round is rows times columns
            own = own.gather(1, left)
            alike = alike[images[:, :, None], left[:, :, None], left[:, None]]
            left = torch.arange(left.shape[1], device=left.device).expand_as(left)
        even, odd = left[:, 0::2], left[:, 1::2]
        # maxima of full rows, then columns: at 2,304 tokens four times as fast as single pairs
        nearest = alike[images, odd].amax(dim=1).gather(1, even)
        left = torch.cat([even.gather(1, descending(nearest)[:, drop:]), odd], dim=1)
    return own.gather(1, left)


@register_selector
class VisPruner(Selector):
    """Select half of the tokens by class attention, and half by low similarity to each other.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("vispruner:keep=0.1,important=0.5").count((24, 24))
        58
    """

    name = "vispruner"
    paper = "Zhang et al., Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning, ICCV 2025"
    place = "before"
    published_with = "LLaVA-1.5, LLaVA-NeXT, Video-LLaVA"

    important: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="share of the budget that is chosen by attention, rounded down"
    )

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(attention="read")

    def select(self, seen: Seen) -> list[Choice]:
        assert seen.scores is not None
        budget = self.budget(seen.scores.shape[1])
        return [Choice(kept) for kept in important_and_diverse(seen.scores, seen.features, budget, self.important)[0]]


def _diverse(alike: Any, step: int, left: Any) -> None:
    """Fill ``left`` (B, T) as `diverse` does, from ``alike`` (B, S, S), in a loop."""
    wanted = left.shape[1]
    for b in range(len(alike)):
        own = np.arange(alike.shape[1])
        while len(own) > wanted:
            drop = min(step, len(own) - wanted, len(own) // 2)
            even, odd = own[0::2].copy(), own[1::2].copy()
            nearest = np.empty(len(even), alike.dtype)
            for i in range(len(even)):
                row, best = alike[b, even[i]], -alike.dtype.type(np.inf)
                for other in odd:
                    best = max(best, row[other])
                nearest[i] = -best
            own = np.concatenate((even[np.argsort(nearest, kind="mergesort")][drop:], odd))
        left[b] = own


DIVERSE = compiled.Loop(_diverse)
