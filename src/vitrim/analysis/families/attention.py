"""Attention: the one-step-ahead attention of fused tokens against precise attention (MCTF, supplement B.3)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from vitrim.analysis.family import FamilyResult, TableRow, Tables, example_maps, grouped, note_blocks
from vitrim.analysis.figures import Panel, draws, line_panels, styles
from vitrim.analysis.statistics import moments
from vitrim.analysis.subject import EXAMPLES, Observer, Subject
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import BlockInput, Reducer
from vitrim.core.tokens import TokenState
from vitrim.measure.contestants import Contestant
from vitrim.measure.reducer_calls import reduced_blocks
from vitrim.plots.charts import short
from vitrim.plots.patches import gallery, grid_of, in_colour, overlay
from vitrim.style import TEXT

IMAGES = 32


def attention(subject: Subject) -> FamilyResult:
    """Compare one-step-ahead with precise attention: the class token's row over the fused tokens, mean over heads.

    For each block, ``mean_absolute`` is the mean absolute difference over the tokens, and ``kl_nats`` is KL(precise ||
    given). Both maps see the same input tokens, so the difference is that of one block.

    Arrays: ``images`` (E, H, W, 3), and per method ``NAME/blocks`` (S,), ``NAME/given`` and ``NAME/precise``
    (E, S, P): the attention of the token that holds each patch, divided by its size; nan if no token holds it.
    """
    if not subject.facts.has_class_token:
        return FamilyResult(notes=["attention skipped: the maps are those of a class token, and this model has none"])
    observers = {one.name: one.by_block() for one in _Maps.over(subject, subject.methods, subject.batches(IMAGES))}
    seen = {name: blocks for name, blocks in observers.items() if blocks}
    if not seen:
        return FamilyResult(notes=["attention skipped: it needs a method that fuses its attention map, such as mctf"])
    result = FamilyResult(images=len(subject.places(IMAGES)), arrays={"images": subject.examples(IMAGES)})
    rows = list[TableRow]()
    for name, blocks in seen.items():
        for block, (difference, divergence, *_) in blocks.items():
            numbers = moments({"mean_absolute": difference, "kl_nats": divergence})
            rows.append({"method": name, "block": block, "images": len(difference), **numbers})
        result.arrays[f"{name}/blocks"] = np.array(list(blocks))
        for kind, place in (("given", 2), ("precise", 3)):
            maps = np.stack([arrays[place][:EXAMPLES] for arrays in blocks.values()], 1)
            result.arrays[f"{name}/{kind}"] = maps.astype(np.float32)
    note_blocks(result, subject.blocks, seen)
    result.add(
        "attention", "Attention given to fused tokens, against what they would compute, of the class token", rows
    )
    return result


class _Maps(Observer):
    """Both attention maps of one model: per block, their difference, KL divergence, and the maps over the patches."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        for block in reduced_blocks(self.reduction):
            reducer = block.reducer
            if hasattr(reducer, "fused_maps"):
                # shadow the method of the class, on this private copy only
                vars(reducer)["attend_reduced"] = partial(self._attend_reduced, reducer)

    def _attend_reduced(
        self, reducer: Any, assignment: Hard, attention: Attention, inputs: BlockInput
    ) -> tuple[Tensor, Tensor, TokenState]:
        """Record both maps, then call the reducer's own ``attend_reduced``."""
        from scipy.stats import entropy

        # A last block that computes the class token's row alone has no map to compare.
        if inputs.rows is None:
            maps = reducer.fused_maps(assignment, attention, inputs)
            given, precise = (one[:, :, 0].mean(1).double().cpu().numpy() for one in maps)
            # for pictures, spread a token's attention evenly over its patches
            # Before the division by its size, a token's attention is that of all of its patches.
            after = assignment.advance(inputs.x, inputs.state)
            source, size = after.source[:, after.num_prefix :].cpu().numpy(), after.size.double().cpu().numpy()
            shares = (np.take_along_axis(one / size, np.maximum(source, 0), axis=1) for one in (given, precise))
            pictures = (np.where(source >= 0, one, np.nan) for one in shares)
            divergence = entropy(precise, given, axis=1)
            self.add(inputs.block.depth, np.abs(given - precise).mean(1), divergence, *pictures)
        kind: type[Reducer[Any]] = type(reducer)
        return kind.attend_reduced(reducer, assignment, attention, inputs)


# ---- figures ---------------------------------------------------------------------------------------------------------

METHODS_DRAWN, BLOCKS_DRAWN = 2, 4


@draws("attention", "attention", "Attention given and attention computed, block by block")
def draw_attention(tables: Tables) -> Any:
    """Lines over the blocks: mean absolute difference of the class token's attention, and KL divergence, with 95 %
    bootstrap intervals as bands."""
    measures = {"mean_absolute": "mean absolute difference", "kl_nats": "KL, nats"}
    rows = grouped(tables["attention"].records(), "method")
    figure, axes = line_panels([Panel(measure, rows) for measure in measures], styles(tables), across=2)
    for axis, label in zip(axes, measures.values(), strict=True):
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label, fontsize=TEXT)
    return figure


@draws("attention", "attention", "Attention given and attention computed, over the image")
def draw_attention_maps(tables: Tables) -> Any:
    """Rows of pictures, three per image: the class token's attention to fused tokens as approximated one step ahead, as
    computed precisely, both on one colour scale per block, and the absolute difference."""
    arrays = tables.arrays.get("attention")
    if not arrays:
        return None
    rows: list[Any] = []
    maps = example_maps(arrays, ("given", "precise"), METHODS_DRAWN, BLOCKS_DRAWN)
    for name, shown, image, (given, precise) in maps:
        grid, places = grid_of(given.shape[-1], image), list(shown.values())
        both = [np.stack([given[place], precise[place]]) for place in places]
        limits = [(float(np.nanmin(pair)), float(np.nanmax(pair))) for pair in both]
        for label, values in (("given", given), ("precise", precise)):
            first = ("image", in_colour(image)) if label == "given" else ("", None)
            drawn = [
                (f"block {block}", overlay(image, values[place], grid, limits=limit))
                for (block, place), limit in zip(shown.items(), limits, strict=True)
            ]
            rows.append((f"{short(name)}\n{label}", [first, *drawn]))
        apart = [("", overlay(image, abs(given[p] - precise[p]), grid, cmap="cividis")) for p in places]
        rows.append(("difference", [("", None), *apart]))
    return gallery(rows)
