"""Figures of speed: images per second over sizes, with speed-ups."""

from __future__ import annotations

from typing import Any

from vitrim.analysis.drawings import Tables, draws, names_of, styles
from vitrim.plots.charts import Line, line
from vitrim.plots.style import SMALL, TEXT, below, panels


@draws(
    "throughput",
    "throughput",
    title="Images per second",
    alt="Images per second, one panel per precision and attention kernel: over the size of the images on logarithmic "
    "axes or, of one size, as bars. The speed-up over the dense model stands beside each point.",
)
def draw_throughput(tables: Tables) -> Any:
    """Speed over size, a line per method; bars where there is one size."""
    rows = tables["throughput"].records()
    groups = list(dict.fromkeys((row["precision"], row["kernel"]) for row in rows))
    colour, marker = styles(tables)
    names = names_of({"throughput": tables["throughput"]})
    several = len({row["size"] for row in rows}) > 1
    figure, axes = panels(len(groups), across=2, size=(4.2, 2.6), above=0.2 + 0.2 * -(-len(names) // 3))
    handles: dict[str, Any] = {}
    for axis, group in zip(axes, groups, strict=True):
        own = [row for row in rows if (row["precision"], row["kernel"]) == group]
        for place, name in enumerate(names):
            some = sorted((row for row in own if row["method"] == name), key=lambda row: row["size"])
            x = [row["size"] if several else place + 0.25 * number for number, row in enumerate(some)]
            y = [row["images_per_second"] for row in some]
            if several:
                handles[name] = line(axis, Line(x, y), colour=colour[name], marker=marker[name], label=name)
            else:
                handles[name] = axis.bar(x, y, color=colour[name], width=0.22, label=name)
            for left, height, row in zip(x, y, some, strict=True):
                if row["speedup"] is not None:
                    note = {"textcoords": "offset points", "xytext": (0, 4), "ha": "center", "fontsize": SMALL}
                    axis.annotate(f"{row['speedup']:.2f}x", (left, height), **note)
        axis.set_title(" ".join(map(str, group)), fontsize=TEXT)
        axis.margins(y=0.15)
        if several:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.set_xlabel("pixels a side", fontsize=TEXT)
        else:
            axis.set_xticks([])
    axes[0].set_ylabel("images per second", fontsize=TEXT)
    below(figure, list(handles.values()))
    return figure
