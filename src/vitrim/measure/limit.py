"""The limit of a method: a plain slice ``x[:, :n]`` with its token counts: something to time, never to use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention, merge_heads
from vitrim.core.block import BlockInput, Idle, ReducedBlock, Reducer, StepOutput, change_class
from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask
from vitrim.core.schedule import BringBack
from vitrim.core.tokens import TokenState
from vitrim.engines.copies import reduced_copy
from vitrim.engines.prefill import Prefill

PLAIN_SLICE = "plain slice of "
"""Start of the names of rows that show a limit."""


def slice_of(method: str) -> str:
    """The name of the row that shows the limit of the row ``method``."""
    return f"{PLAIN_SLICE}{method}"


def why_no_slice(model: Any, method: MethodConfig) -> str | None:
    """The reason why nothing can be sliced at the counts of ``method``; None if it can."""
    if isinstance(model, Prefill):
        return "slices are for models of images alone"
    if ask(model).front(model) is not None:
        return "the heads of this model read every patch"
    if method.is_adaptive():
        return "its counts depend on the images: freeze it first"
    with torch.random.fork_rng(devices=[]):  # a copy may draw parameters, and must not change later draws
        copied = reduced_copy(model, method)
    reducers = [block.reducer for block in copied.modules() if isinstance(block, ReducedBlock)]
    if any(isinstance(reducer.layer.amount, BringBack) for reducer in reducers):
        return "it brings tokens back"
    # The slice would be the dense model.
    if all(isinstance(reducer, Idle) for reducer in reducers):
        return "it removes no tokens"
    return None


def sliced(model: Any, methods: Mapping[str, MethodConfig]) -> dict[str, MethodConfig]:
    """The ``methods`` that can be sliced, by the name of the row that shows their limit."""
    return {slice_of(name): config for name, config in methods.items() if why_no_slice(model, config) is None}


class Slice(Reducer[Any]):
    """Keeps the prefix and the first patches, as many as the reducer whose place it takes, at the same site."""

    fresh_values = False
    attends_anew = False

    # of the base class, whatever the method does there
    reduce, query = Reducer.reduce, Reducer.query
    attend, prepare, remember = Reducer.attend, Reducer.prepare, Reducer.remember

    def forward(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | None:
        kept = self.num_keep(state)
        if kept >= state.num_patches:
            return None
        # A method that adds a token computes one more: the slice keeps as many.
        first = torch.arange(kept + self.config.added_tokens(), device=x.device)
        return prune(state, first.expand(x.shape[0], -1))

    def carry_out(self, assignment: Any, x: Tensor, state: TokenState) -> StepOutput:
        # No gather: a view of the first tokens is the least that any reduction can do.
        return x[:, : assignment.anchor.shape[1]], assignment.advance(x, state)

    def attend_reduced(
        self, assignment: Hard, attention: Attention, inputs: BlockInput
    ) -> tuple[Tensor, Tensor, TokenState]:
        reduced, after = self.carry_out(assignment, inputs.x, inputs.state)
        rows = attention if inputs.rows is not None else attention.rows(assignment.anchor.shape[1])
        return reduced, merge_heads(self.attend(rows, after)), after


@cache
def _slice_of(kind: Any) -> type[Reducer[Any]]:
    return type(f"Sliced{kind.__name__}", (Slice, kind), {})


def sliced_copy(model: nn.Module, method: MethodConfig, learned: Path | None = None) -> nn.Module:
    """A copy of ``model`` that shares its weights and slices where ``method`` reduces."""
    reduced = reduced_copy(model, method, learned)
    for block in reduced.modules():
        if isinstance(block, ReducedBlock) and not isinstance(block.reducer, Idle):
            kind: Any = type(block.reducer)
            change_class(block.reducer, _slice_of(kind))
    return reduced
