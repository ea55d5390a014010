"""MCTF: fuse tokens by several criteria before attention (Lee et al., Multi-criteria Token Fusion, CVPR 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention, KnownMap, map_is_faster, merge_heads
from vitrim.core.block import BlockInput, Reducer
from vitrim.core.matching import (
    alternate_cosines,
    alternate_split,
    cosines,
    match_both_ways,
    split_alternately,
    unit,
)
from vitrim.core.method import Fused, MethodConfig, Needs, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Fuse, at_blocks, check_blocks, half
from vitrim.core.tokens import TokenState, changed, decision_dtype, no_gradient


class MCTF(MethodConfig):
    """Fuse tokens by several criteria, before attention in every block but the first, with one-step-ahead attention.

    Formulas and deviations are in docs/methods/mctf.md.

    Example:
        >>> MCTF(r=16).counts(196, 12)
        [196, 180, 164, 148, 132, 116, 100, 84, 68, 52, 36, 20]
    """

    name = "mctf"
    paper = "Multi-criteria Token Fusion with One-step-ahead Attention for Efficient Vision Transformers (CVPR 2024)"
    kind = "merge"
    traits = Traits(least_kept=half)
    runtime = frozenset({"r"})
    tunable = Tunable("r", 0, None, per_layer="r", places="blocks")

    r: Fused | tuple[Fused, ...] = Field(
        16,
        description="tokens fused per block, or below 1 the fraction of the current patches, rounded down; or a list "
        "with one per block",
    )
    blocks: tuple[int, ...] | None = Field(None, description="where to fuse, 0-based; default all but the first")
    tau_sim: float = Field(1.0, ge=0.0, le=10.0, description="exponent of similarity; 0: off")
    tau_info: float = Field(1 / 20, ge=0.0, le=10.0, description="exponent of (low) attention received; 0: off")
    tau_size: float = Field(1 / 40, ge=0.0, le=10.0, description="exponent of (small) size; 0: off")
    attention: Literal["one_step_ahead", "precise", "after"] = Field(
        "one_step_ahead",
        description="attention of the fused tokens: the old one, fused; 'precise': anew; 'after': fuse at the end",
    )
    attention_map: Literal["auto", "kept", "recomputed", "shared"] = Field(
        "auto",
        description="'recomputed': fused kernel and one extra pass for the attention received, little memory; "
        "'kept': the B x H x N x N map once, for both; 'auto': kept on a CPU, else recomputed; 'shared': the published "
        "procedure, which keeps and fuses the map",
    )
    bidirectional: bool = Field(True, description="half of the fusions in each direction; false: even to odd only")
    pooling: Literal["attention_size", "size", "mean", "max"] = Field(
        "attention_size",
        description="mean weighted by attention received times size, by size, or by nothing; or elementwise maximum "
        "(one_step_ahead then keeps the attention map)",
    )
    min_patches: int = Field(9, ge=1, description="no block leaves fewer patches than this")
    proportional: bool = Field(True, description="add log(size) to the attention logits")

    def faults(self) -> Iterator[str]:
        if self.tau_sim == self.tau_info == self.tau_size == 0.0:
            yield "at least one of tau_sim, tau_info and tau_size must be above 0"

    def needs(self) -> Needs:
        return Needs(attention_map=True)

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return tuple(range(1, num_layers)) if self.blocks is None else tuple(sorted(self.blocks))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        blocks = self.stages(num_layers)
        if self.blocks is not None:
            check_blocks(self.blocks, num_layers)
        fuse = partial(Fuse, least=self.min_patches)
        return at_blocks(fuse, self.r, blocks, num_layers, "mctf: r")


class MCTFReducer(Reducer[MCTF]):
    """Decide what fuses; subclasses define the attention of the fused tokens."""

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        with no_gradient():
            received = self.received(attention)
            even, odd = alternate_split(state.num_prefix)
            attraction = self.attraction(x, received, state, even, odd)
            pairs = match_both_ways(state, attraction, self.num_removed(state), self.config.bidirectional)
            weight = self.weight(received, state)
        return changed(pairs, weight=weight, maximum=self.config.pooling == "max")

    def received(self, attention: Attention) -> Tensor | None:
        """(B, N) attention received, None if neither a criterion nor the pooling needs it."""
        if self.config.tau_info == 0.0 and self.config.pooling != "attention_size":
            return None
        received = attention.detach().column_mean()
        # The criterion divides by it, and probabilities may underflow to 0.
        return received.clamp_min(torch.finfo(received.dtype).tiny)

    def attraction(self, x: Tensor, received: Tensor | None, state: TokenState, even: slice, odd: slice) -> Tensor:
        """(B, E, O) W of the patches at even and odd places. All factors but similarity separate into i and j."""
        p = state.num_prefix
        x = x.to(decision_dtype(x.dtype))
        if self.config.tau_sim > 0.0 and received is not None and compiled.suit(x, received):
            vectors = unit(x[:, p:])
            attraction = cosines(vectors[:, even], vectors[:, odd])
            tau = (self.config.tau_sim, self.config.tau_info, self.config.tau_size)
            ATTRACT(received, state.size, p, *tau, attraction)
            return attraction
        single = torch.ones_like(x[..., 0])
        if self.config.tau_info > 0.0 and received is not None:
            single = (received.amin(1, keepdim=True) / received) ** self.config.tau_info
        if self.config.tau_size > 0.0 and not state.uniform:
            single = single * (state.size.amin(1, keepdim=True) / state.size) ** self.config.tau_size
        at_even, at_odd = split_alternately(single, p)
        pair = at_even.unsqueeze(2) * at_odd.unsqueeze(1)
        if self.config.tau_sim == 0.0:
            return pair
        similarity = (alternate_cosines(x, p) + 1.0) / 2.0
        return pair * (similarity if self.config.tau_sim == 1.0 else similarity.clamp_min(0.0) ** self.config.tau_sim)

    def weight(self, received: Tensor | None, state: TokenState) -> Tensor | None:
        """(B, N) pooling weights, None for the sizes."""
        if self.config.pooling == "attention_size" and received is not None:
            return received * state.size
        return torch.ones_like(state.size) if self.config.pooling == "mean" else None


class OneStepAhead(MCTFReducer):
    """Attend by the fused map of the attention before the fusion, over new values."""

    site = "query"
    fresh_values = True

    @property
    def fuses_map(self) -> bool:
        """True for the elementwise maximum of query rows, which is not linear and cannot act on the output instead."""
        return self.config.attention_map == "shared" or self.config.pooling == "max"

    def query(self, attention: Attention, inputs: BlockInput) -> tuple[Tensor, Tensor, TokenState]:
        kept = self.config.attention_map  # "kept": the map is computed once, for deciding and attending
        if self.fuses_map or (map_is_faster(attention) if kept == "auto" else kept == "kept"):
            attention = KnownMap.of(attention)
        return super().query(attention, inputs)

    def attend_reduced(
        self, assignment: Hard, attention: Attention, inputs: BlockInput
    ) -> tuple[Tensor, Tensor, TokenState]:
        block, x, state, rows, _ = inputs
        reduced, after = assignment.apply(x, state)
        values = block.values(reduced)
        if self.fuses_map and isinstance(attention, KnownMap) and rows is None:
            attention = replace(attention, known=fuse_map(assignment, attention.known, state.size), v=values)
            return reduced, merge_heads(self.attend(attention, after)), after
        # attention among fused tokens equals ordinary attention with the fused values copied back to their sources
        attention = attention.with_values(assignment.expand(merge_heads(values), state.num_tokens))
        out = merge_heads(self.attend(attention, state))
        return reduced, out if rows is not None else assignment.pool(out, state.size), after

    def fused_maps(self, assignment: Hard, attention: Attention, inputs: BlockInput) -> tuple[Tensor, Tensor]:
        """The attention map (B, H, M, M) that fused tokens get, and the one that they would compute: for analysis."""
        block, x, state, _, given = inputs
        reduced, after = assignment.apply(x, state)
        precise = block.project(reduced, after, None, given).probabilities()
        return fuse_map(assignment, attention.probabilities(), state.size), precise


class Precise(MCTFReducer):
    site = "query"
    attends_anew = True

    def attend_reduced(
        self, assignment: Hard, attention: Attention, inputs: BlockInput
    ) -> tuple[Tensor, Tensor, TokenState]:
        block, x, state, rows, given = inputs
        x, state = assignment.apply(x, state)
        attention = block.project(x, state, rows, given)
        return x, merge_heads(self.attend(attention, state)), state


class After(MCTFReducer):
    site = "after"


_REDUCERS: dict[str, type[MCTFReducer]] = {"one_step_ahead": OneStepAhead, "precise": Precise, "after": After}


@register(MCTF)
def _reducer(config: MCTF, layer: Layer) -> type[MCTFReducer] | None:
    return None if layer.amount is None else _REDUCERS[config.attention]


def fuse_map(assignment: Hard, probabilities: Tensor, size: Tensor) -> Tensor:
    """The attention map (B, H, M, M) among the fused tokens from that (B, H, N, N) among the old of ``size`` (B, N)."""
    # Sums the key columns of a group, then pools the query rows like tokens, in the order of the published code: rows
    # still sum to 1, except under the elementwise maximum, for which the order matters.
    batch, heads, _, _ = probabilities.shape
    anchor, moved, into, weight = (
        None if value is None else value.repeat_interleave(heads, dim=0)
        for value in (assignment.anchor, assignment.moved, assignment.into, assignment.weight)
    )
    assert anchor is not None
    # Heads become images: pooling is the same in all of them.
    each = replace(assignment, anchor=anchor, moved=moved, into=into, weight=weight)
    known, n, m = probabilities.flatten(0, 1), probabilities.shape[2], anchor.shape[1]

    def columns(index: Tensor) -> Tensor:
        return index.unsqueeze(1).expand(-1, n, -1)

    summed = known.gather(2, columns(anchor))
    if moved is not None and into is not None:
        summed = summed.scatter_add(2, columns(into), known.gather(2, columns(moved)))
    return each.pool(summed, size.repeat_interleave(heads, dim=0)).view(batch, heads, m, m)


def _attract(
    received: Any, size: Any, num_prefix: int, tau_sim: float, tau_info: float, tau_size: float, attraction: Any
) -> None:
    """Turn the cosines in ``attraction`` (B, E, O) into W in a loop, as `MCTFReducer.attraction` does."""
    single = np.empty(received.shape[1] - num_prefix, received.dtype)
    first = num_prefix % 2
    for b in range(attraction.shape[0]):
        least, smallest = received[b].min(), size[b].min()
        # Patch i stands at place i of the patches; even and odd places are those of the whole sequence.
        for i in range(len(single)):
            single[i] = (least / received[b, num_prefix + i]) ** tau_info
            single[i] *= (smallest / size[b, num_prefix + i]) ** tau_size
        for i in range(attraction.shape[1]):
            own, row = single[first + 2 * i], attraction[b, i]
            for j in range(len(row)):
                similarity = (row[j] + 1) / 2
                if tau_sim != 1.0:
                    similarity = max(similarity, 0) ** tau_sim
                row[j] = own * single[1 - first + 2 * j] * similarity


ATTRACT = compiled.Loop(_attract)
