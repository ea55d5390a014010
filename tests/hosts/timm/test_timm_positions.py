"""Tokens keep the angles and the bias of their own position, whichever others are gone. Property tests on every family
of timm that gives its blocks tables of positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.eva import Eva
from torch import Tensor, nn

import tiny
import vitrim
from tiny_hosts.timm_eva import ROPE, eva
from vitrim.core.assignment import prune
from vitrim.core.tokens import IndexMap, TokenState, take

PATCH_DROP = {
    "rope_patch_drop": eva(**ROPE, patch_drop_rate=0.3),
    "mixed_patch_drop": eva(**ROPE, patch_drop_rate=0.3, rope_type="mixed"),
}
WITH_TABLES = [
    *(name for name in tiny.FAMILIES["timm_eva"] if name != "eva_post_norm"),
    *tiny.FAMILIES["timm_beit"],
    *tiny.FAMILIES["timm_relpos"],
    "naflex_rope",
    "naflex_rope_mixed",
    *PATCH_DROP,
]
PATCHES = 36


def entering(model: nn.Module, depth: int) -> tuple[Any, Tensor, Any]:
    """The reduced block at ``depth``, the tokens that enter it and what else the model gives it."""
    block, seen = tiny.blocks(model)[depth], {}
    run = block.run

    def record(x: Tensor, given: Any = None) -> Tensor:
        seen["given"] = (x, given)
        return run(x, given)

    block.run = record
    with torch.no_grad():
        model(tiny.images().to(next(model.parameters()).dtype))
    del block.run
    return block, *seen["given"]


def reduced(name: str) -> nn.Module:
    """The host, float64, reduced by a method that only makes attention proportional to size."""
    model = (PATCH_DROP[name] if name in PATCH_DROP else tiny.HOSTS[name])().double()
    vitrim.reduce_(model, vitrim.NoReduction(proportional=True))
    return model.train(name in PATCH_DROP)


@pytest.fixture(params=WITH_TABLES, scope="module")
def given_block(request: pytest.FixtureRequest) -> tuple[Any, Tensor, Any]:
    torch.manual_seed(0)
    return entering(reduced(request.param), depth=1)


patterns = st.lists(st.permutations(range(PATCHES)), min_size=2, max_size=2)


@pytest.mark.sampled(4)
@settings(deadline=None, max_examples=10)
@given(order=patterns, keep=st.integers(1, PATCHES), second=st.integers(1, PATCHES))
def test_survivors_attend_to_each_other_as_before(given_block, order, keep: int, second: int) -> None:
    """Queries, keys before and after rotation and logits among survivors are those among the same tokens of all.

    Any tokens in any order, other ones in every image, in two steps.
    """
    block, x, given = given_block
    state = start = TokenState.start(x, block.num_prefix)
    with torch.no_grad():
        dense = block.project(x, start, None, given)
        kept = torch.tensor([[i for i in row if i < start.num_patches] for row in order])[:, :keep]
        for chosen in (kept, torch.arange(kept.shape[1]).flip(0)[:second].expand(2, -1)):
            state = prune(state, chosen).advance(x, state)
        now = block.project(take(x, state.position), state, None, given)
    index = state.position
    rows = index[:, None, :, None]
    for name in ("q", "k", "keys"):
        whole = getattr(dense, name)
        expected = whole.gather(2, rows.expand(-1, whole.shape[1], -1, whole.shape[3]))
        torch.testing.assert_close(getattr(now, name), expected)
    whole = dense.logits()
    expected = whole.gather(2, rows.expand(-1, whole.shape[1], -1, whole.shape[3]))
    columns = index[:, None, None, :].expand(-1, whole.shape[1], index.shape[1], -1)
    torch.testing.assert_close(now.logits(), expected.gather(3, columns))


def test_a_few_query_rows_are_rows_of_all(given_block) -> None:
    block, x, given = given_block
    state = TokenState.start(x, block.num_prefix)
    state = prune(state, torch.tensor([[5, 2, 7], [0, 1, 9]])).advance(x, state)
    x = take(x, state.position)
    with torch.no_grad():
        whole = block.project(x, state, None, given).output()
        for rows in (1, 3):
            torch.testing.assert_close(block.project(x, state, rows, given).output(), whole[:, :, :rows])


NEW = [name for family in ("timm_eva", "timm_beit", "timm_relpos", "timm_naflexvit") for name in tiny.FAMILIES[family]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*NEW, "post_norm", "parallel", "parallel_fused_out", "parallel_things"])
def test_a_token_of_size_s_is_s_equal_tokens_at_its_position(name: str) -> None:
    block, x, given = entering(reduced(name), depth=1)
    start = TokenState.start(x, block.num_prefix)
    counts = torch.ones(x.shape[1], dtype=torch.long)
    counts[block.num_prefix :] += torch.arange(PATCHES) % 3
    index = torch.arange(x.shape[1]).repeat_interleave(counts)
    merged = replace(start, size=counts.to(start.size.dtype).expand(2, -1), uniform=False)
    index_map = IndexMap(index.expand(2, -1), index.expand(2, -1))
    twice = replace(TokenState.start(x[:, index], block.num_prefix), index_map=index_map, reduced=True)
    with torch.no_grad():
        fused, _ = block.step(x, merged, given)
        single, _ = block.step(x[:, index], twice, given)
    torch.testing.assert_close(single, fused[:, index], atol=1e-10, rtol=1e-10)


TAKES_MASK = [
    *(name for family in ("timm_eva", "timm_naflexvit") for name in tiny.FAMILIES[family]),
    *("post_norm", "parallel", "parallel_fused_out", "parallel_things"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TAKES_MASK)
def test_pruning_before_the_first_block_equals_masking_in_the_dense_model(name: str) -> None:
    model = tiny.HOSTS[name]().double()
    images = tiny.images().double()
    reduction = vitrim.reduce_(model, "random:keep_rate=0.5,blocks=[0]", record=True)
    with torch.no_grad():
        tokens = model.forward_features(images)
        position = reduction.state.position
        vitrim.restore_(model)
        mask = torch.zeros(2, reduction.state.source.shape[1], dtype=torch.bool).scatter(1, position, True)
        dense = model.forward_features(images, attn_mask=mask[:, None, None, :])
    assert tokens.shape[1] < dense.shape[1]
    torch.testing.assert_close(tokens, take(dense, position))


@pytest.mark.parametrize("name", PATCH_DROP)
def test_patch_dropout_in_training(name: str) -> None:
    model = PATCH_DROP[name]().train()
    images = tiny.images()

    def run() -> Tensor:
        torch.manual_seed(7)
        return model(images)

    dense = run()
    reduction = vitrim.reduce_(model, vitrim.NoReduction())
    torch.testing.assert_close(run(), dense)
    assert reduction.state.source.shape == (2, 26)
    vitrim.restore_(model)
    reduction = vitrim.reduce_(model, vitrim.ToMe(r=3))
    run().sum().backward()
    assert reduction.state.num_tokens == 26 - 4 * 3
    assert isinstance(model, Eva)
