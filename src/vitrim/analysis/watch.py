"""The decisions of a model's reducers, seen as they are taken: their tokens, scores and assignments, block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.reduce import Reduction
from vitrim.core.registry import host_of
from vitrim.core.tokens import TokenState

__all__ = ["Decision", "Watch", "reduced_blocks"]


@dataclass(frozen=True)
class Decision:
    """One decision of one reducer.

    Attributes:
        depth: of the block, from 0.
        x: (B, N, C), the tokens that it decided about.
        state: of these tokens.
        scores: (B, P), what it ranked the patches by, the highest stay; None where it does not rank them.
        assignment: what became of the tokens; None where they all stay.
    """

    depth: int
    x: Tensor
    state: TokenState
    scores: Tensor | None
    assignment: Hard | None

    def target(self) -> Tensor:
        """(B, N), the new index of every token, -1 where it is gone."""
        n = self.state.num_tokens
        if self.assignment is None:
            return torch.arange(n, device=self.x.device).expand(self.x.shape[0], n)
        return self.assignment.target(n)


class Watch:
    """Notes the decisions of a reduced model's forwards, by hooks that are never taken off: give it a private copy.

    Args:
        reduction: of the model.
        scores: ask the reducers what they rank by; that computes it once more.

    Example:
        >>> import timm, vitrim
        >>> reduction = vitrim.reduce_(timm.create_model("test_vit").eval(), "topk:keep_rate=0.5")
        >>> watch = Watch(reduction, scores=True)
        >>> _ = reduction.model(torch.zeros(1, 3, 160, 160))
        >>> [(decision.depth, tuple(decision.scores.shape)) for decision in watch.take()]
        [(1, (1, 100)), (3, (1, 50)), (4, (1, 25))]
    """

    def __init__(self, reduction: Reduction, *, scores: bool = False) -> None:
        self.found: list[Decision] = []
        self.scores = scores
        for block in reduced_blocks(reduction):
            block.reducer.register_forward_hook(self._note(block.depth))

    def take(self) -> list[Decision]:
        """The decisions since the last call."""
        found, self.found = self.found, []
        return found

    def _note(self, depth: int) -> Callable[..., None]:
        def note(reducer: Reducer[Any], args: tuple[Tensor, Attention, TokenState], assignment: object) -> None:
            x, attention, state = args
            with torch.no_grad(), torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
                scores = reducer.ranking(x, attention, state) if self.scores else None
            hard = assignment if isinstance(assignment, Hard) else None
            if assignment is None or hard is not None:
                self.found.append(Decision(depth, x, state, scores, hard))

        return note


def reduced_blocks(reduction: Reduction) -> list[ReducedBlock]:
    """The blocks of a reduced model, in order."""
    model = reduction.model
    return [block for block in host_of(model).blocks(model) if isinstance(block, ReducedBlock)]
