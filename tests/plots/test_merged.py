from __future__ import annotations

import numpy as np
import pytest

from vitrim.errors import VitrimError
from vitrim.plots.merged import OUTLINE_COLOUR, PRUNED_COLOUR, draw_groups
from vitrim.plots.tradeoff import plot_accuracy_over_macs


def test_groups_get_their_mean_and_pruned_patches_the_pruned_colour() -> None:
    image = np.zeros((4, 4), dtype=np.float32)
    image[:, 1] = 1.0
    source = np.array([1, 1, 2, -1] * 4)  # one group over the first two columns, one over the third, the last pruned
    drawn = draw_groups(image, source, (4, 4), scale=8)
    assert drawn.shape == (32, 32, 3)
    assert np.allclose(drawn[12, 8], 0.5)  # inside the first group: the mean of black and white
    assert np.allclose(drawn[12, 28], PRUNED_COLOUR)
    assert np.allclose(drawn[12, 15], OUTLINE_COLOUR)  # its right edge
    assert np.allclose(drawn[12, 20], 0.0)


def test_single_patches_show_the_image_itself() -> None:
    image = np.random.default_rng(0).random((4, 4, 3)).astype(np.float32)
    assert np.array_equal(draw_groups(image, np.arange(4), (2, 2)), image)


def test_a_grid_that_does_not_fit_is_refused() -> None:
    with pytest.raises(VitrimError, match="9 patches on a grid of 3 x 3 do not fit an image of 4 x 4"):
        draw_groups(np.zeros((4, 4), dtype=np.float32), np.zeros(9, dtype=np.int64), (3, 3))


@pytest.mark.parametrize("methods", ["ab", "abcdefghijkl"])  # the legend within the figure, and beside it
def test_tradeoff_is_written(methods: str, tmp_path) -> None:
    path = tmp_path / "tradeoff.svg"
    points = [(name, share, share) for name in methods for share in (0.5, 0.7)]
    plot_accuracy_over_macs(points, (1.0, 0.97), path, title="a title", dashed="b")
    drawn = path.read_text()
    assert all(f"<!-- {text} -->" in drawn for text in (*methods, "dense", "a title"))
    assert "stroke-dasharray: 5.92,2.56" in drawn  # the line of b
