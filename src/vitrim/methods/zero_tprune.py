"""Zero-TPrune: training-free pruning by PageRank on the attention graph (Wang et al., CVPR 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.attention import Attention
from vitrim.core.matching import best_partners, full_precision, most_similar_first, unit
from vitrim.core.method import Count, MethodConfig, Needs, Share, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Keep, check_blocks, one_each, quarter_blocks
from vitrim.core.scoring import EarlyScorer, ScorerReducer
from vitrim.core.tokens import TokenState, take


@dataclass(frozen=True)
class TwoStages:
    """Remove ``num_similar`` patches (at most half), then keep the share ``rate`` of the rest, rounded down."""

    num_similar: int
    rate: float

    def similar(self, current: int) -> int:
        """Patches removed for being similar to another."""
        return min(self.num_similar, current // 2)

    def keep(self, initial: int, current: int) -> int:
        left = current - self.similar(current)
        return Keep(self.rate, rule="floor_current").keep(initial, left)


class ZeroTPrune(MethodConfig):
    """Rank tokens by weighted PageRank on this block's attention map; drop similar ones first, then unimportant ones.

    Formulas and deviations are in docs/methods/zero_tprune.md.

    Example:
        >>> ZeroTPrune(num_similar=10, keep_rate=0.8).counts(196, 12)[-1]
        80
    """

    name = "zero_tprune"
    paper = "Zero-TPrune: Zero-Shot Token Pruning through Leveraging of the Attention Graph (CVPR 2024)"
    traits = Traits(aligns=False)
    runtime = frozenset({"num_similar", "keep_rate"})
    tunable = Tunable(
        "keep_rate", 1.0, 0.05, digits=3, per_layer="keep_rate", places="blocks", others={"num_similar": 0}
    )

    num_similar: Count | tuple[Count, ...] = Field(
        10, description="patches dropped as similar, for all or for each block"
    )
    keep_rate: Share | tuple[Share, ...] = Field(0.8, description="share of the others kept, for all or for each block")
    blocks: tuple[int, ...] | None = Field(None, description="acts after these, 0-based; default a quarter apart")
    iterations: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="of PageRank; default 30 in the first quarter of the depth, 1 in the last, 5 between",
    )
    boost_class_token: bool = Field(True, description="start the class token, where there is one, sqrt(N) times higher")
    variance_range: tuple[float, float] = Field(
        (0.01, 0.7), description="heads with score variance outside are ignored"
    )

    def faults(self) -> Iterator[str]:
        if not 0.0 <= self.variance_range[0] < self.variance_range[1]:
            yield "variance_range must be two ascending numbers, not negative"

    def needs(self) -> Needs:
        return Needs(attention_map=True)

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return quarter_blocks(num_layers) if self.blocks is None else tuple(sorted(self.blocks))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        blocks = self.stages(num_layers)
        check_blocks(blocks, num_layers)
        similar = one_each(self.num_similar, len(blocks), "zero_tprune: num_similar")
        rates = one_each(self.keep_rate, len(blocks), "zero_tprune: keep_rate")
        schedule: list[Amount | None] = [None] * num_layers
        for block, count, rate in zip(blocks, similar, rates, strict=True):
            schedule[block] = TwoStages(count, rate)
        return schedule

    def iterations_at(self, depth: int, num_layers: int) -> int:
        """PageRank iterations of the I-stage after block ``depth``."""
        if self.iterations is not None:
            return self.iterations
        quarter = num_layers / 4
        return 30 if depth < quarter else 1 if depth >= num_layers - quarter else 5


@register(ZeroTPrune)
class ZeroTPruneReducer(ScorerReducer[ZeroTPrune]):
    site = "after"

    def __init__(self, config: ZeroTPrune, layer: Layer) -> None:
        super().__init__(config, layer)
        self.ranker = Ranker()

    @torch.no_grad()
    def remember(self, attention: Attention, state: TokenState) -> Tensor | None:
        """The scores, which need only attention, so that q, k and v need not live through the MLP."""
        if self.num_removed(state) == 0:
            return None
        # Some images at a time, because the maps of all would be the peak of the model's memory.
        step, batch = attention.images_at_once(), attention.q.shape[0]  # len(q) would fix an exported batch size
        parts = [attention] if step >= batch else [attention.narrow(0, at, step) for at in range(0, batch, step)]
        return torch.cat([self.ranker(part, state, self.config, self.layer) for part in parts])

    def score(self, x: Tensor, attention: Any, state: TokenState) -> Tensor:
        remembered: Tensor = attention
        return remembered


class Ranker(EarlyScorer):
    """Scores patches by attention alone."""

    def forward(self, attention: Attention, state: TokenState, config: ZeroTPrune, layer: Layer) -> Tensor:
        """(B, P) scores of the patches; minus infinity where the S-stage drops them."""
        amount, p = layer.amount, state.num_prefix
        assert isinstance(amount, TwoStages)
        boost = config.boost_class_token and layer.has_class_token
        similar = amount.similar(state.num_patches)
        graph = attention.probabilities()
        left = None
        if similar:
            rank = importance(graph, None, 1, boost, config.variance_range)[:, p:]
            dropped = similar_patches(rank, attention.mean_keys()[:, p:], similar)
            left = torch.ones_like(graph[:, 0, 0], dtype=torch.bool).scatter(1, dropped + p, 0)
        iterations = config.iterations_at(layer.depth, layer.num_layers)
        score = importance(graph, left, iterations, boost, config.variance_range)
        if left is not None:
            score = score.masked_fill(~left, -torch.inf)
        return score[:, p:]


def importance(
    graph: Tensor, left: Tensor | None, iterations: int, boost: bool, variance_range: Sequence[float]
) -> Tensor:
    """(B, N) importance of the tokens ``left`` (B, N), None for all; with ``boost`` the first starts sqrt(N) higher."""
    everything = torch.ones_like(graph[:, 0, 0], dtype=torch.bool)
    start = (everything if left is None else left).to(graph.dtype)
    if boost:
        boosted = start[:, :1] * start.sum(1, keepdim=True).sqrt()
        start = torch.cat([boosted, start[:, 1:]], dim=1)
    score = page_rank(graph, start, iterations, left)
    return combine_heads(score, everything if left is None else left, variance_range)


def page_rank(graph: Tensor, start: Tensor, iterations: int, left: Tensor | None = None) -> Tensor:
    """(B, H, N) scores after s <- A^T s, ``iterations`` times; tokens with a positive start have mean 1.

    Args:
        graph: (B, H, N, N) attention map, rows sum to 1.
        start: (B, N) first scores, up to a factor; 0 for removed tokens.
        left: (B, N) bool, the remaining tokens: A is restricted to them and normalised again by rows.
    """
    score = start * ((start > 0).sum(1, keepdim=True) / start.sum(1, keepdim=True))
    score = score[:, None, None, :].expand(-1, graph.shape[1], -1, -1)
    with full_precision(graph):
        if left is None:
            for _ in range(iterations):
                score = score @ graph
            return score.squeeze(2)
        # the vector is divided and masked instead of the map: a second map would be the peak of memory
        columns = left[:, None, None, :].to(graph.dtype)
        rows = (graph @ columns.transpose(2, 3)).transpose(2, 3).clamp_min(torch.finfo(graph.dtype).tiny)
        for _ in range(iterations):
            score = (score / rows) @ graph * columns
    return score.squeeze(2)


def combine_heads(scores: Tensor, left: Tensor, variance_range: Sequence[float]) -> Tensor:
    """(B, N) root mean square over the heads whose ``scores`` (B, H, N) vary enough but not too much over ``left``."""
    count = left.sum(1)[:, None]
    centred = (scores - (scores * left[:, None]).sum(2, keepdim=True) / count[..., None]) * left[:, None]
    variance = centred.square().sum(2) / count
    good = (variance >= variance_range[0]) & (variance <= variance_range[1])
    # Without a head in the range all of them count: an image must have a score.
    good = (good | ~good.any(1, keepdim=True)).to(scores.dtype)
    return ((scores.square() * good[..., None]).sum(1) / good.sum(1, keepdim=True)).sqrt()


def similar_patches(importance: Tensor, keys: Tensor, count: int) -> Tensor:
    """(B, count) patches of the less important half (B, P) whose ``keys`` (B, P, d) match best in the other half."""
    order = importance.argsort(dim=1, stable=True)
    half = importance.shape[1] // 2
    low, high = order[:, :half], order[:, half:]
    keys = unit(keys)
    best, _ = best_partners(take(keys, low), take(keys, high))
    return low.gather(1, most_similar_first(best)[:, :count])
