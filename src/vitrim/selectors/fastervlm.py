"""FasterVLM: the tokens with the highest class attention."""

from __future__ import annotations

from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, SelectorNeeds, largest


def most_attended(scores: Tensor, count: int) -> Tensor:
    """(B, ``count``) tokens with the largest ``scores`` (B, N), in raster order."""
    return largest(scores, min(count, scores.shape[1]))


@register_selector
class FasterVLM(Selector):
    """Select the tokens with the highest class attention, in the block whose output the connector reads.

    Without a class token: those with the highest mean attention from all tokens.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("fastervlm:tokens=64").count((24, 24))
        64
    """

    name = "fastervlm"
    paper = "Zhang et al., [CLS] Attention is All You Need for Training-Free Visual Token Pruning, 2024 (2412.01818v1)"
    published_with = "LLaVA-1.5, LLaVA-NeXT, Video-LLaVA"

    def needs(self) -> SelectorNeeds:
        return SelectorNeeds(attention="read")

    def select(self, seen: Seen) -> list[Choice]:
        assert seen.scores is not None
        return [Choice(kept) for kept in most_attended(seen.scores, self.budget(seen.scores.shape[1]))]
