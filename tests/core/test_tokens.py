from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vitrim.core.assignment import merge, prune
from vitrim.core.tokens import STAMP, Asked, TokenState, decision_dtype, flat_index, product_dtype, take, unmerge


def random_tokens(batch: int, n: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, n, channels, generator=torch.Generator().manual_seed(seed))


def merged(batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, TokenState]:
    """Six tokens behind one class token; patches 1 and 2 join patch 0: sizes 1, 3, 1, 1, 1."""
    x = random_tokens(batch, 7, 4).to(dtype)
    state = TokenState.start(x, num_prefix=1)
    rows = torch.ones(batch, 1, dtype=torch.long)
    hard = merge(state, rows * torch.tensor([0, 3, 4, 5]), rows * torch.tensor([1, 2]), rows * torch.tensor([0, 0]))
    return hard.apply(x, state)


# ---- take ----------------------------------------------------------------------------------------------------------


@given(
    batch=st.integers(1, 4),
    n=st.integers(1, 300),
    m=st.integers(1, 300),
    contiguous=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_take_is_a_gather_of_whole_rows(batch: int, n: int, m: int, contiguous: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, n, 5, generator=generator)
    if not contiguous:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    index = torch.randint(n, (batch, m), generator=generator)
    expected = x.gather(1, index.unsqueeze(-1).expand(batch, m, 5))
    assert torch.equal(take(x, index), expected)
    assert torch.equal(x.reshape(batch * n, 5)[flat_index(index, n)].view(batch, m, 5), expected)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 5, 0)])
def test_take_of_nothing_keeps_its_shape(shape: tuple[int, int, int]) -> None:
    index = torch.zeros(shape[0], 2, dtype=torch.long)
    assert take(torch.zeros(shape), index).shape == (shape[0], 2, shape[2])


def test_take_accumulates_gradients_of_repeated_rows() -> None:
    x = torch.zeros(1, 3, 2, requires_grad=True)
    take(x, torch.tensor([[1, 1, 2]])).sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [0.0, 2.0, 1.0]


# ---- the state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_sizes_are_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert decision_dtype(dtype) == expected
    state = TokenState.start(torch.zeros(1, 300, 2, dtype=dtype), num_prefix=1)
    assert state.size.dtype == expected
    # 299 patches become one: bfloat16 would call that 298 or 300
    everything = torch.arange(1, 299).unsqueeze(0)
    hard = merge(state, torch.tensor([[0]]), everything, torch.zeros_like(everything))
    assert hard.advance(torch.zeros(1, 300, 2, dtype=dtype), state).size.tolist() == [[1.0, 299.0]]


def test_start_is_the_identity_with_the_prefix_counted() -> None:
    state = TokenState.start(torch.zeros(3, 9, 2), num_prefix=2)
    assert (state.num_tokens, state.num_patches, state.initial_patches) == (9, 7, 7)
    assert (state.uniform, state.reduced, state.pruned, state.asked, state.mask) == (True, False, False, Asked(), None)
    for index in (state.source, state.position):
        assert index.dtype == torch.int64
        assert index.tolist() == [list(range(9))] * 3
    assert state.size.tolist() == [[1.0] * 9] * 3


def test_patch_counts_after_a_reduction() -> None:
    _, state = merged()
    assert (state.num_tokens, state.num_patches, state.initial_patches) == (5, 4, 6)
    assert (state.uniform, state.reduced, state.pruned) == (False, True, False)


def test_report_adds_an_output_and_leaves_the_state_it_was_called_on() -> None:
    first = TokenState.start(torch.zeros(1, 3, 2), num_prefix=1)
    second = first.report("logits", 3, torch.ones(1)).report("logits", 5, torch.zeros(1))
    assert first.aux == ()
    assert [(name, depth, value.item()) for name, depth, value in second.aux] == [("logits", 3, 1), ("logits", 5, 0)]


# ---- key bias ------------------------------------------------------------------------------------------------------


def test_there_is_no_key_bias_before_a_merge() -> None:
    x = torch.zeros(2, 7, 4)
    state = TokenState.start(x, num_prefix=1)
    assert state.key_bias(torch.float32, proportional=True) is None
    pruned = prune(state, torch.tensor([[0, 2], [3, 1]])).advance(x, state)
    assert pruned.key_bias(torch.float32, proportional=True) is None
    nothing = torch.empty(2, 0, dtype=torch.long)
    unmoved = merge(state, torch.arange(6).expand(2, 6), nothing, nothing).advance(x, state)
    assert unmoved.key_bias(torch.float32, proportional=True) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_key_bias_after_a_merge_is_the_log_of_the_size(dtype: torch.dtype) -> None:
    _, state = merged(dtype=dtype)
    bias = state.key_bias(dtype, proportional=True)
    assert bias is not None
    assert bias.dtype == dtype
    assert bias.shape == (2, 1, 1, 5)
    expected = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0], dtype=torch.float64).log().to(dtype)
    torch.testing.assert_close(bias[:, 0, 0], expected.expand(2, 5))
    assert state.key_bias(dtype, proportional=False) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_gives_a_finite_bias_that_closes_a_key(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 4, 3, dtype=dtype)
    state = TokenState.start(x, num_prefix=1)
    valid = torch.tensor([[True, True, False], [False, False, False]])
    ragged = prune(state, torch.tensor([[0, 1, 2], [0, 1, 2]]), valid=valid).advance(x, state)
    for proportional in (True, False):
        bias = ragged.key_bias(dtype, proportional)
        assert bias is not None
        assert bias.dtype == dtype
        assert bias.isfinite().all()
        assert (bias[:, 0, 0][~ragged.mask] == torch.tensor(-1e4, dtype=dtype)).all()
        assert (bias[:, 0, 0][ragged.mask] == 0).all()
        weight = bias.float().softmax(-1)[:, 0, 0]
        assert (weight[~ragged.mask] == 0).all()
    everything_masked = torch.full((1, 4), -1e4, dtype=dtype).softmax(-1)
    assert everything_masked.isfinite().all()


