"""Loops give what the operators give that they stand for, and stand for them only where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tiny
import vitrim
from vitrim.core import compiled
from vitrim.core.assignment import Hard, merge, prune
from vitrim.core.attention import Attention
from vitrim.core.matching import alternate_split, match_alternate, match_both_ways, unit, unit_mean_keys
from vitrim.core.registry import parse_method
from vitrim.core.tokens import TokenState

DTYPES = (torch.float32, torch.float64)


@contextmanager
def operators() -> Iterator[None]:
    with patch.object(compiled, "INSTALLED", False):
        yield


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What loops give and what operators give."""
    with operators():
        expected = call()
    return call(), expected


def same(one: Hard, other: Hard) -> None:
    for name in ("anchor", "moved", "into"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64, levels: int = 0) -> Tensor:
    """Random numbers; with ``levels`` only so many different ones, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(shape, generator=generator, dtype=dtype)
    return (found * levels).floor() if levels else found


def split(state: TokenState) -> tuple[int, int]:
    return tuple(len(range(state.num_patches)[part]) for part in alternate_split(state.num_prefix))  # type: ignore[return-value]


# ---- the same --------------------------------------------------------------------------------------------------------


def test_numba_is_installed_where_tests_run() -> None:
    assert compiled.INSTALLED


@given(prefix=st.integers(0, 5), patches=st.integers(2, 40), batch=st.integers(1, 3), data=st.data())
def test_pairs_of_one_direction(prefix: int, patches: int, batch: int, data: st.DataObject) -> None:
    state = TokenState.start(torch.zeros(batch, prefix + patches, 4), prefix)
    sources, destinations = split(state)
    levels, r = data.draw(st.sampled_from([0, 3])), data.draw(st.integers(0, sources))
    similarity = drawn(data.draw(st.integers(0, 999)), batch, sources, destinations, levels=levels)
    by_position = data.draw(st.booleans())
    same(*both(lambda: match_alternate(state, similarity, r, by_position=by_position)))


@given(prefix=st.integers(0, 5), patches=st.integers(2, 40), batch=st.integers(1, 3), data=st.data())
def test_pairs_of_both_directions(prefix: int, patches: int, batch: int, data: st.DataObject) -> None:
    state = TokenState.start(torch.zeros(batch, prefix + patches, 4), prefix)
    sources, destinations = split(state)
    levels, r = data.draw(st.sampled_from([0, 3])), data.draw(st.integers(1, patches // 2))
    attraction = drawn(data.draw(st.integers(0, 999)), batch, sources, destinations, levels=levels)
    bidirectional = r > sources or data.draw(st.booleans())
    same(*both(lambda: match_both_ways(state, attraction, r, bidirectional)))


@given(
    patches=st.integers(1, 20),
    batch=st.integers(1, 3),
    normalise=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_merged_tokens_and_their_sizes(
    patches: int, batch: int, normalise: bool, weighted: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    seed, kept = data.draw(st.integers(0, 999)), data.draw(st.integers(1, patches))
    x = drawn(seed, batch, 1 + patches, 5, dtype=dtype)
    state = TokenState.start(x, num_prefix=1)
    for again in range(2):  # the second time with sizes
        left = state.num_patches
        kept = min(kept, left)
        order = drawn(seed + again, batch, left).argsort(1)
        into = (drawn(seed + 2 + again, batch, left - kept) * kept).long()
        weight = drawn(seed + 4, batch, 1 + left, dtype=dtype) + 0.1 if weighted else None
        hard = merge(state, order[:, :kept], order[:, kept:], into, weight=weight, normalise=normalise)
        (pooled, after), (expected, state) = both(lambda hard=hard, x=x, state=state: hard.apply(x, state))
        torch.testing.assert_close(pooled, expected)
        torch.testing.assert_close(after.size, state.size)
        assert torch.equal(after.source, state.source)
        x = expected


@given(patches=st.integers(1, 20), prefix=st.integers(0, 3), batch=st.integers(1, 3), data=st.data())
def test_copies_of_merged_tokens_at_the_old_places(patches: int, prefix: int, batch: int, data: st.DataObject) -> None:
    seed, kept = data.draw(st.integers(0, 999)), data.draw(st.integers(1, patches))
    moved = data.draw(st.integers(kept, patches))  # what is beyond is dropped
    x = drawn(seed, batch, prefix + patches, 5)
    state = TokenState.start(x, prefix)
    order = drawn(seed, batch, patches).argsort(1)
    into = (drawn(seed + 1, batch, moved - kept) * kept).long()
    for hard in (merge(state, order[:, :kept], order[:, kept:moved], into), prune(state, order[:, :kept])):
        new = drawn(seed + 2, batch, prefix + kept, 5)
        one, other = both(lambda hard=hard, new=new: hard.expand(new, prefix + patches))
        assert torch.equal(one, other)


def test_copies_of_tokens_that_there_are_not_are_refused() -> None:
    state, y = TokenState.start(torch.zeros(1, 5, 3), num_prefix=1), torch.zeros(1, 3, 3)
    for keep, moved, into, message in (
        ([0, 4], [1], [0], "to keep is not"),
        ([0, -2], [1], [0], "to keep is not"),
        ([0, 2], [4], [0], "to move, or what it joins"),
        ([0, 2], [-2], [0], "to move, or what it joins"),
        ([0, 2], [1], [2], "to move, or what it joins"),
        ([0, 2], [1], [-2], "to move, or what it joins"),
        ([0], [1], [0], "do not belong together"),
    ):
        hard = merge(state, *(torch.tensor([each]) for each in (keep, moved, into)))
        with pytest.raises(IndexError, match=message):
            hard.expand(y, 5)


@pytest.mark.parametrize(
    ("keep", "moved", "into", "message"),
    [
        ([0, 4], [1], [0], "not among those there are"),
        ([0, -2], [1], [0], "not among those there are"),
        ([0, 2], [4], [0], "not among those there are"),
        ([0, 2], [-2], [0], "not among those there are"),
        ([0, 2], [1], [2], "one that is not kept"),
        ([0, 2], [1], [-2], "one that is not kept"),
    ],
)
def test_tokens_that_there_are_not_are_refused(
    keep: list[int], moved: list[int], into: list[int], message: str
) -> None:
    x = torch.zeros(1, 5, 3)
    state = TokenState.start(x, num_prefix=1)
    hard = merge(state, *(torch.tensor([each]) for each in (keep, moved, into)))
    with pytest.raises(IndexError, match=message):
        hard.apply(x, state)


def test_indices_and_weights_of_other_tokens_are_refused() -> None:
    x = torch.zeros(2, 5, 3)
    state = TokenState.start(x, num_prefix=1)
    keep, moved, into = torch.tensor([[0, 1]] * 2), torch.tensor([[2, 3]] * 2), torch.tensor([[0, 1]] * 2)
    for hard in (
        merge(state, keep, moved, into[:, :1]),
        merge(state, keep, moved[:1], into[:1]),
        merge(state, keep[:1], moved, into),
        replace(merge(state, keep, moved, into), weight=torch.ones(2, 4)),
    ):
        with pytest.raises(IndexError, match="do not belong together"):
            hard.apply(x, state)


@pytest.mark.parametrize("method", ["tome:r=6", "mctf:r=5", "atm:alpha=0.4,beta=0", "evit"])
def test_a_batch_of_no_images(method: str) -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, parse_method(method))
    with torch.inference_mode():
        assert model(tiny.images(1)[:0]).shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_keys_of_length_one(dtype: torch.dtype, batch: int) -> None:
    # as hosts have them: q, k and v of a token side by side
    q, k, v = drawn(0, batch, 9, 3, 2, 8, dtype=dtype).permute(2, 0, 3, 1, 4)
    k = k * torch.ones(9, dtype=dtype).scatter_(0, torch.tensor([4]), 0.0)[:, None]  # one key of zeros
    for keys in (k, drawn(0, batch, 9, 3, 2, 8, dtype=dtype).permute(2, 0, 3, 1, 4)[1]):
        attention = Attention(q, keys, v, 1.0)
        for prefix in (0, 1, 3):
            one, other = both(lambda attention=attention, prefix=prefix: unit_mean_keys(attention, prefix))
            torch.testing.assert_close(one, other)
            assert one.shape == (batch, 9 - prefix, 8)
    torch.testing.assert_close(*both(lambda: unit(k[:, 0])))


def test_keys_with_gaps_between_their_numbers_are_left_to_operators() -> None:
    k = drawn(0, 1, 2, 9, 16)[..., ::2]
    attention = Attention(k, k, k, 1.0)
    torch.testing.assert_close(*both(lambda: unit_mean_keys(attention, 1)))


LOOPING = (
    *("tome:r=6", "tome:r=6,kept_order=similarity", "atm:alpha=0.4,beta=0", "tofu:keep_rate=0.8", "pitome"),
    *("mctf:r=5", "mctf:r=6,tau_sim=2,tau_info=0.3,tau_size=0.5", "mctf:r=4,tau_info=0,pooling=size"),
    *("mctf:r=3,pooling=max", "mctf:r=5,bidirectional=false", "mctf:r=5,attention=precise"),
    *("mctf:r=5,attention=after", "diffrate:r=5", "evit", "dpc_knn", "bat", "topk", "cropr:r=3", "sit", "dynamicvit"),
    *("pitome:protect=early", "pitome:protect=always", "gtp", "gtp:num_prop=6,graph=semantic,num_neighbours=40"),
    *("gtp:graph=spatial", "gtp:token_scale=false", "gtp:propagation=none", "zero_tprune", "patchmerger"),
)


@pytest.mark.parametrize("method", LOOPING)
@pytest.mark.parametrize("host", ["vit", "hf_vit"])
def test_a_model_predicts_the_same(method: str, host: str) -> None:
    model, images = tiny.HOSTS[host]().double(), tiny.images(2).double()
    reduction = vitrim.reduce_(model, parse_method(method), record=True)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        with torch.inference_mode():
            output = model(images)
        return getattr(output, "logits", output), reduction.state.source, reduction.state.size

    for one, other in zip(*both(forward), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)


# ---- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.float16),
        torch.zeros(compiled.MOST + 1),
        torch.zeros(0),
        torch.nn.Parameter(torch.zeros(2), requires_grad=False),  # a subclass may mean anything
    ],
    ids=["gradient", "meta", "bfloat16", "float16", "large", "empty", "subclass"],
)
def test_other_tensors_are_left_to_operators(x: Tensor) -> None:
    assert compiled.suit(torch.zeros(2))
    assert not compiled.suit(x)
    assert not compiled.suit(torch.zeros(2), x)


def test_who_watches_operators_sees_them() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(compiled.suit(x))
        return x * 2.0

    look(torch.zeros(2))
    with FlopCounterMode(display=False):
        look(torch.zeros(2))
    torch.vmap(look)(torch.zeros(2, 2))
    torch.func.jvp(look, (torch.zeros(2),), (torch.ones(2),))
    with torch.autograd.forward_ad.dual_level():
        look(torch.zeros(2))
    with torch.device("cpu"):  # a mode of functions
        look(torch.zeros(2))
    torch.jit.trace(look, torch.zeros(2), check_trace=False)
    assert seen[0]
    assert len(seen) >= 7
    assert not any(seen[1:])


@pytest.mark.slow
def test_an_exported_model_holds_operators() -> None:
    model = tiny.vit(depth=1)()
    vitrim.reduce_(model, vitrim.ToMe(r=6))
    with patch.object(compiled.Loop, "__call__", side_effect=AssertionError("a loop ran")):
        exported = torch.export.export(model, (tiny.images(2),)).module()
        torch.compile(model, backend="eager", fullgraph=True)(tiny.images(2))
    with torch.inference_mode():
        torch.testing.assert_close(exported(tiny.images(2)), model(tiny.images(2)))


def test_a_loop_that_cannot_be_kept_is_compiled_for_the_process() -> None:
    """Code from a string has no file beside which it could lie."""
    space: dict[str, Any] = {}
    exec("def fill(x, out):\n    for i in range(len(x)):\n        out[i] = x[i] + 1.0", space)
    filled = torch.empty(3)
    compiled.Loop(space["fill"])(torch.arange(3.0), filled)
    assert filled.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("tome:r=6", {"_unit_mean", "_match", "_pool"}),
        ("mctf:r=5", {"_unit", "_attract", "_both_ways", "_pool", "_expand"}),
        ("pitome", {"_unit_mean", "_pair", "_pool"}),
    ],
)
def test_loops_run_on_small_images(method: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()
    own = compiled.Loop.__call__

    def noting(self: compiled.Loop, *values: Any) -> None:
        ran.add(self.function.__name__)
        own(self, *values)

    monkeypatch.setattr(compiled.Loop, "__call__", noting)
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, parse_method(method))
    with torch.inference_mode():
        model(tiny.images(1))
    assert ran == expected


def test_without_numba_operators_decide() -> None:
    model = tiny.HOSTS["vit"]()
    vitrim.reduce_(model, vitrim.ToMe(r=6))
    with torch.inference_mode(), patch.object(compiled.Loop, "__call__", side_effect=AssertionError("a loop ran")):
        with operators():
            model(tiny.images(1))
        with pytest.raises(AssertionError, match="a loop ran"):
            model(tiny.images(1))
