"""Parts of charts: heat maps with their numbers, lines with bands, bounds and chance levels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.style import BOUND, CHANCE, COMPARED, ORDER, SMALL, TEXT, TITLE, colours, markers, panels, save

MISSING = "#d0d0d0"
WRITTEN = 9
"""Most rows of a heat map that shows its numbers."""
PAGE = 9.0
"""Inches of a page, without names and colour bars."""
LONG = 26
"""Most letters of a name on an axis."""


class Line(NamedTuple):
    """One line of a chart; missing numbers are None or nan.

    ``low`` and ``high`` end a band, ``least`` and ``most`` are bounds, ``chance`` is the level of random choices.
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    least: Sequence[float] | None = None
    most: Sequence[float] | None = None
    chance: Sequence[float] | None = None


def line(axis: Any, given: Line, *, colour: str, marker: str = "o", label: str = "") -> Any:
    """Draw a line with its band, bounds and chance level, and return its artist for a legend."""
    x, low, high = np.asarray(given.x), given.low, given.high
    if low is not None and high is not None and np.isfinite(_numbers(low)).any():
        axis.fill_between(x, _numbers(low), _numbers(high), color=colour, alpha=0.2, linewidth=0)
    for values, dashes in ((given.least, BOUND), (given.most, BOUND), (given.chance, CHANCE)):
        if values is not None and np.isfinite(_numbers(values)).any():
            axis.plot(x, _numbers(values), color=colour, linestyle=dashes, linewidth=1, alpha=0.9)
    (drawn,) = axis.plot(x, _numbers(given.y), color=colour, marker=marker, markersize=4, linewidth=1.5, label=label)
    return drawn


def heat(
    axis: Any,
    values: ArrayLike,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    limits: tuple[float, float] | None = None,
    cmap: str = "viridis",
) -> Any:
    """Draw a heat map of ``values`` (R, C), nan for missing, and return its image, for a colour bar.

    Args:
        rows, columns: names on the axes, empty for a map over an image.
        limits: limits of the colours; default: those of the values.
        cmap: viridis or cividis, whose lightness increases.
    """
    from matplotlib import colormaps

    grid = _numbers(values)
    shades = colormaps[cmap].with_extremes(bad=MISSING)
    low, high = limits or (float(np.nanmin(grid)), float(np.nanmax(grid)))
    image = axis.imshow(grid, cmap=shades, vmin=low, vmax=high, interpolation="nearest", aspect="equal")
    axis.spines[:].set_visible(False)
    axis.set_xticks(range(len(columns)), [short(name) for name in columns], rotation=90, fontsize=SMALL)
    axis.set_yticks(range(len(rows)), [short(name) for name in rows], fontsize=SMALL)
    axis.tick_params(length=0)
    if rows and len(rows) <= WRITTEN:
        middle = (low + high) / 2
        for (row, column), value in np.ndenumerate(grid):
            if np.isfinite(value):
                # Both colour maps end light, so black is legible above their middle.
                ink = "black" if value > middle else "white"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=SMALL, color=ink)
    return image


