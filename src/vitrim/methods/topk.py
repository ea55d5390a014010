"""Top-K: keep the patches the class token attends to most (the baseline of Haurum et al., ICCVW 2023)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.config import Layer, StagedConfig
from vitrim.core.registry import register_method
from vitrim.core.tokens import TokenState

Score = Literal["class_token", "column_mean"]


class ScoredPruning(StagedConfig):
    """Options of methods that keep the patches with the highest attention score at a few stages."""

    needs_class_token = True

    score: Score = Field(
        "class_token",
        description="'class_token': attention from the class token; 'column_mean': attention received from all tokens, "
        "for models without a class token (computes the full map in these blocks)",
    )

    def requires_class_token(self) -> bool:
        return self.score == "class_token"


@register_method
class TopK(ScoredPruning):
    """Keep the K patches with the highest class attention, averaged over heads; drop the rest.

    K = floor(P r^s) of the P initial patches at stage s = 1, 2, 3. The score is this block's own attention. Acts at the
    query: only the kept query rows are computed, which gives the same tokens as dropping after attention, cheaper. Kept
    patches come in descending order of score, as published.

    Example:
        >>> TopK(keep_rate=0.7).counts(196, 12)[-1]
        67
    """

    name = "topk"
    paper = "Which Tokens to Use? Investigating Token Reduction in Vision Transformers (ICCVW 2023)"

    def build(self, layer: Layer) -> Reducer | None:
        return TopKReducer(self, layer)


class TopKReducer(Reducer):
    site = "query"

    def __init__(self, config: ScoredPruning, layer: Layer) -> None:
        super().__init__(config, layer)
        self.score = config.score

    def assign(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | None:
        keep = self.num_keep(state)
        if keep == state.num_patches or attention is None:
            return None
        score = patch_score(attention, state, self.score)
        return prune(state, score.topk(keep, dim=1).indices)


def patch_score(attention: Attention, state: TokenState, score: Score, *, gradient: bool = False) -> Tensor:
    """(B, P) attention each patch token receives, averaged over heads, in at least float32.

    No gradient flows unless ``gradient``: a choice has none, only weights do.
    """
    if not gradient:
        attention = attention.detach()
    received = attention.class_row().mean(dim=1) if score == "class_token" else attention.column_mean()
    return received[:, state.num_prefix :]
