"""ToFu: prune in early blocks, merge in late ones (Kim et al., Token Fusion: Bridging the Gap, WACV 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, Soft, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, StepOutput
from vitrim.core.matching import alternate_similarity, match_alternate
from vitrim.core.method import Share, StagedConfig, Traits
from vitrim.core.registry import register
from vitrim.core.schedule import KeepRule, half
from vitrim.core.tokens import TokenState, decision_dtype, take


class ToFu(StagedConfig):
    """Find ToMe's pairs, between attention and MLP; early blocks drop the sources, late ones merge and keep the norm.

    Formulas and deviations are in docs/methods/tofu.md.

    Example:
        >>> ToFu(keep_rate=0.9).counts(64, 6)
        [58, 53, 48, 44, 40, 36]
    """

    name = "tofu"
    paper = "Token Fusion: Bridging the Gap between Token Pruning and Token Merging (WACV 2024)"
    kind = "mixed"
    traits = Traits(least_kept=half)

    keep_rate: Share | tuple[Share, ...] = Field(
        0.9, description="share of the current patches kept by each block, or a list with one share per block"
    )
    blocks: tuple[int, ...] | None = Field(None, description="where to reduce, 0-based; default all")
    rule: KeepRule = Field("ceil_current", description="how keep_rate becomes a count")
    prune_until: int | None = Field(
        None, ge=-1, description="last block that prunes, 0-based; default half the depth; -1: all merge"
    )
    norm_of: Literal["average", "destination"] = Field(
        "average", description="norm the merged token is divided by; 'destination': PiToMe's re-implementation"
    )

    def default_stages(self, num_layers: int) -> tuple[int, ...]:
        return tuple(range(num_layers))

    def prunes_at(self, depth: int, num_layers: int) -> bool:
        """True if block ``depth`` drops the sources instead of merging them."""
        return depth <= (num_layers // 2 if self.prune_until is None else self.prune_until)

    def pruned(self, depth: int, num_layers: int, current: int, left: int) -> int:
        return current - left if self.prunes_at(depth, num_layers) else 0


@register(ToFu)
class ToFuReducer(Reducer[ToFu]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        similarity = alternate_similarity(attention, state.num_prefix)
        merged = match_alternate(state, similarity, self.num_removed(state))
        if self.config.prunes_at(self.layer.depth, self.layer.num_layers):
            return prune(state, merged.anchor[:, state.num_prefix :] - state.num_prefix)
        return replace(merged, weight=torch.ones_like(state.size))

    def carry_out(self, assignment: Hard | Soft, x: Tensor, state: TokenState) -> StepOutput:
        reduced, after = assignment.apply(x, state)
        if not isinstance(assignment, Hard) or assignment.is_selection:
            return reduced, after
        # merged tokens get the largest norm among the tokens of their group
        wide = decision_dtype(x.dtype)
        norm = x.to(wide).norm(dim=-1, keepdim=True)
        largest = replace(assignment, maximum=True).pool(norm, state.size)
        if self.config.norm_of == "average":
            reference = reduced.to(wide).norm(dim=-1, keepdim=True)
        else:
            reference = take(norm, assignment.anchor)
        factor = largest / reference.clamp_min(torch.finfo(wide).tiny)
        return reduced * factor.to(reduced.dtype), after
