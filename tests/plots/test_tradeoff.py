"""Accuracy over MACs: every point lies where its numbers say."""

from __future__ import annotations

from typing import Any

from vitrim.plots.tradeoff import MANY, plot_accuracy_over_macs


def test_points_are_percentages_of_the_dense_model(written: list[Any]) -> None:
    points = [("a", 2.0, 0.5), ("b", 3.0, 0.55), ("a", 1.0, 0.4)]
    plot_accuracy_over_macs(points, (4.0, 0.6), "x.png", title="of x", dashed={"b"})
    (axis,) = written[0].axes
    lines = {line.get_label(): line for line in axis.lines}
    assert [list(lines["a"].get_xdata()), list(lines["a"].get_ydata())] == [[25, 50], [40, 50]]
    assert [list(lines["b"].get_xdata()), list(lines["b"].get_ydata())] == [[75], [55.00000000000001]]
    assert [list(lines["dense"].get_xdata()), list(lines["dense"].get_ydata())] == [[100], [60]]
    assert [lines[name].get_linestyle() for name in "ab"] == ["-", "--"]
    assert lines["a"].get_color() != lines["b"].get_color()
    assert (axis.get_title(), len(written[0].legends)) == ("of x", 0)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b", "dense"]


def test_the_legend_of_many_methods_stands_outside(written: list[Any]) -> None:
    plot_accuracy_over_macs([(str(number), 1.0, 0.5) for number in range(MANY + 1)], (2.0, 0.6), "x.png")
    assert written[0].axes[0].get_legend() is None
    assert len(written[0].legends[0].get_texts()) == MANY + 2
