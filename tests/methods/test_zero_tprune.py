"""Zero-TPrune: the stored reading of the paper (not official), and the method around it."""

from __future__ import annotations

import pytest
import torch

import golden_models as golden
import tiny
import vitrim
from vitrim.core.attention import MAP_BYTES
from vitrim.core.matching import best_partners, unit
from vitrim.core.tokens import take
from vitrim.methods.zero_tprune import (
    TwoStages,
    ZeroTPrune,
    combine_heads,
    importance,
    page_rank,
    similar_patches,
)

FILE = "interpretation/zero_tprune_units"
ALL = torch.ones(2, 17, dtype=torch.bool)


def start(boost: int) -> torch.Tensor:
    weights = torch.ones(2, 17, dtype=torch.float64)
    weights[:, 0] = 17**0.5 if boost else 1
    return weights


@golden.cases([FILE])
def test_units(ref: golden.Reference) -> None:
    def stored(key: str) -> torch.Tensor:
        return golden.tensor(ref, key).double()

    for iterations in (1, 5, 30):
        for boost in (0, 1):
            ranks = page_rank(stored("attn"), start(boost), iterations)
            ref.check(f"wpr_it{iterations}_cls{boost}", ranks)
    # heads are filtered by variance and combined
    scores = stored("wpr_it30_cls1")
    variance = scores.var(2, unbiased=False)
    ref.check("head_var", variance)
    ref.check("head_kept", ((variance >= 0.01) & (variance <= 0.7)).double())
    ref.check("importance", combine_heads(scores, ALL, (0.01, 0.7)))
    # no head passes: all count
    torch.testing.assert_close(combine_heads(scores, ALL, (100.0, 101.0)), scores.square().mean(1).sqrt())
    # the less important half looks for its like in the other
    importance, keys = stored("importance")[:, 1:], stored("keys")[:, 1:]
    order = importance.argsort(1)
    low, high = order[:, :8], order[:, 8:]
    ref.check("groupA", low + 1)
    ref.check("groupB", high + 1)
    ref.check("best_sim", best_partners(take(unit(keys), low), take(unit(keys), high))[0])
    dropped = similar_patches(importance, keys, int(ref["r"])) + 1
    ref.check("s_stage_drop", dropped.sort(1).values, lambda stored: stored.sort(1).values)


def test_restriction_equals_a_smaller_graph() -> None:
    graph = torch.rand(2, 3, 9, 9, dtype=torch.float64).softmax(-1)
    left = torch.ones(2, 9, dtype=torch.bool)
    left[:, [2, 5]] = False
    index = left[0].nonzero().flatten()
    small = graph[:, :, index][..., index]
    small = small / small.sum(-1, keepdim=True)
    expected = importance(small, torch.ones(2, 7, dtype=torch.bool), 4, True, (0.01, 0.7))
    torch.testing.assert_close(importance(graph, left, 4, True, (0.01, 0.7))[:, index], expected)


def test_method_drops_similar_then_unimportant() -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, ZeroTPrune(blocks=(1,), num_similar=6, keep_rate=0.5, iterations=3), record=True)
    seen = []
    model.blocks[1].reducer.ranker.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with torch.no_grad():
        model(tiny.images().double())
    attention = seen[0]
    graph = attention.probabilities()
    left = torch.ones(2, 37, dtype=torch.bool)
    rank = importance(graph, left, 1, True, (0.01, 0.7))
    dropped = similar_patches(rank[:, 1:], attention.mean_keys()[:, 1:], 6) + 1
    left.scatter_(1, dropped, False)
    score = importance(graph, left, 3, True, (0.01, 0.7)).masked_fill(~left, 0)[:, 1:]
    expected = score.topk(15, dim=1).indices + 1
    assert torch.equal(reduction.states[2].position[:, 1:], expected)


def test_amounts_per_block_and_counts() -> None:
    config = ZeroTPrune(blocks=(1, 3), num_similar=(0, 10), keep_rate=(0.9, 1.0))
    assert config.counts(196, 12)[1:5] == [176, 176, 166, 166]
    assert TwoStages(100, 1.0).keep(30, 30) == 15  # at most half are similar
    assert [ZeroTPrune().iterations_at(depth, 12) for depth in (0, 2, 3, 8, 9, 11)] == [30, 30, 5, 5, 1, 1]


def test_boost_needs_a_class_token() -> None:
    for host, alike in (("no_class_token_avg", True), ("vit", False)):
        found = []
        for boost in (True, False):
            model = tiny.HOSTS[host]().eval()
            reduction = vitrim.reduce_(model, ZeroTPrune(num_similar=2, iterations=1, boost_class_token=boost))
            model(tiny.images())
            found.append(reduction.state.source)
        assert torch.equal(*found) == alike


def test_images_are_scored_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget for one map, for two of three images, and for all: to the bit."""
    images = tiny.images(3)
    outputs = []
    for budget in (1, 2 * 2 * 37 * 37 * 4, 2**30):
        monkeypatch.setitem(MAP_BYTES, "cpu", budget)
        model = tiny.HOSTS["vit"]()
        vitrim.reduce_(model, "zero_tprune")
        with torch.no_grad():
            outputs.append(model(images))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
