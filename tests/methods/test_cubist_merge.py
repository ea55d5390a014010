from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import golden_learned as learned
import golden_models as golden
import tiny
import vitrim
from vitrim.methods.cubist_merge import SmallerGrid, shortened


@golden.cases(
    [
        ("new/cubist_r22", {"rows": 2, "columns": 2, "block": 1}),
        ("new/cubist_p49_r12", {"rows": 1, "columns": 2, "block": 2}),
    ],
    "options",
)
def test_vectors(ref: golden.Reference, options: dict[str, int]) -> None:
    learned.check_dense(ref)
    model = golden.vit(ref)
    reduction = vitrim.reduce_(model, vitrim.CubistMerge(**options, overlap="last"), record=True)
    learned.check_outputs(ref, model, reduction)
    (block,) = learned.keys(ref, "place")
    ref.check(f"place/{block}", reduction.states[block + 1].source[:, 1:] - 1)
    learned.check_float32(ref, model)
    model = golden.vit(ref)
    vitrim.reduce_(model, vitrim.CubistMerge(**options))
    ref.check("logits_intended", learned.forward(model, golden.images(ref))[0])


def plain(line: Tensor, r: int, last: bool) -> tuple[Tensor, list[int]]:
    """One line (n, C) and where its tokens go, in plain lines."""
    n, alike = len(line), torch.cosine_similarity(line[1:], line[:-1], dim=1).tolist()
    choice = {}
    for t in range(1, n, 2):
        left, right = alike[t - 1], alike[t] if t + 1 < n else -2.0
        choice[t] = (left, t - 1) if left >= right else (right, t + 1)
    ranked = sorted(choice, key=lambda t: -choice[t][0])[:r]
    new = line.clone()
    turns = [*ranked[::2], *ranked[1::2]] if last else ranked
    for t in turns:
        to = choice[t][1]
        old = line[to] if last else new[to]
        new[to] = torch.where(line[t].abs() > old.abs(), line[t], old)
    stays = [t for t in range(n) if t not in ranked]
    return new[stays], [stays.index(choice[t][1] if t in ranked else t) for t in range(n)]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_lines_are_shortened_as_in_plain_lines(n: int, last: bool) -> None:
    x = torch.randn(40, n, 5, dtype=torch.float64)
    for r in range(n // 2 + 1):
        found = shortened(x, r, last)
        for line, tokens, target, kept in zip(x, *found[:1], found.target, found.kept, strict=True):
            expected, places = plain(line, r, last)
            assert torch.equal(tokens, expected)
            assert target.tolist() == places
            assert target[kept].tolist() == list(range(n - r))


def test_of_equally_alike_neighbours_the_left_one_is_joined() -> None:
    assert shortened(torch.ones(1, 5, 2), 2).target.tolist() == [[0, 0, 1, 1, 2]]


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (0, 2), (2, 0), (2, 3)])
def test_first_every_row_then_every_column_of_what_is_left(rows: int, columns: int) -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, vitrim.CubistMerge(rows=rows, columns=columns, block=1), record=True)
    caught: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda m, args, out: caught.append(out))
    model.blocks[1].norm1.register_forward_pre_hook(lambda m, args: caught.append(args[0]))
    with torch.no_grad():
        model(tiny.images().double())
    before, after = caught
    for image in range(2):
        grid = before[image, 1:].view(6, 6, -1)
        across = [plain(row, columns, False) for row in grid]
        left = torch.stack([row for row, _ in across])
        down = [plain(column, rows, False) for column in left.transpose(0, 1)]
        expected = torch.stack([column for column, _ in down], dim=1).flatten(0, 1)
        torch.testing.assert_close(after[image, 1:], expected)
        torch.testing.assert_close(after[image, 0], before[image, 0])
        places = []
        for row, column in product(range(6), range(6)):
            cell = across[row][1][column]
            places.append(1 + down[cell][1][row] * (6 - columns) + cell)
        assert reduction.states[2].source[image, 1:].tolist() == places
    assert after.shape[1] == 1 + (6 - rows) * (6 - columns)


def test_positions_are_a_grid_again() -> None:
    """Rows and columns of what the cells stand for ascend along each row, and down each column by their rows."""
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "cubist_merge:rows=2,columns=2")
    model(tiny.images())
    place = (reduction.state.position[:, 1:] - 1).view(2, 4, 4)
    assert (place.diff(dim=1) > 0).all()
    assert (place // 6).diff(dim=1).min() > 0


def test_counts_follow_the_grid_and_leave_half_of_it() -> None:
    assert vitrim.CubistMerge().counts(196, 4) == [196, 121, 121, 121]
    assert vitrim.CubistMerge(keep_rate=0.01).counts(36, 4) == [36, 9, 9, 9]
    assert vitrim.CubistMerge(rows=1, columns=2, block=0).counts(24, 2, grid=(4, 6)) == [12, 12]
    assert vitrim.CubistMerge(rows=2).counts(36, 2) == [36, 16]
    with pytest.raises(vitrim.VitrimError, match="cubist_merge: a grid of 4 x 6 does not hold 36 patches"):
        vitrim.CubistMerge().counts(36, 4, grid=(4, 6))


@pytest.mark.parametrize("options", ["rows=4", "rows=1,columns=4", "keep_rate=0.2"])
def test_more_rows_or_columns_than_half_are_warned_of_and_refused_if_strict(options: str) -> None:
    model = tiny.HOSTS["vit"]()
    with pytest.raises(vitrim.VitrimError, match="asks for more than 36 patch tokens allow"):
        vitrim.reduce_(model, f"cubist_merge:{options},strict=true")
    with pytest.warns(
        vitrim.ReductionWarning, match=r"asks for more than 36 .* the blocks remove \[0, (27|21), 0, 0\]"
    ):
        vitrim.reduce_(model, f"cubist_merge:{options}")
    vitrim.get_reduction(model).set(**({"rows": 3, "columns": 3} if "rows" in options else {"keep_rate": 0.25}))


def test_a_rectangular_image() -> None:
    model = tiny.HOSTS["dynamic_img_size"]()
    reduction = vitrim.reduce_(model, "cubist_merge:rows=1,columns=3")
    model(torch.randn(2, 3, 16, 32))
    assert reduction.state.num_patches == 3 * 5
    model(torch.randn(2, 3, 32, 8))  # two columns: one may go
    assert reduction.state.num_patches == 7


def test_lines_in_half_precision_are_shortened_as_those_of_float32() -> None:
    x = torch.randn(40, 9, 16).bfloat16()
    half, full = shortened(x, 2), shortened(x.float(), 2)
    assert torch.equal(half.target, full.target)
    assert torch.equal(half.tokens.float(), full.tokens)


def test_odd_sides_keep_the_larger_half() -> None:
    """A line of 13 has six tokens that may go."""
    assert SmallerGrid(0.25).sides((15, 13)) == (8, 7)
    assert SmallerGrid(1.0, (9, 9)).sides((15, 13)) == (8, 7)