def square(names: Sequence[str], most: int) -> tuple[float, int]:
    """The side in inches of a heat map of all pairs of ``names``, and how many, up to ``most``, fit in a row."""
    # Cells with numbers need room for four digits, others only for a colour.
    side = max(1.5, (0.4 if len(names) <= WRITTEN else 0.17) * len(names))
    return side, max(1, min(most, int(PAGE // (side + 0.6))))


def colour_bar(figure: Any, image: Any, axes: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02, aspect=25)
    bar.set_label(label, fontsize=TEXT)
    bar.ax.tick_params(labelsize=SMALL)
    bar.outline.set_visible(False)


def short(name: str) -> str:
    """A name that fits on an axis, with its middle cut out if it is too long.

    Example:
        >>> short("atm:alpha=0.985,beta=0.045,theta_min=0.88")
        'atm:alpha=0.9…heta_min=0.88'
    """
    half = LONG // 2
    return name if len(name) <= LONG else f"{name[:half]}…{name[-half:]}"


def _numbers(values: ArrayLike) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


MANY = 6
"""Most methods that all have their own colours."""
HIGHLIGHTED = 5
PALE = "#c4c4c4"
"""Colour of the other methods' lines."""
FAINT = "#767676"
"""Colour of the other methods' names, legible on white."""


def highlighted(methods: Sequence[str]) -> list[str]:
    """The methods with their own colours in a figure: all of a few; of many, those that are often compared.

    Example:
        >>> highlighted(["l1", "l2", "tome", "gtp", "atm", "random", "topk", "mctf"])
        ['tome', 'topk', 'atm', 'mctf', 'random']
    """
    if len(methods) <= MANY:
        return list(methods)
    first = [*(name for name in COMPARED if name in methods), *(name for name in ORDER if name in methods), *methods]
    return list(dict.fromkeys(first))[:HIGHLIGHTED]


def label_ends(axis: Any, ends: Sequence[tuple[str, float, float, str, bool]]) -> None:
    """Write the name of every line beside its left end, in one column without overlaps.

    ``ends``: name, x and y of the end, colour, and True for a bold name, when the axis has all its lines and limits.
    """
    from sklearn.isotonic import isotonic_regression

    low, high = axis.get_ylim()
    left, right = axis.get_xlim()
    gap = (high - low) * 0.15 / (axis.figure.get_figheight() * 0.82)  # height of a text line in units of the axis
    order = sorted(ends, key=lambda end: end[2])
    # Ascending places less their rank must not fall: a regression that keeps the order, nearest in squares.
    steps = gap * np.arange(len(order))
    # the positions nearest to the ends that are at least a text line apart
    places = isotonic_regression(np.array([end[2] for end in order]) - steps, y_min=low, y_max=high - steps[-1]) + steps
    column = min(end[1] for end in ends) - 0.03 * (right - left)
    for (name, x, y, colour, bold), place in zip(order, places, strict=True):
        axis.plot([column + 0.005 * (right - left), x], [place, y], color=PALE, linewidth=0.6, zorder=0)
        weight = "bold" if bold else "normal"
        axis.text(column, place, name, color=colour, fontsize=SMALL, weight=weight, ha="right", va="center")
    axis.set_xlim(column - 0.13 * (right - left), right)
    axis.set_ylim(low, high)


def plot_accuracy_over_macs(
    points: Sequence[tuple[str, float, float]],
    dense: tuple[float, float],
    path: str | Path,
    *,
    title: str = "",
    dashed: Collection[str] = (),
) -> None:
    """Write accuracy over MACs, one line per method with its name beside it, the dense model as a star.

    Of more than six methods, five have their own colours and the others are grey. ``points`` are (method, gmacs,
    accuracy in [0, 1]), ``dense`` gmacs and accuracy; lines join the settings of a method.
    """
    base, accuracy = dense
    methods = list(dict.fromkeys(method for method, _, _ in points))
    figure, (axis,) = panels(1, across=1, size=(8.4, 5.6) if len(methods) > MANY else (6.4, 4.0), above=0.0)
    shades, shapes, shown = colours(methods), markers(methods), highlighted(methods)
    ends: list[tuple[str, float, float, str, bool]] = []
    for method in methods:
        own = sorted((100 * gmacs / base, 100 * value) for name, gmacs, value in points if name == method)
        share, values = zip(*own, strict=True)
        bold = method in shown
        axis.plot(
            share,
            values,
            label=method,
            color=shades[method] if bold else PALE,
            marker=shapes[method],
            markersize=6 if bold else 3,
            linestyle="--" if method in dashed else "-",
            linewidth=1.8 if bold else 1.0,
            zorder=3 if bold else 1,
        )
        ends.append((method, *own[0], shades[method] if bold else FAINT, bold))
    axis.plot([100], [100 * accuracy], marker="*", markersize=14, color="black", linestyle="none", label="dense")
    axis.annotate("dense", (100, 100 * accuracy), (0, -14), textcoords="offset points", ha="center", fontsize=SMALL)
    axis.axhline(100 * accuracy, color="black", linewidth=0.7, linestyle=":")
    axis.set_xlabel("MACs, % of the dense model", fontsize=TEXT)
    axis.set_ylabel("top-1 accuracy, %", fontsize=TEXT)
    axis.set_title(title, fontsize=TITLE)
    axis.grid(alpha=0.3)
    label_ends(axis, ends)
    save(figure, Path(path))
