"""Top-K: keep the patches the class token attends to most (the baseline of Haurum et al., ICCVW 2023)."""

from __future__ import annotations

from torch import Tensor

from vitrim.core.attention import Attention
from vitrim.core.registry import register
from vitrim.core.scoring import ScoredPruning, ScorerReducer, patch_score
from vitrim.core.tokens import TokenState


class TopK(ScoredPruning):
    """Keep the K patches with the highest class attention, averaged over heads; drop the rest.

    K = floor(P r^s) of the P initial patches at stage s = 1, 2, 3. Acts at the query: only the kept query rows are
    computed. Kept patches come in descending order of score, as published.

    Example:
        >>> TopK(keep_rate=0.7).counts(196, 12)[-1]
        67
    """

    name = "topk"
    paper = "Which Tokens to Use? Investigating Token Reduction in Vision Transformers (ICCVW 2023)"


@register(TopK)
class TopKReducer(ScorerReducer[ScoredPruning]):
    site = "query"

    def score(self, x: Tensor, attention: Attention, state: TokenState) -> Tensor:
        return patch_score(attention, state, self.config.score)
