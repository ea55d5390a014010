"""Figures of depth: maps of where patches are dropped, and how alike these maps are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.drawings import Tables, draws, names_of
from vitrim.analysis.figures.patterns import matrix
from vitrim.plots.charts import colour_bar, heat, short, square
from vitrim.plots.style import SMALL, TITLE, panels, sheet

ACROSS = 5
"""Maps in a row."""
LIKENESS = {
    "pcc": ("PCC", "pcc"),
    "scc": ("SCC", "scc"),
    "sim": ("SIM", "sim"),
    "kl_bits_ab": ("KL, bits", "kl_bits_ba"),
    "js_bits": ("JS, bits", "js_bits"),
    "emd_patches": ("EMD, patches", "emd_patches"),
}
"""Of every measure its name, and the column of a pair turned round."""
SAME = {"pcc": 1.0, "scc": 1.0, "sim": 1.0}
"""The value of a map with itself; 0 otherwise."""


@draws(
    "depth",
    "depth_maps",
    title="Depth that patches reach",
    alt="Maps over the image, in pairs of rows: the mean over the images of the block at which each patch is dropped, "
    "and below it the standard deviation. All means share one colour scale, and all deviations another.",
)
def draw_depth_maps(tables: Tables) -> Any:
    """Mean and standard deviation of the depth of every patch, a column per record."""
    table = tables["depth_maps"]
    names = names_of({table.name: table})
    grids = {name: _grids([row for row in table.rows if row[0] == name]) for name in names}
    stacks = [np.stack([pair[kind] for pair in grids.values()]) for kind in (0, 1)]
    limits = [(float(stack.min()), float(stack.max())) for stack in stacks]
    across = min(ACROSS, len(names))
    chunks = [names[start : start + across] for start in range(0, len(names), across)]
    figure = sheet(1.6 * across + 1.1, 3.5 * len(chunks) + 0.1)
    axes = figure.subplots(2 * len(chunks), across, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for place, chunk in enumerate(chunks):
        for kind, (label, cmap) in enumerate((("mean depth", "viridis"), ("std", "cividis"))):
            row = axes[2 * place + kind]
            for axis, name in zip(row, chunk, strict=False):
                image = heat(axis, grids[name][kind], limits=limits[kind], cmap=cmap)
                if kind == 0:
                    axis.set_title(short(name).replace(" ", "\n", 1), fontsize=SMALL)
            colour_bar(figure, image, row.tolist(), label)
    return figure


def _grids(rows: list[tuple[Any, ...]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation as maps."""
    height, width = (1 + max(row[place] for row in rows) for place in (1, 2))
    mean, std = np.full((height, width), np.nan), np.full((height, width), np.nan)
    for _, y, x, value, deviation in rows:
        mean[y, x], std[y, x] = value, deviation
    return mean, std


@draws(
    "depth",
    "depth_pairs",
    title="Similarity of the maps of depth",
    alt="Heat maps of the likeness of the mean maps of depth for every pair: Pearson and Spearman correlation and "
    "similarity, which are 1 for equal maps; Kullback-Leibler and Jensen-Shannon divergence and earth mover's "
    "distance, which are 0.",
)
def draw_depth_pairs(tables: Tables) -> Any:
    """Six measures of every pair of mean maps."""
    table = tables["depth_pairs"]
    names = names_of({table.name: table})
    side, across = square(names, 3)
    figure, axes = panels(len(LIKENESS), across=across, size=(side + 0.7, side + 0.35), above=1.4)
    figure.set_figwidth(figure.get_figwidth() + 1.4)
    figure.set_layout_engine("compressed")  # else names below squares are cut off
    for place, (axis, (measure, (label, turned))) in enumerate(zip(axes, LIKENESS.items(), strict=True)):
        grid = matrix(table.records(), names, measure, turned)
        np.fill_diagonal(grid, SAME.get(measure, 0.0))
        finite = grid[np.isfinite(grid)]
        limits = (min(0.0, float(finite.min())), 1.0) if measure in SAME else (0.0, float(finite.max()) or 1.0)
        image = heat(axis, grid, rows=names, columns=names, limits=limits)
        axis.tick_params(labelleft=place % across == 0, labelbottom=place + across >= len(axes))
        axis.set_title(label, fontsize=TITLE)
        figure.colorbar(image, ax=axis, shrink=0.8, aspect=18).ax.tick_params(labelsize=SMALL)
    return figure
