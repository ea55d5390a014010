"""Figures of lost information: block by block, one block at a time, and the error of merging."""

from __future__ import annotations

from typing import Any

from vitrim.analysis.drawings import Tables, draws, names_of, styles
from vitrim.plots.charts import Line, line, short
from vitrim.plots.style import BOUND, SMALL, TEXT, below, panels

METHODS = 4
"""Methods with panels of their own."""


@draws(
    "loss",
    "class_tokens",
    title="Cosine of the class token to the dense model's",
    alt="Lines over the blocks: cosine similarity of the class token to the dense model's, with 95 % bootstrap "
    "intervals as bands.",
)
def draw_class_tokens(tables: Tables) -> Any:
    """Cosine after each block, a line per record."""
    table = tables["class_tokens"]
    figure, axis, handles = _lines(tables, "class_tokens", "cosine", "cosine")
    axis.set_ylim(top=1.0 + 0.02 * (1 - min(table.column("cosine"))))
    below(figure, handles, 2)
    return figure


@draws(
    "loss",
    "merging_error",
    title="Error of merging",
    alt="Lines over the blocks: mean error of the tokens that the block merges. Dashes are the bounds of Theorem 1.",
)
def draw_merging_error(tables: Tables) -> Any:
    """Merging error in each block, a line per record, between its bounds."""
    figure, axis, handles = _lines(tables, "merging_error", "error", "merging error")
    colour, _ = styles(tables)
    for name in names_of({"merging_error": tables["merging_error"]}):
        rows = [row for row in tables["merging_error"].records() if row["method"] == name]
        for bound in ("error_least", "error_most"):
            values = [float("nan") if row[bound] is None else row[bound] for row in rows]
            axis.plot([row["block"] for row in rows], values, color=colour[name], linestyle=BOUND, linewidth=1)
    axis.set_ylim(bottom=0)
    below(figure, handles, 2)
    return figure


def _lines(tables: Tables, table: str, measure: str, label: str) -> tuple[Any, Any, list[Any]]:
    """One panel with a line per record over the blocks."""
    colour, marker = styles(tables)
    names = names_of({table: tables[table]})
    figure, (axis,) = panels(1, across=1, size=(6.0, 3.0), above=0.2 + 0.09 * len(names))
    handles = []
    for name in names:
        rows = [row for row in tables[table].records() if row["method"] == name]
        columns = [[row[key] for row in rows] for key in ("block", measure, f"{measure}_low", f"{measure}_high")]
        handles.append(line(axis, Line(*columns), colour=colour[name], marker=marker[name], label=name))
    axis.set_xlabel("block", fontsize=TEXT)
    axis.set_ylabel(label, fontsize=TEXT)
    axis.xaxis.get_major_locator().set_params(integer=True)
    return figure, axis, handles


@draws(
    "loss",
    "loss_alone",
    title="Reducing in one block alone",
    alt="Lines over the blocks, one column per method and one line per amount: cosine distance of the class token at "
    "the end, and divergence of the prediction, where only that block reduces. Bars are the means over the amounts.",
)
def draw_loss_alone(tables: Tables) -> Any:
    """Cosine distance and KL of each block alone: a line per amount, their mean as bars."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    rows = tables["loss_alone"].records()
    groups = list(dict.fromkeys((row["method"], row["setting"]) for row in rows))[:METHODS]
    colour, _ = styles(tables)
    measures = {"cosine_distance": "cosine distance", "kl_nats": "KL, nats"}
    figure, axes = panels(2 * len(groups), across=len(groups), size=(max(2.5, 6.0 / len(groups)), 2.1), above=0.2)
    for place, axis in enumerate(axes):
        (measure, label), (method, setting) = list(measures.items())[place // len(groups)], groups[place % len(groups)]
        own = [row for row in rows if (row["method"], row["setting"]) == (method, setting)]
        values = sorted({row["value"] for row in own})
        blocks = sorted({row["block"] for row in own})
        means = [_mean([row[measure] for row in own if row["block"] == block]) for block in blocks]
        axis.bar(blocks, means, color=colour[method], alpha=0.3, width=0.8)
        for number, value in enumerate(values):
            some = [row for row in own if row["value"] == value]
            shade = to_hex(colormaps["cividis"](0.9 * number / max(len(values) - 1, 1)))
            given = Line([row["block"] for row in some], [row[measure] for row in some])
            line(axis, given, colour=shade, label=f"{setting} = {value:g}")
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if place < len(groups):
            axis.set_title(short(method), fontsize=TEXT)
            axis.set_ylim(top=1.8 * axis.get_ylim()[1])  # the legend stands above the lines
            axis.legend(fontsize=SMALL, frameon=False, loc="upper right")
        else:
            axis.set_xlabel("block that reduces alone", fontsize=TEXT)
        if place % len(groups) == 0:
            axis.set_ylabel(label, fontsize=TEXT)
    return figure


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
