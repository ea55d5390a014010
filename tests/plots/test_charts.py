"""Heat maps and lines: numbers stand in their cells and can be read, bands lie between their ends."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from vitrim.plots.charts import Line, heat, line


def test_numbers_stand_in_their_cells_and_can_be_read() -> None:
    axis = Figure().subplots()
    heat(axis, [[0.0, None, 1.0], [2.0, 3.0, 4.0]], rows=["a", "b"], columns=["x", "y", "z"], digits=1)
    assert [(text.get_position(), text.get_text(), text.get_color()) for text in axis.texts] == [
        ((0, 0), "0.0", "white"),  # viridis is dark where it is low
        ((2, 0), "1.0", "white"),
        ((0, 1), "2.0", "white"),
        ((1, 1), "3.0", "black"),
        ((2, 1), "4.0", "black"),
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
