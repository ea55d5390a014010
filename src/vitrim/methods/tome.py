"""ToMe: merge the most similar tokens of every block (Bolya et al., Token Merging: Your ViT But Faster, ICLR 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.matching import alternate_similarity, match_alternate
from vitrim.core.method import Count, MethodConfig, Share, Traits, Tunable
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, MergeRule, filled_up, half, keep_rate, linear, per_layer, quarter_blocks
from vitrim.core.tokens import TokenState


class ToMe(MethodConfig):
    """Bipartite soft matching on keys, between attention and MLP of every block.

    Formulas and deviations are in docs/methods/tome.md.

    Example:
        >>> ToMe(r=8, inflect=-1.0).counts(196, 12)[-1]
        105
    """

    name = "tome"
    paper = "Token Merging: Your ViT But Faster (ICLR 2023)"
    kind = "merge"
    traits = Traits(least_kept=half)
    runtime = frozenset({"r", "inflect", "keep_rate"})
    tunable = Tunable("r", 0, None, per_layer="r", others=dict.fromkeys(("per", "blocks", "rule")))

    r: Count | tuple[Count, ...] = Field(
        8, description="tokens merged per block, or a list from the first block on (0 after its end)"
    )
    inflect: float = Field(
        0.0,
        ge=-1.0,
        le=1.0,
        description="with one r: -1 goes linearly from 2r down to 0 over the blocks, 1 from 0 up to 2r",
    )
    per: int | None = Field(
        None,
        ge=1,
        description="r is for images of this many patches, and scales with their number; default: it does not scale",
    )
    keep_rate: Share | tuple[Share, ...] | None = Field(
        None, description="instead of r: share of patches kept per stage, or a list with one share per stage"
    )
    blocks: tuple[int, ...] | None = Field(None, description="stages of keep_rate, 0-based; default a quarter apart")
    rule: MergeRule = Field("floor_initial_power", description="how keep_rate becomes a count")
    proportional: bool = Field(True, description="add log(size) to the attention logits (off for MAE)")
    kept_order: Literal["position", "similarity"] = Field(
        "position", description="order of unmerged sources; 'similarity' is the published one without a class token"
    )

    def faults(self) -> Iterator[str]:
        if self.keep_rate is not None and {"r", "inflect", "per"} & self.model_fields_set:
            yield "give either r (with inflect) or keep_rate, not both"
        if self.keep_rate is None and (self.blocks is not None or self.rule != "floor_initial_power"):
            yield "blocks and rule go with keep_rate; with r every block merges, a list gives each its own"
        if not isinstance(self.r, int) and self.inflect != 0.0:
            yield "inflect goes with one r for all blocks, not with a list"

    def stages(self, num_layers: int) -> tuple[int, ...]:
        if self.keep_rate is None:
            return super().stages(num_layers)
        return quarter_blocks(num_layers) if self.blocks is None else tuple(sorted(self.blocks))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        if self.keep_rate is not None:
            return keep_rate(self.keep_rate, self.stages(num_layers), self.rule, num_layers)
        if isinstance(self.r, int):
            return linear(self.r, self.inflect, num_layers, self.per)
        return per_layer(filled_up(self.r, num_layers), num_layers, self.per)


@register(ToMe)
class ToMeReducer(Reducer[ToMe]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        similarity = alternate_similarity(attention, state.num_prefix)
        by_position = self.config.kept_order == "position"
        return match_alternate(state, similarity, self.num_removed(state), by_position=by_position)