def test_a_mask_and_sizes_come_together() -> None:
    x = torch.zeros(1, 5, 3)
    state = TokenState.start(x, num_prefix=1)
    valid = torch.tensor([[True, False]])
    hard = merge(state, torch.tensor([[0, 0]]), torch.tensor([[1, 2, 3]]), torch.tensor([[0, 0, 0]]), valid=valid)
    bias = hard.advance(x, state).key_bias(torch.float32, proportional=True)
    assert bias is not None
    torch.testing.assert_close(bias.flatten(), torch.tensor([0.0, torch.tensor(4.0).log().item(), -1e4]))


# ---- un-merge ------------------------------------------------------------------------------------------------------


def test_unmerge_copies_groups_and_leaves_pruned_places_zero() -> None:
    y, state = merged()
    out = unmerge(y, state)
    for place, group in enumerate([0, 1, 1, 1, 2, 3, 4]):
        assert torch.equal(out[:, place], y[:, group])
    keep = torch.tensor([[0, 3], [1, 2]])
    y, state = prune(state, keep).apply(y, state)
    out = unmerge(y, state)
    assert (state.source == -1).sum(1).tolist() == [2, 4]
    assert (out[state.source == -1] == 0).all()
    assert torch.equal(out[0, 1], y[0, 1])
    assert torch.equal(out[0, 6], y[0, 2])
    assert torch.equal(out[1, 4], y[1, 1])


# ---- what a user may do with a stamped tensor ----------------------------------------------------------------------


def test_banked_tokens_do_not_come_back_beside_padding() -> None:
    """Images that keep different numbers of tokens are padded, and a bank has no padding."""
    x = random_tokens(1, 6, 4)
    state = TokenState.start(x, num_prefix=1)
    x, state = prune(state, torch.tensor([[0, 1, 2]]), dropped=torch.tensor([[3, 4]])).apply(x, state)
    state = replace(state, mask=torch.ones(1, x.shape[1], dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="banked tokens cannot be brought back next to a mask"):
        state.refill(x)


def test_a_stamped_tensor_saves_and_loads_as_weights_only() -> None:
    y, state = merged()
    setattr(y, STAMP, state)
    buffer = io.BytesIO()
    torch.save({"features": y}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["features"]
    assert torch.equal(loaded, y)
    assert not isinstance(getattr(loaded, STAMP, None), TokenState)  # the blocks ignore what is left


def test_a_pickled_state_is_empty_and_a_copied_one_is_itself() -> None:
    _, state = merged()
    assert pickle.loads(pickle.dumps(state)) == {}
    assert copy.deepcopy(state) is copy.copy(state) is state


def test_products_run_in_the_dtype_of_autocast() -> None:
    x = torch.zeros(2)
    assert product_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(x) == torch.bfloat16
        assert product_dtype(x.to("meta")) == torch.float32


@pytest.mark.parametrize("rows", [None, 2])
def test_a_table_of_pairs_is_read_from_the_query_to_the_key(rows: int | None) -> None:
    """By hand, with a table that is not symmetric."""
    x = torch.randn(2, 5, 4)
    state = TokenState.start(x, num_prefix=1)
    _, state = prune(state, torch.tensor([[2, 0], [3, 1]])).apply(x, state)
    table = torch.arange(2 * 5 * 5.0).view(2, 5, 5)
    found = state.pair_bias(table, rows)
    anchors = [[0, 3, 1], [0, 4, 2]]
    assert found.shape == (2, 2, rows or 3, 3)
    for image, own in enumerate(anchors):
        for head in range(2):
            by_hand = [[table[head, query, key].item() for key in own] for query in own[:rows]]
            assert found[image, head].tolist() == by_hand


def test_banked_tokens_do_not_come_back_beside_another_carry() -> None:
    x = torch.randn(1, 5, 4)
    state = replace(TokenState.start(x, num_prefix=1), carry={"seen": torch.ones(1, 5)})
    rest, state = prune(state, torch.tensor([[0, 1]]), dropped=torch.tensor([[2, 3]])).apply(x, state)
    assert state.refill(rest)[1].carry["seen"].shape == (1, 5)
    with pytest.raises(NotImplementedError, match="other per-token carry"):
        replace(state, carry={"other": state.carry["seen"]}).refill(rest)
