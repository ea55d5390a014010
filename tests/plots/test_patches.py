"""Patches that were pruned or merged, over the image, by the pixels of the pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dense_models
import vitrim
from vitrim.errors import VitrimError
from vitrim.measure.contestants import contestants
from vitrim.measure.decisions import DecisionsProbe
from vitrim.measure.records import as_batches
from vitrim.measure.run import Measurement
from vitrim.plots.patches import (
    HATCH_GROUND,
    HATCH_LINE,
    OUTLINE_COLOUR,
    draw_kept,
    groups_of,
    sources_of,
)
from vitrim.tasks import make_task

GRID = (6, 6)
SIDE = 4
"""Patches, and pixels of a patch, of the tiny ViT."""


def hatched(picture: np.ndarray) -> np.ndarray:
    """The pixels that have one of the two greys of pruned patches."""
    return np.any([np.isclose(picture, grey).all(axis=-1) for grey in (HATCH_GROUND, HATCH_LINE)], axis=0)


def centres(picture: np.ndarray) -> np.ndarray:
    """The pixel in the middle of every patch, (P, 3) in raster order."""
    return picture[SIDE // 2 :: SIDE, SIDE // 2 :: SIDE].reshape(-1, 3)


@pytest.mark.parametrize("restore", ["end", "last_block", "zeros"])
def test_as_many_patches_are_hatched_as_were_pruned(restore: str) -> None:
    model = dense_models.segmenter("vit")
    reduction = vitrim.reduce_(model, f"topk:keep_rate=0.6,restore={restore}", record=True)
    images = torch.rand(2, 3, 24, 24)
    with torch.no_grad():
        model(images)
    for row in range(2):
        image = images[row].permute(1, 2, 0).numpy()
        drawn = draw_kept(image, sources_of(reduction.states, row), GRID)
        before, after = centres(image), centres(drawn)
        pruned = hatched(after)
        assert np.array_equal(after[~pruned], before[~pruned])
        fewest = min(state.num_patches for state in reduction.states)
        assert pruned.sum() == 36 - fewest > 0


def test_merged_groups_have_their_mean_and_an_outline() -> None:
    image = np.zeros((16, 32), dtype=np.float32)
    image[:, 8:16] = 1.0
    source = np.array([0, 0, 1, 2, 0, 0, 1, 3])  # 2 x 4 patches of 8: four in one group, two in another, two single
    drawn = draw_kept(image, source, (2, 4))
    assert np.allclose(drawn[4, 4], 0.5)
    assert np.allclose(drawn[8, 8], 0.5)  # no line within a group
    assert np.allclose(drawn[8, 15], OUTLINE_COLOUR)
    assert np.allclose(drawn[8, 16], OUTLINE_COLOUR)  # the other group has its own
    assert np.allclose(drawn[8, 24], 0)  # a single patch has none
    outlined = np.isclose(drawn, OUTLINE_COLOUR).all(axis=-1)
    assert outlined.sum() == (2 * 16 + 2 * 14) + (2 * 16 + 2 * 6)


def test_recorded_decisions_give_the_same_patches() -> None:
    """`Decisions` and the states of a reduction agree."""
    model = dense_models.segmenter("vit")
    task = make_task("segmentation", dense_models.CLASSES)
    models = contestants(model, ["topk:keep_rate=0.6"], task)
    images, targets = torch.rand(2, 3, 24, 24), torch.zeros(2, 24, 24, dtype=torch.int64)
    measurement = Measurement(models, [DecisionsProbe()], task)
    measurement.update(next(as_batches([(images, targets)])))
    (gauge,) = measurement.findings().gauges[1]
    decisions = gauge.decisions()
    reduction = models[1].reduction
    for row in range(2):
        recorded = decisions.source[row][:, decisions.header["num_prefix"] :]
        assert np.array_equal(recorded, sources_of(reduction.states[1:], row))


def test_what_came_back_was_pruned() -> None:
    assert groups_of(np.array([[0, 1, -1], [0, 0, 1]])).tolist() == [0, 0, -1]
    assert groups_of(np.array([2, -1])).tolist() == [2, -1]


@pytest.mark.parametrize("scale", [1, 3])
def test_a_grid_may_reach_beyond_the_image(scale: int) -> None:
    """Of an image of 10 x 12 pixels that was padded to patches of 4."""
    image = np.ones((10, 12), dtype=np.float32)
    drawn = draw_kept(image, np.where(np.arange(9) == 8, -1, np.arange(9)), (3, 3), covered=(12, 12), scale=scale)
    assert drawn.shape == (10 * scale, 12 * scale, 3)
    assert (drawn[..., 0] < 1).sum() == 2 * 4 * scale**2  # two of the four rows of the last patch
    assert (drawn[8 * scale :, 8 * scale :, 0] < 1).all()


def test_grids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(VitrimError, match="4 patches do not fill a grid of 3 x 2"):
        draw_kept(np.zeros((6, 6)), np.arange(4), (3, 2))
    with pytest.raises(VitrimError, match="a grid over 4 x 6 pixels does not cover an image of 6 x 6"):
        draw_kept(np.zeros((6, 6)), np.arange(6), (2, 3), covered=(4, 6))


def test_groups_get_their_mean_and_pruned_patches_a_hatch() -> None:
    image = np.zeros((4, 4), dtype=np.float32)
    image[:, 1] = 1.0
    source = np.array([1, 1, 2, -1] * 4)  # one group over the first two columns, one over the third, the last pruned
    drawn = draw_kept(image, source, (4, 4), scale=8)
    assert drawn.shape == (32, 32, 3)
    assert np.allclose(drawn[12, 8], 0.5)  # inside the first group: the mean of black and white
    assert hatched(drawn[:, 24:]).all()
    assert not np.allclose(drawn[:, 24:], HATCH_GROUND)  # there are lines
    assert not hatched(drawn[:, :24]).any()
    assert np.allclose(drawn[12, 15], OUTLINE_COLOUR)  # its right edge
    assert np.allclose(drawn[12, 20], 0.0)


def test_single_patches_show_the_image_itself() -> None:
    image = np.random.default_rng(0).random((4, 4, 3)).astype(np.float32)
    assert np.array_equal(draw_kept(image, np.arange(4), (2, 2)), image)
