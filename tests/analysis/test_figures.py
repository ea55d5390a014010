"""Figures, by the data behind their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import vitrim
from made_tables import BLOCKS, NAMES, tables
from vitrim.analysis.families.attention import draw_attention, draw_attention_maps
from vitrim.analysis.families.counts import draw_removed, draw_share_of_bound, draw_tokens
from vitrim.analysis.families.depth import draw_depth_maps, draw_depth_pairs
from vitrim.analysis.families.features import draw_features, draw_proxy, draw_proxy_anchors
from vitrim.analysis.families.loss import draw_class_tokens, draw_loss_alone, draw_merging_error
from vitrim.analysis.families.patterns import draw_homogeneity, draw_overlap, draw_overlap_blocks, draw_overlap_rates
from vitrim.analysis.families.router import draw_router
from vitrim.analysis.families.sensitivity import draw_batch_sizes
from vitrim.analysis.families.throughput import draw_throughput
from vitrim.analysis.families.tsne import draw_tsne
from vitrim.analysis.family import Drawing, Tables, drawings, fullest, pictures, styles
from vitrim.core import registry
from vitrim.core.registry import methods
from vitrim.plots.style import ORDER, colours, encoded, markers
from vitrim.report import Table

RECORDS = ("patterns", "depth", "counts", "features")


@pytest.fixture(scope="module")
def made() -> Tables:
    return tables()


def rows(made: Tables, table: str, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in made[table].records() if all(row[key] == value for key, value in wanted.items())]


def images(figure: Any) -> list[Any]:
    return [axis.images[0].get_array().filled(np.nan) for axis in figure.axes if axis.images]


def texts(figure: Any) -> Iterator[Any]:
    from matplotlib.text import Text

    return (text for text in figure.findobj(Text) if text.get_text() and text.get_visible())


def test_every_figure_of_records_is_drawn_with_letters_that_can_be_read(made: Tables) -> None:
    drawn = [picture for family in RECORDS for picture in pictures(family, made)]
    assert {picture.drawing.name for picture in drawn} == {one.name for family in RECORDS for one in drawings(family)}
    for picture in drawn:
        assert all(text.get_fontsize() >= 8 for text in texts(picture.figure)), picture.drawing.name
        assert f"{picture.drawing.table}.csv" in picture.alt
        assert NAMES[0] in picture.alt


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


def test_a_new_method_has_its_colour_without_being_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._METHODS, "norms", vitrim.TopK)
    assert colours(["norms", "unknown"])["norms"] == colours(["unknown", "norms"])["norms"]
    assert markers(["unknown", "norms"])["norms"] == markers(["norms"])["norms"]


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


def test_overlap_is_one_map_per_stage(made: Tables) -> None:
    maps = images(draw_overlap(made))
    assert len(maps) == len(BLOCKS)
    for grid, block in zip(maps, BLOCKS, strict=True):
        assert np.diag(grid).tolist() == [1, 1, 1]
        [row] = rows(made, "overlap", method_a=NAMES[0], method_b=NAMES[2], block=block)
        assert grid[0, 2] == grid[2, 0] == row["iou"]


def test_homogeneity_turned_round_is_completeness(made: Tables) -> None:
    [row] = rows(made, "clusters", method_a=NAMES[0], method_b=NAMES[1], block=BLOCKS[0])
    grid = images(draw_homogeneity(made))[0]
    assert (grid[0, 1], grid[1, 0]) == (row["homogeneity"], row["completeness"])


def test_lines_over_blocks_have_their_bounds_dashed(made: Tables) -> None:
    first = draw_overlap_blocks(made).axes[0]
    line = next(line for line in first.lines if line.get_label() == NAMES[1])
    found = rows(made, "overlap", method_a=NAMES[0], method_b=NAMES[1])
    assert line.get_ydata().tolist() == [row["iou"] for row in found]
    dashed = [tuple(one.get_ydata()) for one in first.lines if one.get_linestyle() == "--"]
    assert tuple(row["iou_least"] for row in found) in dashed
    assert first.collections  # the interval


def test_lines_over_rates_are_of_one_method(made: Tables) -> None:
    figure = draw_overlap_rates(made)
    assert [axis.get_title() for axis in figure.axes] == [
        "IoA, block 1",
        "IoA, block 3",
        "IoU, block 1",
        "IoU, block 3",
    ]
    [row] = rows(made, "overlap", method_a=NAMES[0], method_b=NAMES[1], block=1)
    shown = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in shown] == [
        ([row["kept_b"]], [row["ioa"]])
    ]
    one_each = [row for row in made["overlap"].rows if NAMES[2] in row]
    table = made["overlap"]
    assert draw_overlap_rates(Tables({"overlap": Table("overlap", "", table.columns, one_each)})) is None


def test_maps_of_depth_share_one_scale_per_row(made: Tables) -> None:
    figure = draw_depth_maps(made)
    drawn = [axis.images[0] for axis in figure.axes if axis.images]
    means, deviations = drawn[: len(NAMES)], drawn[len(NAMES) :]
    assert {image.get_clim() for image in means} == {(0.0, 3.0)}
    assert {image.get_clim() for image in deviations} == {(0.0, 0.5)}
    assert means[0].get_array().tolist() == [[0, 1, 2], [1, 2, 3]]


def test_maps_of_pairs_know_which_measures_are_distances(made: Tables) -> None:
    figure = draw_depth_pairs(made)
    diagonals = {axis.get_title(): np.diag(axis.images[0].get_array())[0] for axis in figure.axes if axis.images}
    assert diagonals == {"PCC": 1, "SCC": 1, "SIM": 1, "KL, bits": 0, "JS, bits": 0, "EMD, patches": 0}
    [row] = rows(made, "depth_pairs", method_a=NAMES[0], method_b=NAMES[1])
    divergence = next(grid for grid, axis in zip(images(figure), figure.axes, strict=False) if "KL" in axis.get_title())
    assert (divergence[0, 1], divergence[1, 0]) == (row["kl_bits_ab"], row["kl_bits_ba"])


def test_tokens_removed_and_the_bound(made: Tables) -> None:
    tokens = draw_tokens(made).axes[0]
    line = next(line for line in tokens.lines if line.get_label() == NAMES[0])
    assert line.get_ydata().tolist() == [row["tokens"] for row in rows(made, "counts", method=NAMES[0])]
    bars = draw_removed(made).axes[1].patches
    assert [bar.get_height() for bar in bars] == [row["removed"] for row in rows(made, "counts", method=NAMES[0])]
    shares = draw_share_of_bound(made).axes[0].lines
    assert [line.get_label() for line in shares] == [NAMES[2]]
    assert shares[0].get_ydata()[0] == rows(made, "counts", method=NAMES[2])[0]["tokens"] / 17


def test_thresholds_are_a_line_over_the_bars(made: Tables) -> None:
    counts = made["counts"]
    with_thresholds = [(*row[:-1], 0.9 - 0.1 * row[1]) if row[0] == NAMES[2] else row for row in counts.rows]
    figure = draw_removed(Tables({"counts": Table("counts", "", counts.columns, with_thresholds)}))
    [line] = [line for axis in figure.axes for line in axis.lines]
    assert line.get_ydata().tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])


def test_features_and_what_they_tell(made: Tables) -> None:
    first = draw_features(made).axes[0]
    line = next(line for line in first.lines if line.get_label() == NAMES[0])
    found = rows(made, "features", method_a="dense", method_b=NAMES[0])
    assert line.get_ydata().tolist() == [row["procrustes"] for row in found]
    proxy = draw_proxy(made).axes[0]
    points = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in proxy.lines}
    heads = rows(made, "features", block="head")
    assert points == {(row["procrustes"], 100 * row["difference"]) for row in heads}
    [row] = rows(made, "proxy", measure="procrustes")
    assert f"{row['spearman']:.2f} [{row['spearman_low']:.2f}, {row['spearman_high']:.2f}]" in proxy.get_title()
    assert f"{row['kendall']:.2f}, n = 6" in proxy.get_title()


def test_differences_to_an_anchor_have_a_sign(made: Tables) -> None:
    axis = draw_proxy_anchors(made).axes[0]  # of the first name, which is second in the pair with the dense model
    [pair] = rows(made, "features", method_a="dense", method_b=NAMES[0], block="head")
    point = next(line for line in axis.lines if line.get_label() == "dense")
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (pair["procrustes"], -100 * pair["signed"])


def test_blocks_that_most_rows_have_are_drawn() -> None:
    assert fullest([0, 0, 5, 5, 5, 1, 2], 3) == [0, 2, 5]


# ---- families that run the model -------------------------------------------------------------------------------------


def test_losses_block_by_block() -> None:
    columns = ("method", "block", "images", "cosine", "cosine_std", "cosine_low", "cosine_high")
    made = [("tome", block, 40, 1 - 0.1 * block, 0.1, 0.5, 1.0) for block in range(3)]
    figure = draw_class_tokens(Tables({"class_tokens": Table("class_tokens", "", columns, made)}))
    assert figure.axes[0].lines[0].get_ydata().tolist() == pytest.approx([1.0, 0.9, 0.8])
    columns = ("method", "setting", "value", "block", "cosine_distance", "kl_nats")
    made = [("tome", "r", value, block, value * block, 1.0) for value in (1, 3) for block in range(3)]
    axis = draw_loss_alone(Tables({"loss_alone": Table("loss_alone", "", columns, made)})).axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [[0, 1, 2], [0, 3, 6]]
    assert [bar.get_height() for bar in axis.patches] == [0, 2, 4]
    columns = ("method", "block", "error", "error_low", "error_high", "error_least", "error_most")
    made = [("tome", block, 2.0, 1.9, 2.1, 1.0, 3.0) for block in range(2)]
    lines = draw_merging_error(Tables({"merging_error": Table("merging_error", "", columns, made)})).axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == [2.0, 1.0, 3.0]


def test_sensitivity_and_speed() -> None:
    columns = ("method", "batch_size", "images", "top1", "agreement", "gmacs")
    made = [("atm", 2**power, 8, 0.1 * power, 1.0, 2.0) for power in range(3)]
    figure = draw_batch_sizes(Tables({"batch_sizes": Table("batch_sizes", "", columns, made)}))
    assert [axis.get_title() for axis in figure.axes] == ["top1", "agreement", "GMACs"]
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 2, 4]
    columns = ("method", "size", "precision", "kernel", "tokens", "images_per_second", "speedup")
    one = [("dense", 32, "fp32", "fused", "M", 10.0, 1.0), ("tome", 32, "fp32", "fused", "M", 15.0, 1.5)]
    one.append(("tome", 32, "fp32", "fused", "aligned", 16.0, 1.6))
    bars = draw_throughput(Tables({"throughput": Table("throughput", "", columns, one)})).axes[0]
    assert [bar.get_height() for bar in bars.patches] == [10, 15, 16]
    assert [text.get_text() for text in bars.texts] == ["1.00", "1.50", "1.60"]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["M", "M", "x 8"]
    two = [*one, ("tome", 64, "fp32", "fused", "M", 8.0, 2.0), ("dense", 64, "fp32", "fused", "M", 4.0, 1.0)]
    axis = draw_throughput(Tables({"throughput": Table("throughput", "", columns, two)})).axes[0]
    assert [line.get_ydata().tolist() for line in axis.lines] == [[1, 1], [1.5, 2]]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["32 px\n10/s", "64 px\n4/s"]


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
