from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vitrim.errors import VitrimError
from vitrim.plots.dense import COLOURS, SLIDE, Column, above, compare, draw_boxes, draw_mask, legend, palette

SIGHTS = (
    ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)
"""Normal, protanopic, deuteranopic, tritanopic: matrices on linear RGB (Machado, Oliveira, Fernandes 2009)."""


def lab(colour: tuple[int, ...], sight: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIELAB of an sRGB colour as somebody sees it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour)]
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in sight]
    to_xyz = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) for row in to_xyz]
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (xyz[0] / 0.95047, xyz[1], xyz[2] / 1.08883)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize(("count", "apart"), [(11, 24), (24, 14)])
def test_colours_can_be_told_apart_by_everyone(count: int, apart: float) -> None:
    for sight in SIGHTS:
        seen = [lab(colour, sight) for colour in COLOURS[:count]]
        assert min(math.dist(a, b) for i, a in enumerate(seen) for b in seen[:i]) > apart


def test_a_class_has_the_same_colour_whatever_the_others() -> None:
    assert len(COLOURS) == 24
    assert np.array_equal(palette(150)[:11], palette(11))
    assert len(np.unique(palette(72).round(3), axis=0)) == 72
    assert palette(72).min() >= 0
    assert palette(72).max() <= 1
    assert np.array_equal(palette(73)[72], palette(1)[0])


def test_a_mask_is_blended_and_ignored_pixels_stay() -> None:
    image = np.full((2, 3), 0.5)
    classes = np.array([[0, 1, 255], [1, 1, 0]], dtype=np.uint8)
    colours = np.array([[1.0, 0, 0], [0, 0, 1.0]])
    drawn = draw_mask(image, classes, colours)
    assert drawn.dtype == np.float32
    red, blue, grey = (0.825, 0.175, 0.175), (0.175, 0.175, 0.825), (0.5, 0.5, 0.5)
    assert np.allclose(drawn, [[red, blue, grey], [blue, blue, red]])
    assert np.array_equal(image, np.full((2, 3), 0.5))  # the input is as it was


def test_masks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(VitrimError, match=r"classes of shape \(2, 2\) do not fit an image of 2 x 3"):
        draw_mask(np.zeros((2, 3)), np.zeros((2, 2), int), palette(2))
    with pytest.raises(VitrimError, match="class 2 has no colour; there are 2, for 0 to 1"):
        draw_mask(np.zeros((1, 2)), np.array([[0, 2]]), palette(2))
    with pytest.raises(VitrimError, match=r"an image is \(H, W, 3\) or \(H, W\), not \(3, 4, 5\)"):
        draw_mask(np.zeros((3, 4, 5)), np.zeros((3, 4), int), palette(2))


def test_a_box_is_drawn_where_it_was_given() -> None:
    objects = {"boxes": torch.tensor([[4.0, 6, 20, 16]]), "labels": torch.tensor([1])}
    drawn = draw_boxes(np.zeros((24, 32, 3), np.float32), objects)
    expected = np.zeros((24, 32), bool)
    expected[[6, 16], 4:21] = True
    expected[6:17, [4, 20]] = True
    assert np.array_equal(drawn.any(axis=-1), expected)
    assert np.allclose(drawn[expected], palette(2)[1], atol=1 / 255)


def test_boxes_and_masks_follow_the_scale() -> None:
    masks = torch.zeros(1, 6, 8)
    masks[0, 2:4, 2:6] = 0.9
    objects = {"boxes": torch.tensor([[2.0, 2, 6, 4]]), "labels": torch.tensor([0]), "masks": masks}
    drawn = draw_boxes(np.zeros((6, 8)), objects, scale=4)
    assert drawn.shape == (24, 32, 3)
    assert np.allclose(drawn[9:16, 9:24], palette(1)[0] / 2, atol=1 / 255)  # the mask
    assert np.allclose(drawn[8, 8:24], palette(1)[0], atol=1 / 255)  # the line around it
    assert not drawn[:8].any()
    assert not drawn[18:].any()


