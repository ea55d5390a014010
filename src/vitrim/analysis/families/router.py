"""Router: the scores that methods rank patches by, over the image and block by block."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from vitrim.analysis.families.depth import depth_map
from vitrim.analysis.family import FamilyResult, TableRow, Tables, example_maps, note_blocks
from vitrim.analysis.figures import draws
from vitrim.analysis.statistics import moments
from vitrim.analysis.subject import EXAMPLES, Observer, Subject
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.records import Batch
from vitrim.measure.reducer_calls import ReducerCalls
from vitrim.plots.charts import short
from vitrim.plots.patches import gallery, grid_of, in_colour, overlay

IMAGES = 32


def concordance(a: ArrayLike, b: ArrayLike) -> float:
    """The probability that two items have the same order in ``a`` as in ``b``, ties counting half: (1 + tau) / 2.

    tau is Kendall's tau-a over the items known in both, nan if unknown. 0.5 by chance; nan for fewer than two items.

    Example:
        >>> concordance([1, 2, 3, np.nan], [10, 30, 20, 0]), concordance([1, 2], [5, 5])
        (0.6666666666666666, 0.5)
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    known = np.isfinite(first) & np.isfinite(second)
    # The order of every pair of items; ties are 0 and count half.
    signs = [np.sign(one[known][:, None] - one[known][None, :]) for one in (first, second)]
    count = int(known.sum())
    if count < 2:
        return float("nan")
    return float((1 + (signs[0] * signs[1]).sum() / (count * (count - 1))) / 2)


def router(subject: Subject) -> FamilyResult:
    """The scores of patches in every block that ranks them: the routers of Cropr and DynamicViT, the class attention of
    Top-K and EViT, the halting budget left in A-ViT, and the ranking of any other method.

    ``persistence`` is the probability that the next ranking block orders two patches as this one does, over the patches
    that both rank: 0.5 by chance.

    Arrays: ``images`` (E, H, W, 3), and per method ``NAME/blocks`` (S,), ``NAME/scores`` (E, S, P), nan for removed
    patches, and ``NAME/depth`` (E, P), the block before or in which each patch was removed, L if it never was (for
    A-ViT, the depth at which it halts).
    """
    observers = {
        one.name: one.by_block() for one in _RouterScores.over(subject, subject.methods, subject.batches(IMAGES))
    }
    result = FamilyResult(images=len(subject.places(IMAGES)))
    result.notes += [
        f"{name} is left out of router: it does not rank patches" for name, blocks in observers.items() if not blocks
    ]
    ranked = {name: blocks for name, blocks in observers.items() if blocks}
    if not ranked:
        result.notes.append("router skipped: it needs a method that ranks patches, such as topk or cropr")
        return result
    rows = list[TableRow]()
    result.arrays["images"] = subject.examples(IMAGES)
    for name, blocks in ranked.items():
        every = [(block, *arrays) for block, arrays in blocks.items()]
        for (block, scores, stays), following in zip_longest(every, every[1:]):
            rows.append({"method": name, "block": block, **_numbers(scores, stays, following and following[1])})
        kept = np.stack([stays[:EXAMPLES] for _, stays in blocks.values()], 1)
        examples = np.stack([scores[:EXAMPLES] for scores, _ in blocks.values()], 1)
        result.arrays[f"{name}/blocks"] = np.array(list(blocks))
        result.arrays[f"{name}/scores"] = examples.astype(np.float32)
        result.arrays[f"{name}/depth"] = depth_map(kept, list(blocks), subject.num_layers).astype(np.float32)
    note_blocks(result, subject.blocks, ranked)
    result.add("router", "Scores by which patches are kept", rows)
    return result


def _numbers(scores: Any, stays: Any, following: Any) -> TableRow:
    """The columns of one block, from scores (I, P), a mask of kept patches, and the scores in the next block."""
    ranked = np.isfinite(scores)
    kept, removed = ranked & stays, ranked & ~stays
    each = [] if following is None else [concordance(*pair) for pair in zip(scores, following, strict=True)]
    known = [number for number in each if np.isfinite(number)]
    return {
        "images": len(scores),
        "scored": float(ranked.sum() / len(scores)),
        "kept": float(kept.sum() / len(scores)),
        "score": float(scores[ranked].mean()),
        "score_std": float(scores[ranked].std()),
        "score_kept": float(scores[kept].mean()) if kept.any() else None,
        "score_removed": float(scores[removed].mean()) if removed.any() else None,
        **moments({"persistence": known or [np.nan]}),
    }


class _RouterScores(Observer):
    """Per block, the scores of one model's patches and a mask of those that are kept."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        self.calls = ReducerCalls(self.reduction, scores=True)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        for call in self.calls.take():
            if call.scores is not None:
                self.add(call.depth, *call.on_grid())


# ---- figures ---------------------------------------------------------------------------------------------------------

METHODS_DRAWN, BLOCKS_DRAWN = 4, 5


@draws("router", "router", "Scores over the image")
def draw_router(tables: Tables) -> Any:
    """Rows of pictures, two per method: an image, the scores of its patches in each block that ranks them, pale if a
    patch was removed, and the block at which each patch is removed. Dark is low, yellow is high."""
    arrays = tables.arrays.get("router")
    if not arrays:
        return None
    rows = []
    for name, shown, image, (scores, depth) in example_maps(arrays, ("scores", "depth"), METHODS_DRAWN, BLOCKS_DRAWN):
        grid = grid_of(len(depth), image)
        parts = [(f"block {block}", overlay(image, scores[place], grid)) for block, place in shown.items()]
        last = ("depth", overlay(image, depth, grid, cmap="cividis"))
        rows.append((short(name), [("image", in_colour(image)), *parts, last]))
    return gallery(rows)
