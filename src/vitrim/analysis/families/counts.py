"""Counts: tokens left after each block, image by image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vitrim.analysis.family import FamilyResult, TableRow, Tables, grouped
from vitrim.analysis.figures import Panel, draws, line_panels, styles
from vitrim.analysis.record import Record
from vitrim.plots.charts import short
from vitrim.style import SMALL, TEXT, panels


def counts(records: Sequence[Record]) -> FamilyResult:
    """Tokens after each block, prefix included: mean, population standard deviation, deciles, minimum and maximum; and
    the mean number that the block removed (negative if patches return). Also, where they apply, the upper bound of
    methods that decide per image, and the merging threshold."""
    rows = list[TableRow]()
    for record in records:
        tokens = record.tokens()
        start = record.num_patches + record.header["num_prefix"]
        bounds, thresholds = (record.header.get(key) or [None] * tokens.shape[1] for key in ("bounds", "thresholds"))
        # Tokens in front of each block: those behind the one before.
        before = np.concatenate([np.full((len(tokens), 1), start), tokens[:, :-1]], 1)
        for block, (left, had) in enumerate(zip(tokens.T, before.T, strict=True)):
            p10, median, p90 = np.quantile(left, [0.1, 0.5, 0.9]).tolist()
            row = {"method": record.name, "block": block, "images": len(left), "tokens": float(left.mean())}
            row |= {"tokens_std": float(left.std()), "p10": p10, "median": median, "p90": p90}
            row |= {"least": int(left.min()), "most": int(left.max()), "removed": float((had - left).mean())}
            rows.append({**row, "bound": bounds[block], "threshold": thresholds[block]})
    result = FamilyResult()
    result.add("counts", "Tokens after each block", rows)
    return result


# ---- figures ---------------------------------------------------------------------------------------------------------

MOST = 12
"""Most records that get a panel."""


@draws("counts", "counts", "Tokens after each block")
def draw_tokens(tables: Tables) -> Any:
    """Lines over the blocks: mean number of tokens left. For methods that decide image by image, a band reaches from
    the first to the ninth decile of the images."""
    axis = _tokens(tables, lambda row: 1.0)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("tokens, class token included", fontsize=TEXT)
    return axis.figure


@draws("counts", "counts", "Tokens removed by each block")
def draw_removed(tables: Tables) -> Any:
    """Bars over the blocks, one panel per method: mean number of tokens that the block removes, negative if patches
    return. If a method merges above a threshold, a dashed line on the right axis shows the threshold."""
    colour, _ = styles(tables)
    rows = grouped(tables["counts"].records(), "method")
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
    if not any(row.get("bound") for row in tables["counts"].records()):
        return None
    axis = _tokens(tables, lambda row: row["bound"])
    axis.set_ylim(0, 1.03)
    axis.set_ylabel("share of the bound", fontsize=TEXT)
    return axis.figure


def _tokens(tables: Tables, unit: Callable[[TableRow], float | None]) -> Any:
    """The axis of a figure of tokens after each block in a unit, with their deciles; rows without one are left out."""
    rows = [
        {**row, "tokens": row["tokens"] / whole, "tokens_low": row["p10"] / whole, "tokens_high": row["p90"] / whole}
        for row in tables["counts"].records()
        if (whole := unit(row))
    ]
    panel = Panel("tokens", grouped(rows, "method"), label="after block (from 0)")
    _, (axis,) = line_panels([panel], styles(tables), across=2)
    return axis
