"""Attention: what fused tokens are given, against what they would compute (MCTF, supplement B.3)."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitrim.analysis.family import FamilyResult, Tables, draws, fullest, lines, methods_with
from vitrim.analysis.statistics import columns_of, summary
from vitrim.analysis.subject import EXAMPLES, Subject, reduced_blocks
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import ReducedBlock, Reducer
from vitrim.core.tokens import TokenState
from vitrim.measure.contestants import Contestant
from vitrim.plots.charts import short
from vitrim.plots.patches import gallery, grid_of, in_colour, overlay
from vitrim.plots.style import TEXT, below, panels
from vitrim.report import Table

IMAGES = 32
COLUMNS = ("method", "block", "images", *columns_of("mean_absolute"), *columns_of("kl_nats"))
SHOWN = (*COLUMNS[:4], "mean_absolute_low", "mean_absolute_high", "kl_nats", "kl_nats_low", "kl_nats_high")


def kl_nats(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """KL(p || q) = sum p log(p / q) in nats over the last axis, of rows divided by their sums.

    Cells without mass in ``p`` count nothing; infinite where ``p`` has mass and ``q`` has none.

    Args:
        p, q: (..., N), not negative.

    Returns:
        (...), float64.

    Example:
        >>> kl_nats([[0.5, 0.5]], [[0.5, 0.5]]).tolist(), kl_nats([1, 0], [1, 1]).round(4).tolist()
        ([0.0], 0.6931)
    """
    from scipy.special import rel_entr

    first, second = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    first, second = (one / one.sum(-1, keepdims=True) for one in (first, second))
    found: NDArray[np.float64] = rel_entr(first, second).sum(-1)
    return found


def attention(subject: Subject) -> FamilyResult:
    """One-step-ahead against precise attention: the class token's rows among the fused tokens, mean over heads.

    Of each block the mean absolute difference over the tokens, and KL(precise || given). The difference is of this one
    block: both see the same tokens.

    Arrays: ``images`` (E, H, W, 3), and by method ``NAME/blocks`` (S,), and ``NAME/given``, ``NAME/precise`` (E, S, P),
    the attention of the token that holds each patch, divided by its size; nan where none does.
    """
    if not subject.facts.has_class_token:
        return FamilyResult(notes=["attention skipped: the maps are those of a class token, and this model has none"])
    models = subject.contestants(subject.methods)
    watches = {place: _Maps(models[place]) for place in range(1, len(models))}
    having = {place: watch for place, watch in watches.items() if watch.fuses}
    if not having:
        return FamilyResult(notes=["attention skipped: it needs a method that fuses its attention map, such as mctf"])
    chosen = [models[0], *(models[place] for place in having)]
    subject.follow(chosen, {}, subject.batches(IMAGES))  # the maps are noted in the forward
    found = [watch for watch in having.values() if watch.rows]
    rows = [row for watch in found for row in watch.table()]
    title = "Attention given to fused tokens, against what they would compute, of the class token"
    result = FamilyResult([Table("attention", title, COLUMNS, rows, SHOWN)], images=subject.count(IMAGES))
    result.arrays["images"] = subject.examples(IMAGES)
    for watch in found:
        result.arrays |= watch.arrays()
    return result


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
                vars(reducer)["attend_reduced"] = partial(self._attend_reduced, reducer)

    def _attend_reduced(
        self,
        reducer: Reducer[Any],
        assignment: Hard,
        block: ReducedBlock,
        x: Tensor,
        attention: Attention,
        state: TokenState,
        rows: int | None,
        *host_args: Any,
    ) -> tuple[Tensor, Tensor, TokenState]:
        """``attend_reduced`` of a reducer, once both maps are noted."""
        found = reducer.fused_maps(assignment, block, x, attention, state, *host_args) if rows is None else None
        if found is not None:
            after = assignment.advance(x, state)
            given, precise = (one[:, :, 0].mean(1).double().cpu().numpy() for one in found)
            numbers = [np.abs(given - precise).mean(1), kl_nats(precise, given)]
            self.rows[block.depth].append(np.stack(numbers, 1))
            self.pictures[block.depth].append(np.stack([_spread(one, after) for one in (given, precise)], 1))
        return type(reducer).attend_reduced(reducer, assignment, block, x, attention, state, rows, *host_args)

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


def _spread(row: NDArray[np.float64], state: TokenState) -> NDArray[np.float64]:
    """(B, P), the attention (B, M) of the token that holds each patch, shared out over what it holds."""
    source = state.source[:, state.num_prefix :].cpu().numpy()
    share = row / state.size.double().cpu().numpy()
    return np.where(source >= 0, np.take_along_axis(share, np.maximum(source, 0), axis=1), np.nan)


# ---- figures ---------------------------------------------------------------------------------------------------------

EXAMPLES_DRAWN, METHODS_DRAWN, BLOCKS_DRAWN = 2, 2, 6


@draws(
    "attention",
    "attention",
    title="Attention given and attention computed, block by block",
    alt="Lines over the blocks: mean absolute difference of the class token's attention, and its divergence, with 95 % "
    "bootstrap intervals as bands.",
)
def draw_attention(tables: Tables) -> Any:
    """Difference and divergence after each block, a line per method."""
    figure, axes = panels(2, across=2, size=(3.6, 2.4), above=0.5)
    handles: list[Any] = []
    for axis, (measure, label) in zip(
        axes, (("mean_absolute", "mean absolute difference"), ("kl_nats", "KL, nats")), strict=True
    ):
        handles = lines(axis, tables, "attention", ("block", measure, f"{measure}_low", f"{measure}_high"))
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label, fontsize=TEXT)
    below(figure, handles)
    return figure


@draws(
    "attention",
    "attention",
    title="Attention given and attention computed, over the image",
    alt="Rows of pictures, three per image: the class token's attention that fused tokens are given, the one that they "
    "would compute, both on one colour scale per block, and the absolute difference.",
)
def draw_attention_maps(tables: Tables) -> Any:
    """Maps of the first images, a column per block; None where there are no arrays."""
    arrays = tables.arrays.get("attention")
    if not arrays:
        return None
    rows: list[Any] = []
    for name in methods_with(arrays, "given")[:METHODS_DRAWN]:
        blocks = arrays[f"{name}/blocks"].tolist()
        shown = [(block, blocks.index(block)) for block in fullest(blocks, BLOCKS_DRAWN)]
        for example in range(min(EXAMPLES_DRAWN, len(arrays["images"]))):
            image = arrays["images"][example]
            given, precise = (arrays[f"{name}/{kind}"][example] for kind in ("given", "precise"))
            grid = grid_of(given.shape[-1], image)
            both = [np.stack([given[place], precise[place]]) for _, place in shown]
            limits = [(float(np.nanmin(pair)), float(np.nanmax(pair))) for pair in both]
            for label, values in (("given", given), ("precise", precise)):
                first = ("image", in_colour(image)) if label == "given" else ("", None)
                maps = [
                    (f"block {block}", overlay(image, values[place], grid, limits=limit))
                    for (block, place), limit in zip(shown, limits, strict=True)
                ]
                rows.append((f"{short(name)}\n{label}", [first, *maps]))
            parts = [("", overlay(image, abs(given[p] - precise[p]), grid, cmap="cividis")) for _, p in shown]
            rows.append(("difference", [("", None), *parts]))
    return gallery(rows)
