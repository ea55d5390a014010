"""The picture of `compare`: loss over time."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from vitrim import style
from vitrim.measure.evaluation_report import spelled
from vitrim.measure.speed_report import engine_of, ms_per_image, named, shows_only_cost
from vitrim.report import DENSE

LETTER = 0.085
"""Approximate width in inches of a letter in a legend."""
PALE = "#999999"
"""Colour of methods that only show vitrim's own overhead."""


def draw(rows: Sequence[Mapping[str, Any]], metric: str, title: str = "") -> Any:
    """A figure of loss in points over milliseconds per image, a panel per batch size: down and to the left is better.

    Dense models are stars; lines join the settings of a method, or the sizes of a setting. Error bars are quartiles of
    the speed-up, and standard errors of the loss.
    """
    names = [named(row) for row in rows]
    shades = {**style.colours(names), **{name: PALE for name in names if shows_only_cost(name)}}
    shapes = style.markers([named(row) for row in rows if row["method"] != DENSE])
    sizes = [speed["batch_size"] for speed in rows[0]["speeds"]]
    figure, axes, across = _sheet(names, len(sizes), title)
    for place, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        _stars(axis, [row for row in rows if row["method"] == DENSE], place)
        _dots(axis, rows, place, shades, shapes)
        axis.set_title(f"batch {size}", fontsize=style.TITLE)
        axis.set_xlabel("ms per image", fontsize=style.TEXT)
        axis.set_ylabel(f"loss of {spelled(metric)}, points", fontsize=style.TEXT)
        axis.grid(alpha=0.3)
    style.stars_and_dots(figure, shades, shapes, across=across)
    return figure


def _sheet(names: Sequence[str], panels: int, title: str) -> tuple[Any, list[Any], int]:
    """A figure with its title, its axes, and the columns of its legend: names are not shortened, so two if they fit."""
    columns, longest = min(panels, 2), max(map(len, names))
    # Two columns of the longest name, their markers and a gap, in inches.
    across = 2 if 2 * longest * LETTER + 1 <= 4.4 * columns else 1
    width = max(4.4, (longest * LETTER + 0.6) / columns)
    lines = textwrap.wrap(title, int(0.85 * width * columns / LETTER))
    above = 0.3 + 0.25 * len(lines) + 0.2 * -(-len(names) // across)
    figure, axes = style.panels(panels, across=2, size=(width, 3.6), above=above)
    figure.suptitle("\n".join(lines), fontsize=style.TITLE)
    return figure, axes, across


def _stars(axis: Any, dense: Sequence[Mapping[str, Any]], place: int) -> None:
    """Draw dense models at one batch size, and lines through the fastest."""
    times = [ms_per_image(row["speeds"][place]) for row in dense]
    axis.axhline(0.0, color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
    axis.axvline(min(times), color=style.DENSE_COLOUR, linewidth=0.7, linestyle=":")
    for row, time in zip(dense, times, strict=True):
        loss = 100 * row["loss"]
        axis.plot([time], [loss], marker="*", markersize=13, color=style.DENSE_COLOUR, linestyle="none", zorder=4)
        if len(dense) > 1:
            name = engine_of(row["speeds"][place])
            axis.annotate(name, (time, loss), xytext=(4, 6), textcoords="offset points", fontsize=style.SMALL)


def _dots(
    axis: Any, rows: Sequence[Mapping[str, Any]], place: int, shades: Mapping[str, str], shapes: Mapping[str, str]
) -> None:
    """Draw all but the stars at one batch size, with error bars, and join what belongs together."""
    points: dict[tuple[str, str | None, str], list[tuple[float, float]]] = {}
    for row in rows:
        name, speed, loss = named(row), row["speeds"][place], 100 * row["loss"]
        time = ms_per_image(speed)
        joined = row["method"].partition(" at ")[0] if "img_size" in row else style.method_of(name)
        points.setdefault((joined, row["engine"], row["precision"]), []).append((time, loss))
        if row["method"] == DENSE:
            continue
        # quartiles of the paired ratio, as time offsets from the median
        low, high = (time * (speed["speedup"] / speed[key] - 1) for key in ("speedup_q3", "speedup_q1"))
        axis.errorbar(
            [time], [loss], xerr=[[-low], [high]],
            yerr=None if row["loss_error"] is None else [100 * row["loss_error"]],
            color=shades[name], marker=shapes[name], markersize=6, linestyle="none", elinewidth=0.8, zorder=3,
        )  # fmt: skip
    for (name, *_), own in points.items():
        if len(own) > 1:
            # Sorted by time: settings of a method come in the order of the command line.
            axis.plot(*zip(*sorted(own), strict=True), color=style.colours([name])[name], linewidth=1.2)