def test_scores_are_written_beside_the_boxes_that_are_sure() -> None:
    objects = {"boxes": torch.tensor([[20.0, 20, 180, 120]]), "labels": torch.tensor([0])}
    image = np.zeros((150, 200))
    plain = draw_boxes(image, objects)  # the truth: nothing to write
    scored, unsure = (draw_boxes(image, {**objects, "scores": torch.tensor([score])}) for score in (0.75, 0.1))
    inside = (slice(24, 100), slice(24, 150))
    written = [int(picture[inside].any(axis=-1).sum()) for picture in (plain, scored, unsure)]
    assert (written[0], written[2]) == (0, 0)
    assert written[1] > 0
    assert not unsure.any()


def test_objects_that_cannot_be_drawn_are_refused() -> None:
    objects = {"boxes": torch.tensor([[2.0, 2, 6, 4]]), "labels": torch.tensor([3])}
    with pytest.raises(VitrimError, match="masks of 6 x 6 do not fit an image of 6 x 8"):
        draw_boxes(np.zeros((6, 8)), {**objects, "masks": torch.ones(1, 6, 6)})


def test_no_objects_leave_the_image() -> None:
    image = np.random.default_rng(0).random((6, 8, 3)).astype(np.float32)
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
    assert np.array_equal(draw_boxes(image, nothing), image)
    assert above(nothing, 0.5)["labels"].shape == (0,)


def test_the_legend_has_the_classes_that_occur() -> None:
    found = legend([np.array([[3, 255]]), torch.tensor([1, 3])], palette(4), ["a", "b", "c", "d"])
    assert [name for name, _ in found] == ["b", "d"]
    assert np.allclose([colour for _, colour in found], palette(4)[[1, 3]])
    assert [name for name, _ in legend([np.array([2])], palette(4))] == ["2"]


@pytest.mark.parametrize("size", [(30, 40), (40, 20)])  # limited by the width of a slide, and by its height
@pytest.mark.parametrize("truth", [True, False])
def test_a_comparison_has_what_it_was_given(truth: bool, size: tuple[int, int]) -> None:
    image, picture, kept = (np.full((*size, 3), value, np.float32) for value in (0.1, 0.2, 0.3))
    columns = [Column("dense", picture), Column("tome:r=2", picture, kept, "70% of the MACs")]
    classes = [("sky", (0.0, 0.0, 1.0)), ("tree", (0.0, 1.0, 0.0))]
    figure = compare(image, columns, truth=picture if truth else None, classes=classes, title="a title")
    shown = {axis.get_title(): axis.images[0].get_array() for axis in figure.axes if axis.images}
    titles = {"image": 0.1, "dense": 0.2, "tome:r=2\n70% of the MACs": 0.2, "tokens kept": 0.3}
    titles |= {"truth": 0.2} if truth else {}
    assert {title: round(float(value[0, 0, 0]), 3) for title, value in shown.items()} == titles
    (box,) = [axis.get_legend() for axis in figure.axes if axis.get_legend()]
    assert [text.get_text() for text in box.get_texts()] == ["sky", "tree"]
    width, height = figure.get_size_inches()
    assert width <= SLIDE[0] + 1e-6
    assert height <= SLIDE[1] + 1e-6


def test_one_row_has_its_legend_below(tmp_path) -> None:
    picture = np.zeros((6, 8, 3), np.float32)
    figure = compare(picture, [Column("dense", picture)], classes=[("sky", (0.0, 0.0, 1.0))])
    assert len(figure.axes) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sky"]
    figure.savefig(tmp_path / "one.svg")
    assert "<!-- sky -->" in (tmp_path / "one.svg").read_text()


def test_a_comparison_of_nothing_is_refused() -> None:
    with pytest.raises(VitrimError, match="at least one column"):
        compare(np.zeros((6, 8)), [])


def test_objects_of_just_the_least_score_are_shown() -> None:
    objects = {"labels": torch.tensor([0, 1, 2]), "scores": torch.tensor([0.5, 0.25, 0.75])}
    assert {name: value.tolist() for name, value in above(objects, 0.5).items()} == {
        "labels": [0, 2],
        "scores": [0.5, 0.75],
    }
