"""Cells that repeat a neighbour: the paper's worked examples, and the walk in plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitrim.core.repeats import Distance, RepeatOptions


def kept(cells: Tensor, **options: object) -> list[list[int]]:
    return RepeatOptions(**options).kept_cells(cells).nonzero().tolist()  # type: ignore[no-any-return]


def of(*rows: str) -> Tensor:
    return torch.tensor([[float(value) for value in row.split()] for row in rows])[:, :, None]


A = of("1 1 1 1 1 1", "1 1 1 1 1 1", "1 1 5 5 5 1", "1 1 5 5 5 1", "1 1 1 1 1 1")
B = of("0 1 2 3", "0 1 2 3", "4 5 6 7") / 8


def test_an_edge_that_runs_downwards_is_predicted_from_above() -> None:
    assert kept(A, tau=0) == [[0, 0], [2, 2], [2, 5], [4, 2]]
    assert kept(A) == [[0, 0], [2, 2], [2, 5], [4, 2]]


@pytest.mark.parametrize("distance", ["max", "mae", "rmse"])
def test_a_ramp_is_kept_in_steps_or_slides(distance: str) -> None:
    assert kept(B, tau=0.125, distance=distance) == [[0, 0], [0, 2], [2, 0], [2, 2]]
    assert kept(B, tau=0.125, distance=distance, anchored=False) == [[0, 0], [2, 0]]
    every = [[row, column] for row in (0, 2) for column in range(4)]
    assert kept(B, distance=distance) == every


def test_a_flat_image_keeps_a_cell_and_a_chequerboard_all() -> None:
    board = (torch.arange(5)[:, None] + torch.arange(7)) % 2
    for tau in (0, 0.1):
        assert kept(torch.full((5, 7, 3), 0.3), tau=tau) == [[0, 0]]
        assert kept(torch.full((1, 1, 3), 0.3), tau=tau) == [[0, 0]]
        assert len(kept(board.float()[:, :, None], tau=tau)) == 35


def walk(cells: Tensor, tau: float, distance: Distance, anchored: bool) -> tuple[list[list[int]], list[list[Tensor]]]:
    """The steps of the paper's code as our notes tell them, cell by cell; and what each is shown with."""

    def alike(first: Tensor, second: Tensor) -> bool:
        apart = (first - second).abs().tolist()
        far = {
            "max": max(apart),
            "mae": sum(apart) / len(apart),
            "rmse": (sum(own**2 for own in apart) / len(apart)) ** 0.5,
        }
        return far[distance] <= tau

    found: list[list[int]] = []
    shown = [list(row) for row in cells]
    for r in range(cells.shape[0]):
        for c in range(cells.shape[1]):
            at = shown if anchored else cells
            if r == c == 0:
                found.append([r, c])
                continue
            if r == 0:
                prediction = at[r][c - 1]
            elif c == 0:
                prediction = at[r - 1][c]
            else:
                left, above, corner = at[r][c - 1], at[r - 1][c], at[r - 1][c - 1]
                prediction = above if alike(corner, left) and not alike(corner, above) else left
            if alike(cells[r][c], prediction):
                shown[r][c] = prediction
            else:
                found.append([r, c])
    return found, shown


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("distance", ["max", "mae", "rmse"])
@pytest.mark.parametrize("tau", [0.0, 0.26, 0.51])
@pytest.mark.parametrize(("rows", "columns"), [(6, 5), (1, 9), (7, 1), (2, 8)])
def test_the_walk_is_that_of_plain_loops(
    rows: int, columns: int, tau: float, distance: Distance, anchored: bool
) -> None:
    """On quarters, so that equal distances are equal in every order; half of the values repeat."""
    own = torch.Generator().manual_seed(0)
    images = torch.randint(3, (4, 2, rows, columns, 2), generator=own).double() / 4
    found = RepeatOptions(tau=tau, distance=distance, anchored=anchored).kept_cells(images)
    assert found.shape == (4, 2, rows, columns)
    for cells, own_kept in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        expected, shown = walk(cells, tau, distance, anchored)
        assert own_kept.nonzero().tolist() == expected
        if anchored and distance == "max":
            assert (
                max(float((cells[r][c] - shown[r][c]).abs().max()) for r in range(rows) for c in range(columns)) <= tau
            )
