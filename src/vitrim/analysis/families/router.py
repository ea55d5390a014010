"""Router: the scores that methods rank patches by, over the image and block by block."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.analysis.families.depth import depth_map
from vitrim.analysis.family import FamilyResult, Tables, drawn_blocks, draws, methods_with, note_blocks
from vitrim.analysis.statistics import columns_of, summary
from vitrim.analysis.subject import EXAMPLES, Observer, Subject, Watch
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.records import Batch
from vitrim.plots.charts import short
from vitrim.plots.patches import gallery, grid_of, in_colour, overlay
from vitrim.report import Table

IMAGES = 32
COLUMNS = (
    *("method", "block", "images", "scored", "kept", "score", "score_std", "score_kept", "score_removed"),
    *columns_of("persistence"),
)
SHOWN = (*COLUMNS[:-4], "persistence")


def concordance(a: ArrayLike, b: ArrayLike) -> float:
    """The probability that two items have the same order in ``a`` as in ``b``, ties counting half: (1 + tau) / 2.

    tau is Kendall's tau-a over the items known in both. 0.5 by chance; nan for fewer than two items.

    Args:
        a, b: (P,), nan if unknown.

    Example:
        >>> concordance([1, 2, 3, np.nan], [10, 30, 20, 0]), concordance([1, 2], [5, 5])
        (0.6666666666666666, 0.5)
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    known = np.isfinite(first) & np.isfinite(second)
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
    watched = _Scores.over(subject, subject.methods, subject.batches(IMAGES))
    found = [watch for watch in watched if watch.scores]
    result = FamilyResult(images=len(subject.places(IMAGES)))
    result.notes += [
        f"{watch.name} is left out of router: it does not rank patches" for watch in watched if not watch.scores
    ]
    if not found:
        result.notes.append("router skipped: it needs a method that ranks patches, such as topk or cropr")
        return result
    rows: list[tuple[object, ...]] = []
    result.arrays["images"] = subject.examples(IMAGES)
    for watch in found:
        blocks = sorted(watch.scores)
        scores = [np.concatenate(watch.scores[block]) for block in blocks]
        stays = [np.concatenate(watch.stays[block]) for block in blocks]
        for place, (block, own, left) in enumerate(zip(blocks, scores, stays, strict=True)):
            ranked = np.isfinite(own)
            counts = [float(mask.sum() / len(own)) for mask in (ranked, ranked & left)]
            moments = (float(own[ranked].mean()), float(own[ranked].std()))
            means = [float(own[mask].mean()) if mask.any() else None for mask in (ranked & left, ranked & ~left)]
            persistence: tuple[float | None, ...] = (None,) * 4
            if place + 1 < len(blocks):
                each = np.array([concordance(*pair) for pair in zip(own, scores[place + 1], strict=True)])
                each = each[np.isfinite(each)]
                persistence = summary(each[:, None])[0] if len(each) else persistence
            rows.append((watch.name, block, len(own), *counts, *moments, *means, *persistence))
        kept = np.stack([left[:EXAMPLES] for left in stays], 1)
        depth = depth_map(kept, blocks, subject.num_layers).astype(np.float32)
        result.arrays[f"{watch.name}/blocks"] = np.array(blocks)
        result.arrays[f"{watch.name}/scores"] = np.stack([own[:EXAMPLES] for own in scores], 1).astype(np.float32)
        result.arrays[f"{watch.name}/depth"] = depth
    note_blocks(result, subject.blocks, {watch.name: watch.scores for watch in found})
    result.tables.append(Table("router", "Scores by which patches are kept", COLUMNS, rows, SHOWN))
    return result


class _Scores(Observer):
    """The patch scores of one model, by block."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__(contestant)
        self.watch = Watch(self.reduction, scores=True)
        self.scores: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        self.stays: dict[int, list[NDArray[np.bool_]]] = defaultdict(list)

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        for decision in self.watch.take():
            if decision.scores is not None:
                scores, stays = decision.on_grid()
                self.scores[decision.depth].append(scores)
                self.stays[decision.depth].append(stays)


# ---- figures ---------------------------------------------------------------------------------------------------------

EXAMPLES_DRAWN, METHODS_DRAWN, BLOCKS_DRAWN = 2, 4, 5


@draws("router", "router", "Scores over the image")
def draw_router(tables: Tables) -> Any:
    """Rows of pictures, two per method: an image, the scores of its patches in each block that ranks them, pale if a
    patch was removed, and the block at which each patch is removed. Dark is low, yellow is high."""
    arrays = tables.arrays.get("router")
    if not arrays:
        return None
    rows = []
    for name in methods_with(arrays, "scores")[:METHODS_DRAWN]:
        shown = drawn_blocks(arrays, name, BLOCKS_DRAWN)
        for example in range(min(EXAMPLES_DRAWN, len(arrays["images"]))):
            image = arrays["images"][example]
            grid = grid_of(arrays[f"{name}/depth"].shape[-1], image)
            scores = arrays[f"{name}/scores"][example]
            parts = [(f"block {block}", overlay(image, scores[place], grid)) for block, place in shown.items()]
            depth = overlay(image, arrays[f"{name}/depth"][example], grid, cmap="cividis")
            rows.append((short(name), [("image", in_colour(image)), *parts, ("depth", depth)]))
    return gallery(rows)
