"""The attention that fused tokens are given, against the one that they would compute (MCTF, supplement B.3)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrim.analysis.loss import kl_nats
from vitrim.analysis.subject import Subject
from vitrim.analysis.tables import Outcome, Table, named, summary
from vitrim.analysis.watch import reduced_blocks
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.tokens import TokenState
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.records import Batch

__all__ = ["EXAMPLES", "attention", "images_of"]

IMAGES = 32
EXAMPLES = 8
COLUMNS = ("method", "block", "images", *named("mean_absolute"), *named("kl_nats"))
SHOWN = (*COLUMNS[:4], "mean_absolute_low", "mean_absolute_high", "kl_nats", "kl_nats_low", "kl_nats_high")


def attention(subject: Subject) -> Outcome:
    """One-step-ahead against precise attention: the class token's rows among the fused tokens, mean over heads.

    Of each block the mean absolute difference over the tokens, and KL(precise || given). The difference is of this one
    block: both see the same tokens.

    Arrays: ``images`` (E, H, W, 3), and by method ``NAME/blocks`` (S,), and ``NAME/given``, ``NAME/precise`` (E, S, P),
    the attention of the token that holds each patch, divided by its size; nan where none does.
    """
    if not subject.facts.has_class_token:
        return Outcome(notes=["attention skipped: the maps are those of a class token, and this model has none"])
    models = subject.contestants(subject.methods)
    watches = {place: _Maps(models[place]) for place in range(1, len(models))}
    having = {place: watch for place, watch in watches.items() if watch.fuses}
    if not having:
        return Outcome(notes=["attention skipped: it needs a method that fuses its attention map, such as mctf"])
    chosen = [models[0], *(models[place] for place in having)]
    sees = {place: watch.see for place, watch in enumerate(having.values(), 1)}
    subject.follow(chosen, sees, subject.batches(IMAGES))
    found = [watch for watch in having.values() if watch.rows]
    rows = [row for watch in found for row in watch.table()]
    title = "Attention given to fused tokens, against what they would compute, of the class token"
    outcome = Outcome([Table("attention", title, COLUMNS, rows, SHOWN)], images=subject.count(IMAGES))
    outcome.arrays["images"] = images_of(subject)
    for watch in found:
        outcome.arrays |= watch.arrays()
    return outcome


class _Maps:
    """Both maps of one model, block by block."""

    def __init__(self, contestant: Contestant) -> None:
        assert contestant.reduction is not None
        self.name = contestant.name
        self.rows: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        self.pictures: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        self.fuses = False
        for block in reduced_blocks(contestant.reduction):
            reducer = block.reducer
            if type(reducer).fused_maps is not Reducer.fused_maps:
                self.fuses = True
                # in front of the class's own, of this private copy alone
                vars(reducer)["attend_reduced"] = _Between(self, reducer)

    def note(self, depth: int, maps: tuple[Tensor, Tensor], after: TokenState) -> None:
        given, precise = (one[:, :, 0].mean(1).double().cpu().numpy() for one in maps)
        self.rows[depth].append(np.stack([np.abs(given - precise).mean(1), kl_nats(precise, given)], 1))
        self.pictures[depth].append(np.stack([_spread(one, after) for one in (given, precise)], 1))

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        """Nothing more: the maps are noted in the forward."""

    def table(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        for depth, parts in sorted(self.rows.items()):
            numbers = np.concatenate(parts)
            difference, divergence = summary(numbers)
            rows.append((self.name, depth, len(numbers), *difference, *divergence))
        return rows

    def arrays(self) -> dict[str, NDArray[Any]]:
        blocks = sorted(self.pictures)
        maps = np.stack([np.concatenate(self.pictures[block])[:EXAMPLES] for block in blocks], 2).astype(np.float32)
        return {
            f"{self.name}/blocks": np.array(blocks),
            f"{self.name}/given": maps[:, 0],
            f"{self.name}/precise": maps[:, 1],
        }


class _Between:
    """Stands before ``attend_reduced`` of a reducer, notes both maps, and goes on."""

    def __init__(self, maps: _Maps, reducer: Reducer[Any]) -> None:
        self.maps, self.reducer = maps, reducer

    def __call__(
        self,
        assignment: Hard,
        block: ReducedBlock,
        x: Tensor,
        attention: Attention,
        state: TokenState,
        rows: int | None,
        *host_args: Any,
    ) -> tuple[Tensor, Tensor, TokenState]:
        if rows is None:
            found = self.reducer.fused_maps(assignment, block, x, attention, state, *host_args)
            if found is not None:
                self.maps.note(block.depth, found, assignment.advance(x, state))
        return type(self.reducer).attend_reduced(self.reducer, assignment, block, x, attention, state, rows, *host_args)


def _spread(row: NDArray[np.float64], state: TokenState) -> NDArray[np.float64]:
    """(B, P), the attention (B, M) of the token that holds each patch, shared out over what it holds."""
    source = state.source[:, state.num_prefix :].cpu().numpy()
    share = row / state.size.double().cpu().numpy()
    return np.where(source >= 0, np.take_along_axis(share, np.maximum(source, 0), axis=1), np.nan)


def images_of(subject: Subject) -> NDArray[np.float32]:
    """(E, H, W, C) float32: the first images that a family shows, scaled to [0, 1] each, for pictures."""
    found = torch.cat([batch.images for batch in subject.batches(IMAGES)])[:EXAMPLES].movedim(1, -1)
    low, high = found.amin((1, 2, 3), keepdim=True), found.amax((1, 2, 3), keepdim=True)
    scaled: NDArray[np.float32] = ((found - low) / (high - low).clamp_min(1e-12)).float().numpy()
    return scaled
