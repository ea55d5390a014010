"""Pictures of scores: over the image and block by block, what methods rank patches by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from vitrim.analysis.drawings import Tables, draws, fullest
from vitrim.plots.charts import short
from vitrim.plots.patches import gallery, grid_of, in_colour, overlay

EXAMPLES, METHODS, BLOCKS = 2, 4, 5
Arrays = Mapping[str, NDArray[Any]]


@draws(
    "router",
    "router",
    title="Scores over the image",
    alt="Rows of pictures, two per method: an image, the scores of its patches in each block that ranks them, pale "
    "where a patch is gone, and the block at which each patch is removed. Dark is low, yellow is high.",
)
def draw_router(tables: Tables) -> Any:
    """Scores of the first images, a column per block; None where there are no arrays."""
    arrays = tables.arrays.get("router")
    if not arrays:
        return None
    rows = []
    for name in named(arrays, "scores")[:METHODS]:
        blocks = arrays[f"{name}/blocks"].tolist()
        shown = fullest(blocks, BLOCKS)
        for example in range(min(EXAMPLES, len(arrays["images"]))):
            image = arrays["images"][example]
            grid = grid_of(arrays[f"{name}/depth"].shape[-1], image)
            scores = arrays[f"{name}/scores"][example]
            parts = [(f"block {block}", overlay(image, scores[blocks.index(block)], grid)) for block in shown]
            depth = overlay(image, arrays[f"{name}/depth"][example], grid, cmap="cividis")
            rows.append((short(name), [("image", in_colour(image)), *parts, ("depth", depth)]))
    return gallery(rows)


def named(arrays: Arrays, kind: str) -> list[str]:
    """The methods that have arrays of a kind.

    Example:
        >>> named({"images": None, "topk/scores": None}, "scores")
        ['topk']
    """
    return [name.removesuffix(f"/{kind}") for name in arrays if name.endswith(f"/{kind}")]
