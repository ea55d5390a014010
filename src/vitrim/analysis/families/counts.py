"""Counts: tokens left after each block, image by image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrim.analysis.family import FamilyResult, Tables, by_method, draws, line_panels, styles
from vitrim.analysis.record import Record
from vitrim.plots.charts import short
from vitrim.report import Table
from vitrim.style import SMALL, TEXT, panels

SHOWN = ("method", "block", "images", "tokens", "tokens_std", "p10", "median", "p90", "least", "most", "removed")
COLUMNS = (*SHOWN, "bound", "threshold")


def counts(records: Sequence[Record]) -> FamilyResult:
    """Tokens after each block, prefix included: mean, population standard deviation, deciles, minimum and maximum; and
    the mean number that the block removed (negative if patches return). Also, where they apply, the upper bound of
    methods that decide per image, and the merging threshold."""
    rows = []
    for record in records:
        tokens = record.tokens()
        start = record.num_patches + record.header["num_prefix"]
        bounds, thresholds = (record.header.get(key) or [None] * tokens.shape[1] for key in ("bounds", "thresholds"))
        before = np.concatenate([np.full((len(tokens), 1), start), tokens[:, :-1]], 1)
        for block, (left, had) in enumerate(zip(tokens.T, before.T, strict=True)):
            deciles = np.quantile(left, [0.1, 0.5, 0.9]).tolist()
            ends = (int(left.min()), int(left.max()))
            moments = (float(left.mean()), float(left.std()))
            removed = float((had - left).mean())
            limits = (bounds[block], thresholds[block])
            rows.append((record.name, block, len(left), *moments, *deciles, *ends, removed, *limits))
    return FamilyResult([Table("counts", "Tokens after each block", COLUMNS, rows, SHOWN)])


# ---- figures ---------------------------------------------------------------------------------------------------------

MOST = 12
"""Most records that get a panel."""


@draws("counts", "counts", "Tokens after each block")
def draw_tokens(tables: Tables) -> Any:
    """Lines over the blocks: mean number of tokens left. For methods that decide image by image, a band reaches from
    the first to the ninth decile of the images."""
    figure, (axis,) = line_panels(tables, "counts", [("tokens", "p10", "p90")], label="after block (from 0)", across=2)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("tokens, class token included", fontsize=TEXT)
    return figure


@draws("counts", "counts", "Tokens removed by each block")
def draw_removed(tables: Tables) -> Any:
    """Bars over the blocks, one panel per method: mean number of tokens that the block removes, negative if patches
    return. If a method merges above a threshold, a dashed line on the right axis shows the threshold."""
    colour, _ = styles(tables)
    rows = by_method(tables["counts"])
    shown = [name for name in rows if any(row["removed"] for row in rows[name])][:MOST]
    if not shown:
        return None
    figure, axes = panels(len(shown), across=3, size=(2.5, 1.75), above=0.3)
    low = min(0.0, *(row["removed"] for name in shown for row in rows[name]))
    high = max(row["removed"] for name in shown for row in rows[name])
    for axis, name in zip(axes, shown, strict=True):
        blocks = [row["block"] for row in rows[name]]
        axis.bar(blocks, [row["removed"] for row in rows[name]], color=colour[name], width=0.75)
        axis.set_ylim(1.05 * low, 1.05 * high)
        axis.set_title(short(name), fontsize=TEXT)
        axis.set_xticks(blocks[:: -(-len(blocks) // 6)])  # only at bars
        thresholds = np.array([row.get("threshold") for row in rows[name]], dtype=np.float64)
        if np.isfinite(thresholds).any():
            beside = axis.twinx()
            beside.plot(blocks, thresholds, color="black", linestyle=(0, (5, 2)), marker=".", linewidth=1)
            beside.set_ylabel("threshold", fontsize=SMALL)
            beside.tick_params(labelsize=SMALL)
            beside.spines["top"].set_visible(False)
    for axis in axes[-3:]:
        axis.set_xlabel("block (from 0)", fontsize=TEXT)
    figure.supylabel("tokens removed", fontsize=TEXT)
    return figure


@draws("counts", "counts", "Share of the bound that is kept")
def draw_share_of_bound(tables: Tables) -> Any:
    """Lines over the blocks: patches kept, as a share of the most that the method may keep. Bands reach from the first
    to the ninth decile of the images."""
    table = tables["counts"]
    if "bound" not in table.columns or not any(table.column("bound")):
        return None
    shares = [
        (row["method"], row["block"], *(row[key] / row["bound"] for key in ("tokens", "p10", "p90")))
        for row in table.records()
        if row["bound"]
    ]
    columns = ("method", "block", "share", "p10", "p90")
    derived = Tables({**tables, "shares": Table("shares", "", columns, shares)})
    figure, (axis,) = line_panels(derived, "shares", [columns[2:]], label="after block (from 0)", across=2)
    axis.set_ylim(0, 1.03)
    axis.set_ylabel("share of the bound", fontsize=TEXT)
    return figure
