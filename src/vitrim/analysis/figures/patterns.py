"""Figures of overlap and of clusters: heat maps stage by stage, lines over blocks and over rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.drawings import Tables, draws, fullest, names_of, styles
from vitrim.analysis.tables import Table
from vitrim.plots.charts import Line, colour_bar, heat, line, short, square
from vitrim.plots.style import TEXT, TITLE, below, method_of, panels

STAGES = 4
"""Blocks of which a heat map is drawn."""
ANCHORS = 6
"""Records that all others are drawn against."""
Row = dict[str, Any]


@draws(
    "patterns",
    "overlap",
    title="Overlap of the kept patches (IoU)",
    alt="Heat maps, one per stage: intersection over union of the patches that each pair of methods keeps. Grey: "
    "neither of the two changes tokens in that block.",
)
def draw_overlap(tables: Tables) -> Any:
    """IoU of every pair of records, a heat map per stage."""
    return _maps(tables["overlap"], {"iou": "iou"}, "IoU")


@draws(
    "patterns",
    "overlap",
    title="Overlap block by block",
    alt="Lines over the blocks: intersection over union with an anchor, one panel per anchor. Bands are 95 % bootstrap "
    "intervals, dashes lower bounds, dots the overlap of random patches.",
)
def draw_overlap_blocks(tables: Tables) -> Any:
    """IoU after every block, against each of the first records in turn."""
    return _against(tables, tables["overlap"], "iou", "IoU")


@draws(
    "patterns",
    "overlap",
    title="Overlap across rates",
    alt="Lines over the number of patches kept: how much of what a milder setting of the same method keeps a stronger "
    "one keeps too (IoA), and their IoU. Dashes are lower bounds, dots the overlap of random patches.",
)
def draw_overlap_rates(tables: Tables) -> Any:
    """IoA and IoU of every setting with the mildest one of its method; None where no method has two settings."""
    table = tables["overlap"]
    same = [row for row in table.records() if method_of(row["method_a"]) == method_of(row["method_b"])]
    if not same:
        return None
    blocks = fullest((row["block"] for row in same), STAGES)
    colour, _ = styles(tables)
    handles: dict[str, Any] = {}
    figure, axes = panels(2 * len(blocks), across=len(blocks), size=(2.3, 2.1), above=0.6)
    for place, axis in enumerate(axes):
        measure, block = ("ioa", "iou")[place // len(blocks)], blocks[place % len(blocks)]
        _over_kept(axis, [row for row in same if row["block"] == block], measure, colour, handles)
        axis.set_title(f"{'IoA' if measure == 'ioa' else 'IoU'}, block {block}", fontsize=TITLE)
    for axis in axes[len(blocks) :]:
        axis.set_xlabel("patches kept", fontsize=TEXT)
    below(figure, list(handles.values()))
    return figure


def _over_kept(axis: Any, rows: Sequence[Row], measure: str, colour: dict[str, str], handles: dict[str, Any]) -> None:
    by_method: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_method[method_of(row["method_a"])].append(row)
    for method, own in by_method.items():
        mildest = max(own, key=lambda row: row["kept_a"])["method_a"]
        points = sorted((row for row in own if row["method_a"] == mildest), key=lambda row: row["kept_b"])
        handles[method] = line(
            axis, _line(points, measure, "kept_b"), colour=colour[mildest], label=f"{method}, with {short(mildest)}"
        )
    axis.set_ylim(-0.02, 1.03)
    axis.set_xlim(0, 1.05 * max(row["kept_a"] for row in rows))


@draws(
    "patterns",
    "clusters",
    title="Agreement of the clusters (NMI)",
    alt="Heat maps, one per stage: normalised mutual information of the clusters of each pair of methods. Grey: "
    "neither of the two changes tokens in that block.",
)
def draw_clusters(tables: Tables) -> Any:
    """V measure of every pair of records that merge, a heat map per stage."""
    return _maps(tables["clusters"], {"v_measure": "v_measure"}, "NMI")


@draws(
    "patterns",
    "clusters",
    title="Homogeneity of the clusters",
    alt="Heat maps, one per stage: homogeneity of the clusters of the column's method, taken against those of the "
    "row's: whether each of its clusters lies within one of theirs.",
)
def draw_homogeneity(tables: Tables) -> Any:
    """Homogeneity: of a pair turned round it is the completeness."""
    return _maps(tables["clusters"], {"homogeneity": "completeness"}, "homogeneity")


@draws(
    "patterns",
    "clusters",
    title="Agreement of the clusters block by block",
    alt="Lines over the blocks: normalised mutual information of clusters with an anchor, one panel per anchor. Bands "
    "are 95 % bootstrap intervals, dots the level of clusters put at random.",
)
def draw_clusters_blocks(tables: Tables) -> Any:
    """V measure after every block, against each of the first records in turn."""
    return _against(tables, tables["clusters"], "v_measure", "NMI")


def _maps(table: Table, columns: dict[str, str], label: str) -> Any:
    """A heat map per stage; ``columns`` has the column of a pair, and that of the pair turned round."""
    [(straight, turned)] = columns.items()
    names, rows = names_of({table.name: table}), table.records()
    blocks = fullest((row["block"] for row in rows), STAGES)
    side, across = square(names, STAGES)
    figure, axes = panels(len(blocks), across=across, size=(side + 0.2, side + 0.3), above=1.5)
    figure.set_figwidth(figure.get_figwidth() + 2.2)
    figure.set_layout_engine("compressed")  # else names below squares are cut off
    image = None
    for place, (axis, block) in enumerate(zip(axes, blocks, strict=True)):
        grid = matrix([row for row in rows if row["block"] == block], names, straight, turned)
        lowest = place + across >= len(blocks)
        image = heat(axis, grid, rows=names, columns=names, limits=(0, 1))
        axis.tick_params(labelleft=place % across == 0, labelbottom=lowest)
        axis.set_title(f"after block {block}", fontsize=TITLE)
    colour_bar(figure, image, axes, label)
    return figure


def matrix(rows: Iterable[Row], names: Sequence[str], straight: str, turned: str) -> NDArray[np.float64]:
    """(R, R), the value of every pair; 1 of each name with itself, nan where there is none.

    Example:
        >>> rows = [{"method_a": "x", "method_b": "y", "h": 0.5, "c": 0.2}]
        >>> matrix(rows, ["x", "y"], "h", "c").tolist()
        [[1.0, 0.5], [0.2, 1.0]]
    """
    grid = np.full((len(names), len(names)), np.nan)
    np.fill_diagonal(grid, 1.0)
    for row in rows:
        a, b = names.index(row["method_a"]), names.index(row["method_b"])
        grid[a, b], grid[b, a] = row[straight], row[turned]
    return grid


def _against(tables: Tables, table: Table, measure: str, label: str) -> Any:
    """A panel per anchor with a line for each other record."""
    names = names_of({table.name: table})
    colour, marker = styles(tables)
    anchors = names[:ANCHORS] if len(names) > 2 else names[:1]
    figure, axes = panels(len(anchors), across=3, size=(2.7, 2.2), above=0.4 + 0.17 * len(names))
    handles = {}
    for axis, anchor in zip(axes, anchors, strict=True):
        pairs: dict[str, list[Row]] = defaultdict(list)
        for row in table.records():
            if anchor in (row["method_a"], row["method_b"]):
                pairs[row["method_b"] if row["method_a"] == anchor else row["method_a"]].append(row)
        for name in sorted(pairs, key=names.index):
            given = _line(sorted(pairs[name], key=lambda row: row["block"]), measure, "block")
            handles[name] = line(axis, given, colour=colour[name], marker=marker[name], label=name)
        axis.set_title(f"with {short(anchor)}", fontsize=TEXT)
        axis.set_ylim(-0.02, 1.03)
        axis.set_xlabel("after block", fontsize=TEXT)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel(label, fontsize=TEXT)
    below(figure, [handles[name] for name in names if name in handles])
    return figure


def _line(rows: Sequence[Row], measure: str, over: str) -> Line:
    def column(name: str) -> list[Any] | None:
        return [row.get(name) for row in rows] if rows and name in rows[0] else None

    stem = measure.removesuffix("_measure")  # the chance level of the V measure is v_chance
    return Line(
        [row[over] for row in rows],
        [row[measure] for row in rows],
        column(f"{measure}_low"),
        column(f"{measure}_high"),
        column(f"{measure}_least"),
        column(f"{stem}_chance"),
    )
