"""Figures of features: how far they move from the dense model's, and whether that tells how much accuracy is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrim.analysis.drawings import Tables, draws, names_of, styles
from vitrim.analysis.families.features import HEAD, MEASURES
from vitrim.plots.charts import Line, line, short
from vitrim.plots.style import DENSE, SMALL, TEXT, below, method_of, panels

TITLES = {
    "procrustes": "Procrustes",
    "cka_distance": "CKA distance",
    "pwcca_distance_ab": "PWCCA distance",
    "pwcca_distance_ba": "PWCCA distance, reversed",
    "mean_cca": "mean CCA",
}
DISTANCES = ("procrustes", "cka_distance", "pwcca_distance_ab")
ANCHORS = 9
GREY = "#9a9a9a"
RHO, TAU = "\N{GREEK SMALL LETTER RHO}", "\N{GREEK SMALL LETTER TAU}"
Row = dict[str, Any]


@draws(
    "features",
    "features",
    title="Distance of the features from the dense model's",
    alt="Lines over the blocks, one panel per measure: distance of the class token, and at the end of what the "
    "classifier reads, from the dense model's.",
)
def draw_features(tables: Tables) -> Any:
    """Distance from the dense model block by block; None where there is no dense model."""
    table = tables["features"]
    rows = [row for row in table.records() if DENSE in map(method_of, (row["method_a"], row["method_b"]))]
    rows = [row for row in rows if method_of(_other(row)) != DENSE]
    if not rows:
        return None
    measures = [name for name in DISTANCES if any(row[name] is not None for row in rows)]
    colour, marker = styles(tables)
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    names = [name for name in names_of({table.name: table}) if name in {_other(row) for row in rows}]
    figure, axes = panels(len(measures), across=3, size=(2.9, 2.5), above=0.3 + 0.17 * -(-len(names) // 3))
    handles: dict[str, Any] = {}
    for axis, measure in zip(axes, measures, strict=True):
        for name in names:
            own = {row["block"]: row[measure] for row in rows if _other(row) == name}
            given = Line(range(len(blocks)), [own.get(block) for block in blocks])  # type: ignore[misc]
            handles[name] = line(axis, given, colour=colour[name], marker=marker[name], label=name)
        axis.set_title(TITLES[measure], fontsize=TEXT)
        axis.set_ylim(bottom=0)
        axis.set_xticks(range(len(blocks)), [str(block) for block in blocks])
        axis.set_xlabel("class token after block; head", fontsize=TEXT)
    below(figure, [handles[name] for name in names])
    return figure


@draws(
    "features",
    "features",
    title="Distance of features against the difference in accuracy",
    alt="Scatter plots, one panel per measure: for each pair of records the distance of what the classifier reads, and "
    "the difference in accuracy. Pairs with the dense model have the other method's colour, all others are grey. "
    "Spearman's and Kendall's rank correlations over all pairs stand above, with a 95 % bootstrap interval.",
)
def draw_proxy(tables: Tables) -> Any:
    """Every pair of records as a point; None without labels and logits."""
    table = tables["features"]
    rows = [row for row in table.records() if row["block"] == HEAD and row["difference"] is not None]
    measures = [name for name in (*MEASURES[:2], "pwcca_distance_ab") if any(row[name] is not None for row in rows)]
    if len(rows) < 3 or not measures:
        return None
    colour, marker = styles(tables)
    figure, axes = panels(len(measures), across=3, size=(2.9, 2.8), above=0.8)
    handles: dict[str, Any] = {}
    for axis, measure in zip(axes, measures, strict=True):
        measured = (row for row in rows if row[measure] is not None)  # features that are all the same have no distance
        for row in sorted(measured, key=lambda row: DENSE in map(method_of, (row["method_a"], row["method_b"]))):
            dense = DENSE in map(method_of, (row["method_a"], row["method_b"]))
            name = _other(row)
            look = {"color": colour[name], "marker": marker[name]} if dense else {"color": GREY, "marker": "."}
            (drawn,) = axis.plot(row[measure], 100 * row["difference"], linestyle="none", markersize=5, **look)
            if dense:
                drawn.set_label(name)
                handles[name] = drawn
        axis.set_title(f"{TITLES[measure]}\n{_correlation(tables, HEAD, measure)}", fontsize=SMALL)
        axis.set_xlabel("distance of features", fontsize=TEXT)
    axes[0].set_ylabel("difference, points", fontsize=TEXT)
    below(figure, list(handles.values()))
    return figure


def _correlation(tables: Tables, block: object, measure: str) -> str:
    """The rank correlations of a table, in words."""
    found = tables["proxy"].records() if "proxy" in tables else []
    row = next((row for row in found if (row["block"], row["measure"]) == (block, measure)), None)
    if row is None or row["spearman"] is None:
        return "too few pairs"
    low, high = row["spearman_low"], row["spearman_high"]
    between = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{RHO} = {row['spearman']:.2f}{between}, {TAU} = {row['kendall']:.2f}, n = {row['pairs']}"


@draws(
    "features",
    "proxy_anchors",
    title="The same against every anchor",
    alt="Scatter plots, one panel per anchor: Procrustes distance of what the classifier reads from the anchor's, and "
    "how much more or less accurate than the anchor each other record is. Rank correlations stand above.",
)
def draw_proxy_anchors(tables: Tables) -> Any:
    """Procrustes distance from each anchor against the signed difference in accuracy."""
    rows = [row for row in tables["features"].records() if row["block"] == HEAD and row["difference"] is not None]
    found = [
        row for row in tables["proxy_anchors"].records() if row["measure"] == "procrustes" and row["block"] == HEAD
    ]
    if not rows or not found:
        return None
    colour, marker = styles(tables)
    figure, axes = panels(
        len(found[:ANCHORS]), across=3, size=(2.6, 2.3), above=0.2 + 0.17 * -(-len(names_of(tables)) // 3)
    )
    handles: dict[str, Any] = {}
    for axis, anchor in zip(axes, found, strict=False):
        own = [row for row in rows if anchor["method"] in (row["method_a"], row["method_b"])]
        own = [row for row in own if row["procrustes"] is not None]
        for row in own:
            sign, name = (1, row["method_b"]) if row["method_a"] == anchor["method"] else (-1, row["method_a"])
            look = {"color": colour[name], "marker": marker[name], "linestyle": "none", "markersize": 5}
            (handles[name],) = axis.plot(row["procrustes"], 100 * sign * row["signed"], label=name, **look)
        axis.axhline(0, color=GREY, linewidth=0.7)
        rho = "" if anchor["spearman"] is None else f"{RHO} = {anchor['spearman']:.2f}, {TAU} = {anchor['kendall']:.2f}"
        axis.set_title(f"{short(anchor['method'])}\n{rho}", fontsize=SMALL)
    for axis in axes[-3:]:
        axis.set_xlabel("Procrustes distance", fontsize=TEXT)
    for axis in axes[::3]:
        axis.set_ylabel("difference, points", fontsize=TEXT)
    below(figure, [handles[name] for name in names_of(tables) if name in handles])
    return figure


def _other(row: Row) -> str:
    """Of a pair with the dense model the other one; else the second."""
    names: Sequence[str] = (row["method_a"], row["method_b"])
    return str(names[0] if method_of(names[1]) == DENSE else names[1])
