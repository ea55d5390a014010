"""Pictures of a search: damage over cost, tokens per block, and a grid as a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrim.style import save, sheet

CONSTANT, SEARCHED = "#4878a8", "#d1495b"


def plot_front(
    points: Sequence[tuple[str, float, float]],
    path: str | Path,
    *,
    front: Sequence[tuple[float, float]],
    cost: str = "MACs",
    damage: str = "feature",
) -> None:
    """Write damage over cost, the dense model as a star.

    ``points`` are (kind, share of the dense model's cost, damage); lines join each kind, "constant" and "searched".
    ``front`` has (share, damage) of the points on the Pareto front, drawn as steps.
    """
    figure = sheet(6.4, 4.2)
    axis = figure.subplots()
    for kind, color, marker in (("constant", CONSTANT, "o"), ("searched", SEARCHED, "*")):
        own = sorted((100 * share, value) for name, share, value in points if name == kind)
        if own:
            x, y = zip(*own, strict=True)
            size = 12 if marker == "*" else 6
            axis.plot(x, y, marker=marker, markersize=size, linewidth=1.0, color=color, label=kind, zorder=3)
    # The front ends at the dense model, which costs all and loses nothing.
    steps = [*sorted((100 * share, value) for share, value in front), (100.0, 0.0)]
    axis.step(
        *zip(*steps, strict=True), where="post", color="black", linewidth=0.8, linestyle=":", label="front", zorder=2
    )
    axis.plot([100], [0], marker="*", markersize=14, color="black", linestyle="none", label="dense", zorder=4)
    axis.set_xlabel(f"{cost}, % of the dense model")
    axis.set_ylabel(f"damage: {damage}, mean over the check images")
    axis.set_ylim(bottom=0.0 - 0.02 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, Path(path))


def plot_schedule(schedules: Mapping[str, Sequence[float]], initial: int, path: str | Path, *, title: str = "") -> None:
    """Write the tokens after each block, (L,) by name in ``schedules``, one line each, the dense model dotted."""
    figure = sheet(6.4, 3.6)
    axis = figure.subplots()
    blocks = len(next(iter(schedules.values())))
    for (name, tokens), color in zip(schedules.items(), (CONSTANT, SEARCHED), strict=False):
        axis.step(range(blocks + 1), [initial, *tokens], where="mid", color=color, linewidth=1.8, label=name)
        axis.plot(range(blocks + 1), [initial, *tokens], "o", color=color, markersize=4)
    axis.axhline(initial, color="black", linewidth=0.8, linestyle=":", label="dense")
    axis.set_xticks(range(blocks + 1), ["in", *map(str, range(blocks))])
    axis.set_xlabel("after so many blocks")
    axis.set_ylabel("tokens")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, Path(path))


def plot_heat(
    values: Sequence[Sequence[float]],
    rows: tuple[str, Sequence[Any]],
    columns: tuple[str, Sequence[Any]],
    path: str | Path,
    *,
    label: str = "",
) -> None:
    """Write a table of numbers (R, C), nan for missing, as a heat map; a small one shows its numbers.

    ``rows`` and ``columns`` are the name of an option and its values.
    """
    table = np.array(values, dtype=np.float64)
    size = (max(3.6, 1.6 + 0.62 * table.shape[1]), max(2.4, 1.2 + 0.42 * table.shape[0]))
    figure = sheet(min(size[0], 14.0), min(size[1], 12.0))
    axis = figure.subplots()
    picture = axis.imshow(table, aspect="auto", cmap="viridis")
    axis.set_xticks(range(table.shape[1]), [str(one) for one in columns[1]], rotation=45, ha="right", fontsize=8)
    axis.set_yticks(range(table.shape[0]), [str(one) for one in rows[1]], fontsize=8)
    axis.set_xlabel(columns[0])
    axis.set_ylabel(rows[0])
    if table.size <= 300:
        middle = (np.nanmin(table) + np.nanmax(table)) / 2
        for (row, column), value in np.ndenumerate(table):
            if np.isfinite(value):
                color = "white" if value < middle else "black"
                axis.text(column, row, f"{value:.4g}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(picture, label=label)
    save(figure, Path(path))
