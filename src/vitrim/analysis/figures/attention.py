"""Pictures of attention: the map that fused tokens are given, the one they would compute, and the difference."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitrim.analysis.drawings import Tables, draws, fullest, styles
from vitrim.analysis.figures.router import named
from vitrim.plots.charts import Line, line, short
from vitrim.plots.patches import gallery, grid_of, in_colour, overlay
from vitrim.plots.style import TEXT, below, panels

EXAMPLES, METHODS, BLOCKS = 2, 2, 6


@draws(
    "attention",
    "attention",
    title="Attention given and attention computed, block by block",
    alt="Lines over the blocks: mean absolute difference of the class token's attention, and its divergence, with 95 % "
    "bootstrap intervals as bands.",
)
def draw_attention(tables: Tables) -> Any:
    """Difference and divergence after each block, a line per method."""
    table = tables["attention"]
    colour, marker = styles(tables)
    figure, axes = panels(2, across=2, size=(3.6, 2.4), above=0.5)
    handles: dict[str, Any] = {}
    for axis, (measure, label) in zip(
        axes, (("mean_absolute", "mean absolute difference"), ("kl_nats", "KL, nats")), strict=True
    ):
        for name in dict.fromkeys(table.column("method")):
            rows = [row for row in table.records() if row["method"] == name]
            columns = [[row[key] for row in rows] for key in ("block", measure, f"{measure}_low", f"{measure}_high")]
            handles[name] = line(axis, Line(*columns), colour=colour[name], marker=marker[name], label=name)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("block", fontsize=TEXT)
        axis.set_ylabel(label, fontsize=TEXT)
        axis.xaxis.get_major_locator().set_params(integer=True)
    below(figure, list(handles.values()))
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
    for name in named(arrays, "given")[:METHODS]:
        blocks = arrays[f"{name}/blocks"].tolist()
        shown = [(block, blocks.index(block)) for block in fullest(blocks, BLOCKS)]
        for example in range(min(EXAMPLES, len(arrays["images"]))):
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
