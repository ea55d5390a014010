"""Figures: all are drawn, in the colours of their methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import vitrim
from made_tables import NAMES, tables
from vitrim.analysis.families.attention import draw_attention, draw_attention_maps
from vitrim.analysis.families.depth import draw_depth_pairs
from vitrim.analysis.families.patterns import draw_overlap
from vitrim.analysis.families.router import draw_router
from vitrim.analysis.families.tsne import draw_tsne
from vitrim.analysis.family import Tables, fullest
from vitrim.analysis.figures import Drawing, drawings, drawn, styles
from vitrim.core import registry
from vitrim.core.registry import methods
from vitrim.report import Table
from vitrim.style import COMPARED, ORDER, colours, encoded, markers

RECORDS = ("patterns", "depth", "counts", "features")


@pytest.fixture(scope="module")
def made() -> Tables:
    return tables()


def texts(figure: Any) -> Iterator[Any]:
    from matplotlib.text import Text

    return (text for text in figure.findobj(Text) if text.get_text() and text.get_visible())


@pytest.mark.slow
def test_every_figure_of_records_is_drawn_with_letters_that_can_be_read(made: Tables) -> None:
    found = [one for family in RECORDS for one in drawn(family, made)]
    assert {drawing.name for drawing, _ in found} == {one.name for family in RECORDS for one in drawings(family)}
    for drawing, figure in found:
        assert all(text.get_fontsize() >= 8 for text in texts(figure)), drawing.name
        assert f"{drawing.table}.csv" in drawing.alt(made)
        assert NAMES[0] in drawing.alt(made)


@pytest.mark.parametrize("drawing", [one for family in RECORDS for one in drawings(family)], ids=lambda one: one.name)
def test_a_method_has_one_colour_in_all_figures(made: Tables, drawing: Drawing) -> None:
    colour, _ = styles(made)
    assert len({colour[name] for name in NAMES}) == 2  # of two methods
    for axis in drawing.draw(made).axes:
        for line in axis.lines:
            if line.get_label() in NAMES:
                assert line.get_color() == colour[line.get_label()]


def test_a_method_has_the_same_colour_in_every_report() -> None:
    one, other = colours(["dense", "tome:r=4", "own", "topk"]), colours(["topk:keep_rate=0.5 on vit", "evit", "tome"])
    assert one["topk"] == other["topk:keep_rate=0.5 on vit"]
    assert one["tome:r=4"] == other["tome"]
    assert set(ORDER) <= set(methods())
    found = colours([*ORDER, "dense", "own"])
    assert len(set(found.values())) == len(found)


def in_lab(colour: str) -> np.ndarray:
    """A colour ``#rrggbb`` in CIE L*a*b*, under D65."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ linear / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_methods_that_are_often_compared_are_no_two_shades_of_one_colour() -> None:
    found = {name: in_lab(colour) for name, colour in colours([*COMPARED, "diffrate", "dense"]).items()}
    near = [(a, b) for a, b in combinations(found, 2) if np.linalg.norm(found[a] - found[b]) < 30]
    assert not near


def test_a_new_method_has_its_colour_without_being_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._METHODS, "norms", vitrim.TopK)
    assert colours(["norms", "unknown"])["norms"] == colours(["unknown", "norms"])["norms"]
    assert markers(["unknown", "norms"])["norms"] == markers(["norms"])["norms"]


@pytest.mark.slow
@pytest.mark.parametrize("draw", [draw_overlap, draw_depth_pairs])
def test_long_names_below_squares_are_whole(draw: Callable[[Tables], Any], made: Tables) -> None:
    long = {name: f"{name},blocks=[3,6,9]" for name in NAMES}
    table = made["overlap" if draw is draw_overlap else "depth_pairs"]
    renamed = [tuple(long.get(value, value) for value in row) for row in table.rows]
    figure = draw(Tables({table.name: replace(table, rows=renamed)}))
    encoded(figure)
    for text in texts(figure):
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.y1 <= figure.bbox.height, text


def test_blocks_that_most_rows_have_are_drawn() -> None:
    assert fullest([0, 0, 5, 5, 5, 1, 2], 3) == [0, 2, 5]


def test_pictures_over_the_image_need_arrays() -> None:
    images = np.random.default_rng(0).random((1, 4, 4, 3), dtype=np.float32)
    blocks, maps = np.array([1, 3]), np.arange(8.0).reshape(1, 2, 4)
    maps[0, 1, 0] = np.nan
    router = {"images": images, "topk/blocks": blocks, "topk/scores": maps, "topk/depth": np.arange(4.0)[None]}
    attention = {"images": images, "mctf/blocks": blocks, "mctf/given": maps, "mctf/precise": maps + 1}
    points = {"cropr/concat/points": np.eye(4)[:, :2], "cropr/concat/blocks": np.array([0, 0, 1, 1])}
    silhouettes = Table(
        "tsne", "", ("method", "fusion", "block", "silhouette_tokens"), [("cropr", "concat", "all", 0.25)]
    )
    numbers = Table("attention", "", ("method", "block", "mean_absolute", "kl_nats"), [("mctf", 1, 0.1, 0.2)])
    known = {"router": Table("router", "", ("method",), [("topk",)]), "tsne": silhouettes, "attention": numbers}
    made = Tables(known, {"router": router, "attention": attention, "tsne": points})
    shown = [axis for axis in draw_router(made).axes if axis.images]
    assert [axis.get_title() for axis in shown] == ["image", "block 1", "block 3", "depth"]
    pale = np.repeat(0.35 * images[0].mean(-1, keepdims=True) + 0.65, 3, -1)
    assert np.allclose(shown[2].images[0].get_array()[:2, :2], pale[:2, :2])
    assert len([axis for axis in draw_attention_maps(made).axes if axis.images]) == 1 + 3 * 2
    drawn = draw_tsne(made).axes[0]
    assert drawn.get_title() == "cropr, concat\nsilhouette 0.25"
    assert drawn.collections[0].get_array().tolist() == [0, 0, 1, 1]
    assert [draw(Tables(known)) for draw in (draw_router, draw_attention_maps, draw_tsne)] == [None, None, None]
    columns = ("method", "block", "mean_absolute", "mean_absolute_low", "mean_absolute_high")
    both = (*columns, "kl_nats", "kl_nats_low", "kl_nats_high")
    lines = draw_attention(
        Tables({"attention": Table("attention", "", both, [("mctf", 1, 2.0, 1, 3, 5.0, 4, 6)])})
    ).axes
    assert [axis.lines[0].get_ydata().tolist() for axis in lines] == [[2.0], [5.0]]
