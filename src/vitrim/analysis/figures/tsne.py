"""Pictures of pruned tokens in two dimensions, coloured by the block that pruned them."""

from __future__ import annotations

from typing import Any

from vitrim.analysis.drawings import Tables, draws
from vitrim.analysis.figures.router import named
from vitrim.plots.charts import colour_bar, short
from vitrim.plots.style import SMALL, panels


@draws(
    "tsne",
    "tsne",
    title="Pruned tokens before the head",
    alt="Scatter plots, one per form of bringing pruned tokens back: t-SNE of these tokens, coloured by the block that "
    "pruned them. The silhouette by block, in the space of the tokens, stands above.",
)
def draw_tsne(tables: Tables) -> Any:
    """A scatter per method and fusion; None where there are no arrays."""
    arrays = tables.arrays.get("tsne")
    if not arrays:
        return None
    found = {
        (row["method"], row["fusion"]): row["silhouette_tokens"]
        for row in tables["tsne"].records()
        if row["block"] == "all"
    }
    names = named(arrays, "points")
    blocks = [arrays[f"{name}/blocks"] for name in names]
    limits = {"vmin": min(own.min() for own in blocks), "vmax": max(own.max() for own in blocks)}
    figure, axes = panels(len(names), across=2, size=(3.4, 3.2), above=0.1)
    for axis, name, own in zip(axes, names, blocks, strict=True):
        points = arrays[f"{name}/points"]
        drawn = axis.scatter(*points.T, c=own, cmap="viridis", s=5, linewidths=0, **limits)
        method, _, fusion = name.rpartition("/")
        number = found.get((method, fusion))
        silhouette = "" if number is None else f"\nsilhouette {number:.2f}"
        axis.set_title(f"{short(method)}, {fusion.replace('_', ' ')}{silhouette}", fontsize=SMALL)
        axis.set(xticks=[], yticks=[])
    colour_bar(figure, drawn, axes, "block that pruned")
    figure.axes[-1].yaxis.get_major_locator().set_params(integer=True)
    return figure
