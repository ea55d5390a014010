"""The calls of a model's reducers during its forwards: what they saw, how they ranked patches, what they decided."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.reduce import Reduction
from vitrim.core.registry import host_of
from vitrim.core.tokens import TokenState


@dataclass(frozen=True)
class ReducerCall:
    """One call of one reducer at block ``depth`` on tokens ``x`` (B, N, C).

    ``scores`` (B, P) rank the patches, highest kept, if it ranks them; ``assignment`` is None if all tokens stay.
    """

    depth: int
    x: Tensor
    state: TokenState
    scores: Tensor | None
    assignment: Hard | None

    def on_grid(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """(B, P) over the input patches: their scores, nan for patches without a token, and a mask of kept patches."""
        state, p = self.state, self.state.num_prefix
        assert self.scores is not None
        images, patches = len(self.x), state.initial_patches
        # Tokens stand for the input patch of their anchor; padding stands for none.
        place = (state.position[:, p:] - p).expand(images, -1).cpu().numpy()
        real = np.ones_like(place, dtype=bool)
        if state.mask is not None:
            real = state.mask[:, p:].expand(images, -1).cpu().numpy()
        scores, stays = np.full((images, patches), np.nan), np.zeros((images, patches), dtype=bool)
        image, token = np.nonzero(real)
        scores[image, place[image, token]] = self.scores.double().cpu().numpy()[image, token]
        survives = np.full_like(real, self.assignment is None)
        if self.assignment is not None:
            anchor, valid = self.assignment.anchor, self.assignment.valid
            # An anchor survives as itself, unless it is padding or only the sum of several.
            own = torch.ones_like(anchor, dtype=torch.bool) if valid is None else valid.clone()
            if self.assignment.into is not None and not self.assignment.normalise:
                own.scatter_(1, self.assignment.into, False)  # a sum of tokens is none of them
            rows, columns = np.nonzero(own.cpu().numpy())
            old = anchor.cpu().numpy()[rows, columns]
            survives[rows[old >= p], old[old >= p] - p] = True
        image, token = np.nonzero(real & survives)
        stays[image, place[image, token]] = True
        return scores, stays


class ReducerCalls:
    """Records the reducers' calls in a reduced model's forwards, by hooks that a ``with`` statement removes at its end.

    ``scores``: record the rankings too, which computes them a second time.

    Example:
        >>> import timm, vitrim
        >>> reduction = vitrim.reduce_(timm.create_model("test_vit").eval(), "topk:keep_rate=0.5")
        >>> calls = ReducerCalls(reduction, scores=True)
        >>> _ = reduction.model(torch.zeros(1, 3, 160, 160))
        >>> [(call.depth, tuple(call.scores.shape)) for call in calls.take()]
        [(1, (1, 100)), (3, (1, 50)), (4, (1, 25))]
    """

    def __init__(self, reduction: Reduction, *, scores: bool = False) -> None:
        self.calls: list[ReducerCall] = []
        self.scores = scores
        self.hooks = [
            block.reducer.register_forward_hook(partial(self._note, block.depth)) for block in reduced_blocks(reduction)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def take(self) -> list[ReducerCall]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def _note(
        self, depth: int, reducer: Reducer[Any], args: tuple[Tensor, Attention, TokenState], assignment: object
    ) -> None:
        x, attention, state = args
        scores = None
        if self.scores and not (reducer.planned and reducer.num_removed(state) == 0):
            # later random draws must not change
            with torch.no_grad(), torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
                scores = reducer.ranking(x, attention, state)
        if assignment is None or isinstance(assignment, Hard):
            self.calls.append(ReducerCall(depth, x, state, scores, assignment))


def reduced_blocks(reduction: Reduction) -> list[ReducedBlock]:
    """The blocks of a reduced model, in order."""
    model = reduction.model
    return [block for block in host_of(model).blocks(model) if isinstance(block, ReducedBlock)]
