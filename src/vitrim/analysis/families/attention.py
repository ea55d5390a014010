"""Attention: the one-step-ahead attention of fused tokens against precise attention (MCTF, supplement B.3)."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitrim.analysis.family import FamilyResult, Tables, drawn_blocks, draws, line_panels, methods_with, note_blocks
from vitrim.analysis.statistics import BAND, columns_of, summary
from vitrim.analysis.subject import EXAMPLES, Observer, Subject, reduced_blocks
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import BlockInput, Reducer
from vitrim.core.tokens import TokenState
from vitrim.measure.contestants import Contestant
from vitrim.plots.charts import short
from vitrim.plots.patches import gallery, grid_of, in_colour, overlay
from vitrim.report import Table
from vitrim.style import TEXT

IMAGES = 32
COLUMNS = ("method", "block", "images", *columns_of("mean_absolute"), *columns_of("kl_nats"))
SHOWN = (*COLUMNS[:4], "mean_absolute_low", "mean_absolute_high", "kl_nats", "kl_nats_low", "kl_nats_high")


def kl_nats(p: ArrayLike, q: ArrayLike) -> NDArray[np.float64]:
    """KL(p || q) = sum p log(p / q) in nats over the last axis, (...) float64; rows are normalised to sum 1.

    Entries with p = 0 contribute 0; infinite if q = 0 where p > 0.

    Args:
        p, q: (..., N), not negative.

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
    """Compare one-step-ahead with precise attention: the class token's row over the fused tokens, mean over heads.

    For each block, the mean absolute difference over the tokens and KL(precise || given). Both maps see the same input
    tokens, so the difference is that of one block.

    Arrays: ``images`` (E, H, W, 3), and per method ``NAME/blocks`` (S,), ``NAME/given`` and ``NAME/precise``
    (E, S, P): the attention of the token that holds each patch, divided by its size; nan if no token holds it.
    """
    if not subject.facts.has_class_token:
        return FamilyResult(notes=["attention skipped: the maps are those of a class token, and this model has none"])
    found = [watch for watch in _Maps.over(subject, subject.methods, subject.batches(IMAGES)) if watch.numbers]
    if not found:
        return FamilyResult(notes=["attention skipped: it needs a method that fuses its attention map, such as mctf"])
    result = FamilyResult(images=len(subject.places(IMAGES)), arrays={"images": subject.examples(IMAGES)})
    rows: list[tuple[object, ...]] = []
    for watch in found:
        blocks = sorted(watch.numbers)
        for block in blocks:
            numbers = np.concatenate(watch.numbers[block])
            difference, divergence = summary(numbers)
            rows.append((watch.name, block, len(numbers), *difference, *divergence))
        maps = np.stack([np.concatenate(watch.pictures[block])[:EXAMPLES] for block in blocks], 2).astype(np.float32)
        result.arrays[f"{watch.name}/blocks"] = np.array(blocks)
        result.arrays[f"{watch.name}/given"] = maps[:, 0]
        result.arrays[f"{watch.name}/precise"] = maps[:, 1]
    note_blocks(result, subject.blocks, {watch.name: watch.numbers for watch in found})
    title = "Attention given to fused tokens, against what they would compute, of the class token"
    result.tables.append(Table("attention", title, COLUMNS, rows, SHOWN))
    return result


class _Maps(Observer):
    """Both attention maps of one model, block by block, recorded during its forward."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        self.numbers: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        self.pictures: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        for block in reduced_blocks(self.reduction):
            reducer = block.reducer
            if hasattr(reducer, "fused_maps"):
                # shadow the method of the class, on this private copy only
                vars(reducer)["attend_reduced"] = partial(self._attend_reduced, reducer)

    def _attend_reduced(
        self,
        reducer: Any,
        assignment: Hard,
        attention: Attention,
        inputs: BlockInput,
    ) -> tuple[Tensor, Tensor, TokenState]:
        """Record both maps, then call the reducer's own ``attend_reduced``."""
        if inputs.rows is None:
            depth, maps = inputs.block.depth, reducer.fused_maps(assignment, attention, inputs)
            given, precise = (one[:, :, 0].mean(1).double().cpu().numpy() for one in maps)
            self.numbers[depth].append(np.stack([np.abs(given - precise).mean(1), kl_nats(precise, given)], 1))
            # for pictures, spread a token's attention evenly over its patches
            after = assignment.advance(inputs.x, inputs.state)
            source, size = after.source[:, after.num_prefix :].cpu().numpy(), after.size.double().cpu().numpy()
            shares = (np.take_along_axis(one / size, np.maximum(source, 0), axis=1) for one in (given, precise))
            self.pictures[depth].append(np.stack([np.where(source >= 0, one, np.nan) for one in shares], 1))
        kind: type[Reducer[Any]] = type(reducer)
        return kind.attend_reduced(reducer, assignment, attention, inputs)


# ---- figures ---------------------------------------------------------------------------------------------------------

EXAMPLES_DRAWN, METHODS_DRAWN, BLOCKS_DRAWN = 2, 2, 4


@draws("attention", "attention", "Attention given and attention computed, block by block")
def draw_attention(tables: Tables) -> Any:
    """Lines over the blocks: mean absolute difference of the class token's attention, and KL divergence, with 95 %
    bootstrap intervals as bands."""
    measures = {"mean_absolute": "mean absolute difference", "kl_nats": "KL, nats"}
    columns = [columns_of(measure, BAND) for measure in measures]
    figure, axes = line_panels(tables, "attention", columns, across=2)
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
    for name in methods_with(arrays, "given")[:METHODS_DRAWN]:
        shown = list(drawn_blocks(arrays, name, BLOCKS_DRAWN).items())
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
