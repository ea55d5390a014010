"""Figures of sensitivity: to the size of the batch, and to the block after which a method decides in another way."""

from __future__ import annotations

from typing import Any

from vitrim.analysis.drawings import Tables, draws, names_of, styles
from vitrim.plots.charts import Line, line
from vitrim.plots.style import TEXT, below, panels


@draws(
    "sensitivity",
    "batch_sizes",
    title="Sensitivity to the batch size",
    alt="Lines over the batch size: score, agreement with the dense model, and 10^9 multiply-accumulates per image, of "
    "methods that decide by the whole batch.",
)
def draw_batch_sizes(tables: Tables) -> Any:
    """Score, agreement and MACs over the batch size."""
    figure, axes = _over(tables, "batch_sizes", "batch_size", "images per batch")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    return figure


@draws(
    "sensitivity",
    "splitting_layers",
    title="Sensitivity to the splitting layer",
    alt="Lines over the block after which the method decides in another way: score, agreement with the dense model, "
    "and 10^9 multiply-accumulates per image.",
)
def draw_splitting_layers(tables: Tables) -> Any:
    """Score, agreement and MACs over the splitting layer."""
    figure, axes = _over(tables, "splitting_layers", "blocks", "splitting layer")
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _over(tables: Tables, table: str, over: str, label: str) -> tuple[Any, list[Any]]:
    """A panel per measure, which are the columns behind the number of images."""
    columns = tables[table].columns
    measures = columns[columns.index("images") + 1 :]
    colour, marker = styles(tables)
    names = names_of({table: tables[table]})
    figure, axes = panels(len(measures), across=3, size=(2.9, 2.3), above=0.2 + 0.2 * -(-len(names) // 3))
    handles: dict[str, Any] = {}
    for axis, measure in zip(axes, measures, strict=True):
        for name in names:
            rows = sorted((row for row in tables[table].records() if row["method"] == name), key=lambda row: row[over])
            given = Line([row[over] for row in rows], [row[measure] for row in rows])
            handles[name] = line(axis, given, colour=colour[name], marker=marker[name], label=name)
        axis.set_title("GMACs" if measure == "gmacs" else measure, fontsize=TEXT)
        axis.set_xlabel(label, fontsize=TEXT)
    below(figure, list(handles.values()))
    return figure, axes
