"""Figures of speed: speed-ups over sizes, or images per second of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitrim.analysis.drawings import Tables, draws, names_of, styles
from vitrim.plots.charts import Line, line
from vitrim.plots.style import SMALL, TEXT, below, panels

OWN = "M"
"""The rows in which every model has its own number of tokens."""
WIDE = 0.3
"""Width of a bar; its speed-up is written above it."""

Rows = Sequence[Mapping[str, Any]]


@draws(
    "throughput",
    "throughput",
    title="Speed",
    alt="One panel per precision and attention kernel. Of several sizes: the speed-up over the dense model, a line per "
    "method, with the images per second of the dense model below each size. Of one size: images per second as bars for "
    "the model's own number of tokens M, one less, and multiples of 8, with the speed-up above each.",
)
def draw_throughput(tables: Tables) -> Any:
    """Speed-up over size, a line per method; bars of images per second where there is one size."""
    rows = tables["throughput"].records()
    groups = list(dict.fromkeys((row["precision"], row["kernel"]) for row in rows))
    names = names_of({"throughput": tables["throughput"]})
    several = len({row["size"] for row in rows}) > 1
    figure, axes = panels(len(groups), across=2, size=(4.2, 2.6), above=0.2 + 0.2 * -(-len(names) // 3))
    handles: dict[str, Any] = {}
    for axis, group in zip(axes, groups, strict=True):
        own = [row for row in rows if (row["precision"], row["kernel"]) == group]
        handles |= _over_sizes(axis, own, names, tables) if several else _bars(axis, own, names, tables)
        axis.set_title(" ".join(map(str, group)), fontsize=TEXT)
    axes[0].set_ylabel("speed-up" if several else "images per second", fontsize=TEXT)
    below(figure, list(handles.values()))
    return figure


def _over_sizes(axis: Any, rows: Rows, names: Sequence[str], tables: Tables) -> dict[str, Any]:
    """Draw the speed-ups with each model's own number of tokens; sizes stand at equal distances."""
    colour, marker = styles(tables)
    found = {(row["method"], row["size"]): row for row in rows if row["tokens"] == OWN}
    sizes = sorted({size for _, size in found})
    handles = {}
    for name in names:
        y = [found[name, size]["speedup"] if (name, size) in found else float("nan") for size in sizes]
        handles[name] = line(axis, Line(range(len(sizes)), y), colour=colour[name], marker=marker[name], label=name)
    rates = [found[names[0], size]["images_per_second"] for size in sizes]  # the dense model comes first
    labels = [f"{size} px\n{rate:.3g}/s" for size, rate in zip(sizes, rates, strict=True)]
    axis.set_xticks(range(len(sizes)), labels, fontsize=SMALL)
    axis.margins(x=0.1)
    return handles


def _bars(axis: Any, rows: Rows, names: Sequence[str], tables: Tables) -> dict[str, Any]:
    """Draw images per second of one size, a bar for each number of tokens."""
    colour, _ = styles(tables)
    handles, ticks = {}, dict[float, str]()
    for place, name in enumerate(names):
        some = [row for row in rows if row["method"] == name]
        x = [1.2 * place + (WIDE + 0.04) * number for number, _ in enumerate(some)]
        handles[name] = axis.bar(
            x, [row["images_per_second"] for row in some], color=colour[name], width=WIDE, label=name
        )
        ticks |= {left: str(row["tokens"]).replace("aligned", "x 8") for left, row in zip(x, some, strict=True)}
        for left, row in zip(x, some, strict=True):
            note = {"textcoords": "offset points", "xytext": (0, 4), "ha": "center", "fontsize": SMALL}
            axis.annotate(f"{row['speedup']:.2f}", (left, row["images_per_second"]), **note)
    axis.margins(y=0.15)
    axis.set_xticks(list(ticks), list(ticks.values()), fontsize=SMALL)
    return handles
