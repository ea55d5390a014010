"""Cells of patches: what a method sees of them, and what its decision does to their members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vitrim
from vitrim.core.assignment import merge, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.cells import CellAttention, CellReducer, gathered, side_by_side
from vitrim.core.plan import HostFacts, plan
from vitrim.core.registry import make_reducer
from vitrim.core.tokens import TokenState, unmerge

AREA = 4
PREFIX = 2
FACTS = HostFacts(8, 2, 0, PREFIX, True, (4, 6), None, (3, 16, 24), cell=2)


def tokens(batch: int = 2, cells: int = 6) -> Tensor:
    return torch.randn(batch, PREFIX + cells * AREA, 8, generator=torch.Generator().manual_seed(1)).double()


def attention(x: Tensor) -> Attention:
    q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) * factor for factor in (1.0, 0.7, 0.3))
    return Attention(q, k, v, scale=0.5)


def reducer(method: str = "tome:r=2", depth: int = 0) -> CellReducer:
    config = vitrim.parse_method(method)
    layer = plan(config, FACTS, 3)[depth]
    return CellReducer(make_reducer(config, layer), AREA, PREFIX, gathers=False)


def test_a_method_sees_means_and_keys_side_by_side() -> None:
    x = tokens()
    plain, seen = attention(x), CellAttention.of(attention(x), AREA, PREFIX)
    keys = plain.mean_keys()
    cell = torch.cat([keys[:, PREFIX + 4 + member] for member in range(AREA)], dim=-1)
    torch.testing.assert_close(seen.mean_keys()[:, PREFIX + 1], cell)
    assert seen.keys.shape == (2, 2, PREFIX + 6, 16)
    for own, cells in ((plain.column_mean(), seen.column_mean()), (plain.class_row(), seen.class_row())):
        torch.testing.assert_close(cells[..., :PREFIX], own[..., :PREFIX])
        torch.testing.assert_close(cells[..., PREFIX + 2], own[..., PREFIX + 8 : PREFIX + 12].mean(dim=-1))
    torch.testing.assert_close(
        seen.rows(PREFIX).column_mean()[:, -1], plain.rows(PREFIX).column_mean()[:, -AREA:].mean(dim=1)
    )
    with pytest.raises(vitrim.UnsupportedModelError, match="reads the attention map"):
        seen.probabilities()


@pytest.mark.parametrize("weighted", [False, True])
def test_members_join_members_in_the_same_way(weighted: bool) -> None:
    """As if a cell were one token of area * C channels."""
    x = tokens()
    state = TokenState.start(x, PREFIX)
    own = reducer()
    cells = own.cells(state)
    keep, moved, into = torch.tensor([[0, 2, 3, 5]] * 2), torch.tensor([[1, 4], [4, 1]]), torch.tensor([[2, 2], [0, 3]])
    weight = torch.rand(2, PREFIX + 6).double() + 0.1 if weighted else None
    decided = merge(cells, keep, moved, into, weight=weight)
    few, after = own.spread(decided).apply(x, state)
    wide = side_by_side(x, AREA, PREFIX)
    expected, size = decided.pool(wide, cells.size), decided._sizes(cells)
    torch.testing.assert_close(side_by_side(few, AREA, PREFIX), expected)
    torch.testing.assert_close(after.size[:, PREFIX::AREA], size[:, PREFIX:])
    members = after.position[:, PREFIX:].unflatten(1, (-1, AREA)) - PREFIX
    assert torch.equal(members, members[..., :1] // AREA * AREA + torch.arange(AREA))
    torch.testing.assert_close(unmerge(few, after)[:, :PREFIX], x[:, :PREFIX])


def test_padding_and_the_bank_are_those_of_cells() -> None:
    x = tokens()
    state = TokenState.start(x, PREFIX, banking=True)
    own = reducer()
    few, after = own.spread(prune(own.cells(state), torch.tensor([[5, 1], [0, 2]]))).apply(x, state)
    assert few.shape[1] == PREFIX + 2 * AREA
    whole, _ = after.bring_back(few)
    assert whole.shape == x.shape
    valid = torch.tensor([[True, False], [True, True]])
    _, ragged = own.spread(prune(own.cells(state), torch.tensor([[5, 1], [0, 2]]), valid=valid)).apply(x, state)
    assert ragged.mask is not None
    assert ragged.mask[:, PREFIX:].sum(dim=1).tolist() == [AREA, 2 * AREA]
    assert own.cells(ragged).mask.sum(dim=1).tolist() == [PREFIX + 1, PREFIX + 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["tome:r=2", "topk:keep_rate=0.5,blocks=[0]", "random:keep_rate=0.5,blocks=[0]"])
def test_amounts_are_of_cells(method: str) -> None:
    x = tokens()
    own = reducer(method)
    state = TokenState.start(x, PREFIX)
    for site in ("before", "query", "between"):
        if site == own.site:
            decided: Any = own(x, None if site == "before" else attention(x), state)
            assert decided.anchor.shape[1] == PREFIX + AREA * (4 if method.startswith("tome") else 3)
            return
    raise AssertionError(own.site)


def test_patches_in_raster_order_are_put_cell_by_cell_and_back() -> None:
    x = torch.randn(2, PREFIX + 16, 8)
    state = TokenState.start(x, PREFIX)
    own = reducer()
    own.gathers = True
    y, after = own.reduce("before", x, None, state)
    assert (after.position[0, PREFIX:] - PREFIX).tolist()[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert torch.equal(unmerge(y, after), x)
    assert own.reduce("before", y, None, after)[0] is y  # once is enough
    with pytest.raises(vitrim.UnsupportedModelError, match="a square image in whole cells of 2 x 2"):
        gathered(TokenState.start(torch.zeros(1, 25, 4), 0), AREA)


def test_the_reducer_within_follows_changes() -> None:
    own = reducer()
    config = own.config.changed(r=1)
    own.follow(config, plan(config, FACTS, 3)[0])
    assert own.inner.config is own.config is config
    assert isinstance(own, Reducer)
    x = tokens()
    decided: Any = own(x, attention(x), TokenState.start(x, PREFIX))
    assert decided.anchor.shape[1] == PREFIX + AREA * 5


def test_a_method_decides_by_the_mean_of_the_patches_of_a_cell() -> None:
    x = tokens()
    seen = []
    inner = make_reducer(config := vitrim.parse_method("topk:keep_rate=0.5,blocks=[0]"), plan(config, FACTS, 3)[0])
    inner.forward = lambda tokens, attention, state: seen.append(tokens)  # type: ignore[method-assign]
    CellReducer(inner, AREA, PREFIX, gathers=False)(x, None, TokenState.start(x, PREFIX))
    (found,) = seen
    assert torch.equal(found[:, :PREFIX], x[:, :PREFIX])
    for cell in range(6):
        first = PREFIX + cell * AREA
        by_hand = (x[:, first] + x[:, first + 1] + x[:, first + 2] + x[:, first + 3]) / 4
        torch.testing.assert_close(found[:, PREFIX + cell], by_hand)
