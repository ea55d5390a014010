"""Heat maps and lines: numbers stand in their cells and can be read, bands lie between their ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from vitrim.plots.charts import MANY, PALE, Line, heat, line, plot_accuracy_over_macs


def test_numbers_stand_in_their_cells_and_can_be_read() -> None:
    axis = Figure().subplots()
    heat(axis, [[0.0, None, 1.0], [2.0, 3.0, 4.0]], rows=["a", "b"], columns=["x", "y", "z"])
    assert [(text.get_position(), text.get_text(), text.get_color()) for text in axis.texts] == [
        ((0, 0), "0.00", "white"),  # viridis is dark where it is low
        ((2, 0), "1.00", "white"),
        ((0, 1), "2.00", "white"),
        ((1, 1), "3.00", "black"),
        ((2, 1), "4.00", "black"),
    ]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["x", "y", "z"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
    assert axis.images[0].get_clim() == (0, 4)


def test_a_line_has_its_band_its_bound_and_its_chance() -> None:
    axis = Figure().subplots()
    drawn = line(
        axis, Line([1, 3], [0.5, None], [0.4, 0.3], [0.6, 0.7], [0.2, 0.1], [0.0, 0.0]), colour="C1", label="a"
    )
    assert (drawn.get_label(), list(drawn.get_xdata())) == ("a", [1, 3])
    assert np.array_equal(drawn.get_ydata(), [0.5, np.nan], equal_nan=True)
    corners = axis.collections[0].get_paths()[0].vertices.tolist()
    assert {(1.0, 0.4), (3.0, 0.3), (1.0, 0.6), (3.0, 0.7)} <= {tuple(corner) for corner in corners}
    assert [list(each.get_ydata()) for each in axis.lines[:2]] == [[0.2, 0.1], [0.0, 0.0]]
    assert [each.is_dashed() for each in axis.lines] == [True, True, False]


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
    assert (axis.get_title(), axis.get_legend()) == ("of x", None)
    assert {text.get_text() for text in axis.texts} == {"a", "b", "dense"}


def test_of_many_methods_five_have_their_colours_and_all_their_names(written: list[Any]) -> None:
    methods = ["l1", "l2", "linf", "gtp", "tome", "atm", "topk", "random", "mctf"]
    assert len(methods) > MANY
    points = [(name, share, 0.5) for name in methods for share in (1.0, 1.5)]
    plot_accuracy_over_macs(points, (2.0, 0.6), "x.png")
    (axis,) = written[0].axes
    grey = [line.get_label() for line in axis.lines if line.get_color() == PALE and line.get_label() in methods]
    assert grey == ["l1", "l2", "linf", "gtp"]
    names = {text.get_text(): text for text in axis.texts if text.get_text() != "dense"}
    assert set(names) == set(methods)
    # all end at one point, and still no two names lie over each other
    written[0].canvas.draw()
    boxes = sorted((text.get_window_extent() for text in names.values()), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))
    inside = axis.get_window_extent()
    assert all(inside.x0 <= box.x0 and inside.y0 - 9 <= box.y0 and box.y1 <= inside.y1 + 9 for box in boxes)


@pytest.mark.parametrize("methods", ["ab", "abcdefghijkl"])
def test_tradeoff_is_written(methods: str, tmp_path) -> None:
    path = tmp_path / "tradeoff.svg"
    points = [(name, share, share) for name in methods for share in (0.5, 0.7)]
    plot_accuracy_over_macs(points, (1.0, 0.97), path, title="a title", dashed="b")
    drawn = path.read_text()
    assert all(f"<!-- {text} -->" in drawn for text in (*methods, "dense", "a title"))
    assert "stroke-dasharray" in drawn.partition("<!-- dense -->")[0]  # the line of b
