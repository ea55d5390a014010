"""Plots of what a reduction costs against what it saves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from vitrim.plots.style import colours, markers, sheet

MANY = 8
"""Largest number of methods for which the legend stands inside the figure."""


def plot_accuracy_over_macs(
    points: Sequence[tuple[str, float, float]],
    dense: tuple[float, float],
    path: str | Path,
    *,
    title: str = "",
    dashed: Collection[str] = (),
) -> None:
    """Write accuracy over MACs, one line per method, the dense model as a star.

    Args:
        points: (method, gmacs, accuracy in [0, 1]) per setting; settings of one method are joined. The legend has the
            methods in this order, beside the figure where they are many.
        dense: gmacs and accuracy of the dense model.
        path: the file to write; its ending decides the format.
        title: line above the figure.
        dashed: methods whose lines are dashed, to tell kinds of methods apart.
    """
    base, accuracy = dense
    methods = list(dict.fromkeys(method for method, _, _ in points))
    many = len(methods) > MANY
    figure = sheet(*((8.4, 5.6) if many else (6.4, 4.0)))
    axis = figure.subplots()
    shades, shapes = colours(methods), markers(methods)
    for method in methods:
        own = sorted((100 * gmacs / base, 100 * value) for name, gmacs, value in points if name == method)
        share, values = zip(*own, strict=True)
        axis.plot(
            share,
            values,
            label=method,
            color=shades[method],
            marker=shapes[method],
            linestyle="--" if method in dashed else "-",
            linewidth=1.6,
        )
    axis.plot([100], [100 * accuracy], marker="*", markersize=14, color="black", linestyle="none", label="dense")
    axis.axhline(100 * accuracy, color="black", linewidth=0.7, linestyle=":")
    axis.set_xlabel("MACs, % of the dense model")
    axis.set_ylabel("top-1 accuracy, %")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    if many:
        figure.legend(fontsize=8, loc="outside right upper")
    else:
        axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)
