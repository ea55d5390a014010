"""Pictures of a search: every point, step and cell lies where its numbers say."""

from __future__ import annotations

from typing import Any

from vitrim.plots.tuning import plot_front, plot_heat, plot_schedule


def numbers(line: Any) -> list[list[float]]:
    return [[float(value) for value in given] for given in (line.get_xdata(), line.get_ydata())]


def test_the_front_is_a_line_of_steps_to_the_dense_model(written: list[Any]) -> None:
    points = [("searched", 0.5, 0.2), ("constant", 0.75, 0.3), ("searched", 0.25, 0.4)]
    plot_front(points, "x.png", front=[(0.5, 0.2), (0.25, 0.4)], cost="latency", damage="output")
    (axis,) = written[0].axes
    lines = {line.get_label(): line for line in axis.lines}
    assert numbers(lines["front"]) == [[25, 50, 100], [0.4, 0.2, 0]]
    assert lines["front"].get_drawstyle() == "steps-post"
    assert numbers(lines["searched"]) == [[25, 50], [0.4, 0.2]]
    assert numbers(lines["constant"]) == [[75], [0.3]]
    assert numbers(lines["dense"]) == [[100], [0]]
    assert axis.get_xlabel() == "latency, % of the dense model"
    assert "output" in axis.get_ylabel()


def test_tokens_stand_after_their_block(written: list[Any]) -> None:
    plot_schedule({"constant": [12, 9, 5], "searched": [17, 17, 4]}, 17, "x.png")
    (axis,) = written[0].axes
    lines = {line.get_label(): line for line in axis.lines}
    assert numbers(lines["constant"]) == [[0, 1, 2, 3], [17, 12, 9, 5]]
    assert numbers(lines["searched"]) == [[0, 1, 2, 3], [17, 17, 17, 4]]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["in", "0", "1", "2"]
    assert numbers(lines["dense"])[1] == [17, 17]


def test_numbers_stand_in_their_cells_and_can_be_read(written: list[Any]) -> None:
    values = [[0.0, float("nan"), 1.0], [2.0, 3.0, 4.0]]
    plot_heat(values, ("r", [8, 16]), ("keep_rate", [0.1, 0.2, 0.3]), "x.png", label="damage")
    axis, bar = written[0].axes
    assert [(text.get_position(), text.get_text(), text.get_color()) for text in axis.texts] == [
        ((0, 0), "0", "white"),
        ((2, 0), "1", "white"),
        ((0, 1), "2", "black"),
        ((1, 1), "3", "black"),
        ((2, 1), "4", "black"),
    ]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["0.1", "0.2", "0.3"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["8", "16"]
    assert (axis.get_xlabel(), axis.get_ylabel(), bar.get_ylabel()) == ("keep_rate", "r", "damage")
