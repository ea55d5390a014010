"""DART: a few pivots, and the tokens that are least similar to them, on embeddings."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, descending
from vitrim.core.tokens import decision_dtype

LEAST = 1e-8
"""Smallest product of two norms."""


def strongest(embeddings: Tensor, count: int) -> Tensor:
    """(n,) rows of ``embeddings`` (M, D) with the largest L1 norms, descending; n is at most M."""
    sums = embeddings.to(decision_dtype(embeddings.dtype)).abs().sum(dim=-1)
    return descending(sums[None])[0, :count]


def least_like_pivots(features: Tensor, text: Tensor | None, count: int, pivots: int) -> Tensor:
    """(T,) kept tokens of one image ``features`` (N, D), in raster order.

    Keeps the strongest ``pivots`` tokens of the image. Then each of them and of the ``text`` pivots (n, D), in this
    order, adds its share of the remaining count: the tokens of smallest cosine with it.
    """
    x = features.to(decision_dtype(features.dtype))
    own = strongest(x, min(pivots, count))
    acting = x[own] if text is None else torch.cat([x[own], text.to(x)])
    lengths = x.norm(dim=-1)
    cosine = (acting @ x.T) / (acting.norm(dim=-1)[:, None] * lengths).clamp_min(LEAST)
    taken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    taken[own] = True
    left = count - len(own)
    for number, row in enumerate(cosine):
        # The remaining count over the remaining pivots, rounded up: the first ones take the remainder.
        share = -(-left // (len(cosine) - number))
        if share <= 0:
            break
        taken[descending((-row).masked_fill(taken, -torch.inf)[None])[0, :share]] = True
        left -= share
    return taken.nonzero().squeeze(1)


@register_selector
class Dart(Selector):
    """Select a few pivots of image and text, and the least similar tokens, on the language model's embeddings.

    As in TensorRT Edge-LLM. The published DART acts within the language model, which selectors cannot do.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("dart:keep=0.75,pivots=4").count(1995)
        1497
    """

    name = "dart"
    paper = "Wen et al., Stop Looking for Important Tokens in Multimodal Language Models, EMNLP 2025"
    rounding = "ceil"
    published_with = "Qwen3-VL (on embeddings); LLaVA-1.5, LLaVA-NeXT, Qwen2.5-VL (within the language model)"

    pivots: int = Field(4, ge=0, description="pivots of every image: the tokens with the largest L1 norms")
    text_pivots: int = Field(4, ge=0, description="pivots of the text of the prompt, shared by its images")

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(text=self.text_pivots > 0)

    def select(self, seen: Seen) -> list[Choice]:
        budget = self.budget(seen.features.shape[1])
        found = []
        for place, features in enumerate(seen.features):
            text = None
            if seen.text is not None and self.text_pivots:
                text = seen.text[place]
                text = text[strongest(text, self.text_pivots)]
            # Without any pivot nothing could be chosen.
            pivots = max(self.pivots, 1) if text is None or not len(text) else self.pivots
            found.append(Choice(least_like_pivots(features, text, budget, pivots)))
        return found
