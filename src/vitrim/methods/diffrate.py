"""DiffRate: prune and merge by learned amounts per block (Chen et al., DiffRate, ICCV 2023); inference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vitrim.assignment import Hard, merge, prune
from vitrim.attention import Attention
from vitrim.block import Reducer, Site
from vitrim.config import Layer, MethodConfig
from vitrim.errors import VitrimError
from vitrim.matching import best_partners, unit
from vitrim.methods.topk import Score, patch_score
from vitrim.registry import register_method
from vitrim.schedule import Amount, Remove
from vitrim.tokens import TokenState, take


@dataclass(frozen=True)
class Tokens:
    """Keep so many tokens, a class token counted.

    Example:
        >>> Tokens(57).keep(64, 64)
        56
    """

    count: int

    def keep(self, initial: int, current: int) -> int:
        return self.count - 1


@register_method
class DiffRate(MethodConfig):
    """Rank patches by class attention, drop the last ones, merge the next to last into the best.

    Between attention and MLP of block i, with a_j the attention of the class token to patch j, mean over heads: the
    patches are sorted by a_j, highest first, and cut to ``prune_kept[i]`` tokens; of these, those beyond
    ``merge_kept[i]`` each join the most similar (cosine of the tokens themselves) of the first ``merge_kept[i]``, as a
    plain mean. Attention adds log(size) to its logits. Both lists count the class token, as published; on models with
    more prefix tokens these come on top. Prefix tokens never move and never receive.

    The amounts are what the paper learns, for a model and a MAC target. This method applies given ones, for instance
    the published ones; it does not learn them. Without lists every block merges ``r`` patches and drops none.

    Deviations: sizes of a group add up. The published code multiplies the size of a joining token by its similarity
    first, ``discount_sizes=True``; sizes that come out negative are then clamped, where it gives NaN. Where neither
    list removes anything the patches keep their order. ``score="column_mean"`` serves models without a class token.

    Refused on heads that pool patches: dropped tokens are missing in the mean.

    Example:
        >>> DiffRate(prune_kept=(61, 53), merge_kept=(57, 49)).counts(64, 2)
        [56, 48]
    """

    name = "diffrate"
    paper = "DiffRate: Differentiable Compression Rate for Efficient Vision Transformers (ICCV 2023)"
    kind = "mixed"
    needs_class_token = True
    runtime: ClassVar[frozenset[str]] = frozenset({"r", "prune_kept", "merge_kept"})

    prune_kept: tuple[int, ...] | None = Field(
        None, description="tokens left by pruning in each block, class token counted; default: prune none"
    )
    merge_kept: tuple[int, ...] | None = Field(
        None, description="tokens left by merging in each block, class token counted; default: merge none"
    )
    r: int = Field(8, ge=0, description="without lists: patches merged in every block")
    score: Score = Field(
        "class_token",
        description="'class_token': attention from the class token; 'column_mean': attention received from all tokens, "
        "for models without a class token (computes the full map)",
    )
    discount_sizes: bool = Field(False, description="a joining token adds its size times its similarity, as published")
    proportional: bool = Field(True, description="add log(size) to the attention logits")

    @model_validator(mode="after")
    def _check(self) -> DiffRate:
        pruned, merged = self.prune_kept, self.merge_kept
        if (pruned is not None or merged is not None) and "r" in self.model_fields_set:
            raise ValueError("give either prune_kept and merge_kept, or r, not both")
        if min((*(pruned or ()), *(merged or ())), default=2) < 2:
            raise ValueError("prune_kept and merge_kept count the class token, so their smallest value is 2")
        if pruned is not None and merged is not None:
            if len(pruned) != len(merged):
                raise ValueError(f"prune_kept has {len(pruned)} values but merge_kept has {len(merged)}")
            if any(after > before for before, after in zip(pruned, merged, strict=True)):
                raise ValueError("merge_kept must not be larger than prune_kept in any block")
        return self

    def schedule(self, num_layers: int) -> list[Amount | None]:
        kept = self.prune_kept if self.merge_kept is None else self.merge_kept
        if kept is None:
            return [Remove(self.r)] * num_layers
        if len(kept) != num_layers:
            raise VitrimError(f"the lists have {len(kept)} amounts but the model has {num_layers} blocks")
        return [Tokens(count) for count in kept]

    def requires_class_token(self) -> bool:
        return self.score == "class_token"

    def build(self, layer: Layer) -> Reducer | None:
        return DiffRateReducer(self, layer)


class DiffRateReducer(Reducer):
    site = "between"

    def __init__(self, config: DiffRate, layer: Layer) -> None:
        super().__init__(config, layer)
        self.score = config.score
        self.discount_sizes = config.discount_sizes

    def configure(self, config: MethodConfig) -> None:
        assert isinstance(config, DiffRate)
        super().configure(config)
        # what merging leaves is the amount of the schedule
        self.survivors = None if config.prune_kept is None else config.prune_kept[self.layer.depth] - 1

    def assign(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | None:
        keep = self.num_keep(state)
        if keep == state.num_patches or attention is None:
            return None
        survivors = state.num_patches if self.survivors is None else min(self.survivors, state.num_patches)
        rank = patch_score(attention, state, self.score).argsort(dim=1, descending=True, stable=True)
        best, tail = rank[:, :keep], rank[:, keep:survivors]
        if survivors == keep:
            return prune(state, best)
        patches = unit(x[:, state.num_prefix :].to(state.size.dtype))
        _, partner = best_partners(take(patches, tail), take(patches, best))
        return merge(state, best, tail, partner, weight=torch.ones_like(state.size))

    def reduce(
        self, site: Site, x: Tensor, attention: Attention | None, state: TokenState
    ) -> tuple[Tensor, TokenState]:
        if site != self.site:
            return x, state
        hard = self(x, attention, state)
        if not isinstance(hard, Hard):
            return x, state
        merged, after = hard.apply(x, state)
        return merged, (replace(after, size=discounted(x, hard, state)) if self.discount_sizes else after)


def discounted(x: Tensor, hard: Hard, state: TokenState) -> Tensor:
    """(B, M) sizes where a joining token counts in proportion to its cosine with the token it joins."""
    size = state.size.gather(1, hard.anchor)
    if hard.moved is None or hard.into is None:
        return size
    vectors = unit(x.to(state.size.dtype))
    similarity = (take(vectors, hard.moved) * take(vectors, hard.anchor.gather(1, hard.into))).sum(dim=-1)
    size = size.scatter_add(1, hard.into, state.size.gather(1, hard.moved) * similarity)
    return size.clamp_min(torch.finfo(size.dtype).eps)
