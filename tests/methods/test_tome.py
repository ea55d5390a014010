from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import golden_models as golden
import tiny
import vitrim
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.plan import Layer


def reducer(config: vitrim.ToMe, tokens: int, num_prefix: int) -> vitrim.Reducer:
    layer = Layer(0, 1, 8, 1, 0, num_prefix, num_prefix > 0, (1, tokens - num_prefix))
    return tiny.reducer(config, layer)


def decide(config: vitrim.ToMe, metric: Tensor, num_prefix: int) -> tuple[Hard, vitrim.TokenState]:
    """The merge of tokens whose keys are ``metric`` (B, N, d)."""
    keys = metric[:, None]
    state = vitrim.TokenState.start(metric, num_prefix)
    hard = reducer(config, metric.shape[1], num_prefix)(metric, Attention(keys, keys, keys, 1.0), state)
    return hard, state


OPERATORS = [("n17_r5", 5, 1, {}), ("n16_r20", 20, 1, {}), ("n17_nocls_r5", 5, 0, {"kept_order": "similarity"})]


@golden.cases(
    [(golden.Part("merging/ops_tome", (f"{case}/*",)), case, *more) for case, *more in OPERATORS],
    "case, r, num_prefix, options",
)
def test_operator_matches_reference(ref: golden.Reference, case: str, r: int, num_prefix: int, options: dict) -> None:
    data = {key: torch.from_numpy(value).double() for key, value in golden.weights.tensors(ref).items()}
    x, metric = data[f"{case}/x"], data[f"{case}/metric"]
    size = golden.tensor(ref, f"{case}/size").double()
    hard, state = decide(vitrim.ToMe(r=r, **options), metric, num_prefix)
    merged, after = hard.apply(x, replace(state, size=size, uniform=False))
    ref.check(f"{case}/merged_x", merged)
    ref.check(f"{case}/merged_size", after.size)
    ref.check(f"{case}/source", after.source)
    ref.check(f"{case}/unmerged_x", vitrim.unmerge(merged, after))
    ref.check(f"{case}/merged_mean_unweighted", hard.pool(x, torch.ones_like(size)))


@pytest.mark.parametrize("host", ["no_class_token_avg", "avg_fc_norm", "avgmax", "map", "avg_no_fc_norm"])
def test_pooling_heads_weigh_merged_tokens_by_size(host: str) -> None:
    """The head sees what it would see if every merged token were repeated as often as it counts."""
    model = tiny.HOSTS[host]().double()
    reduction = vitrim.reduce_(model, vitrim.ToMe(r=6))
    images = tiny.images().double()
    caught = []
    hook = model.norm.register_forward_hook(lambda module, args, out: caught.append(out))
    with torch.no_grad():
        out = model(images)
        hook.remove()
        state = reduction.state
        assert caught[0].shape[1] == model.num_prefix_tokens + 36
        # merged tokens of the last block, repeated by hand
        by_hand = torch.stack([caught[0][i, state.position[i]][state.source[i]] for i in range(2)])
        torch.testing.assert_close(caught[0], by_hand)
        patches = caught[0][:, model.num_prefix_tokens :]
        if host in ("no_class_token_avg", "avg_fc_norm", "avg_no_fc_norm"):
            first = torch.stack([caught[0][i, state.position[i]] for i in range(2)])[:, model.num_prefix_tokens :]
            weight = state.size[:, model.num_prefix_tokens :, None]
            torch.testing.assert_close(patches.mean(1), (first * weight).sum(1) / weight.sum(1))
    assert out.isfinite().all()


def test_schedules() -> None:
    def removed(config: vitrim.ToMe) -> list[int]:
        counts = [196, *config.counts(196, 12)]
        return [a - b for a, b in pairwise(counts)]

    assert removed(vitrim.ToMe(r=8)) == [8] * 12
    assert removed(vitrim.ToMe(r=(16, 8))) == [16, 8] + [0] * 10
    assert removed(vitrim.ToMe(r=8, inflect=-1.0))[:3] == [16, 14, 13]
    assert removed(vitrim.ToMe(r=16))[-1] == 10  # 20 patches left: half
    assert vitrim.ToMe(keep_rate=0.7).counts(196, 12) == [196] * 3 + [137] * 3 + [96] * 3 + [67] * 3


@pytest.mark.parametrize(
    ("method", "change", "before", "after"),
    [
        ("tome:keep_rate=0.7", {"keep_rate": None, "r": 4}, [1, 2, 3], [0, 1, 2, 3]),
        ("tome", {"keep_rate": 0.7}, [0, 1, 2, 3], [1, 2, 3]),
    ],
)
def test_the_blocks_that_merge_cannot_change_between_forwards(
    method: str, change: dict, before: list[int], after: list[int]
) -> None:
    """Blocks that were made idle would stay so, and a merge of nothing would put sources in front of destinations."""
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, method)
    config, out = reduction.config, model(tiny.images())
    with pytest.raises(
        vitrim.VitrimError, match=re.escape(f"acts in blocks {after} and the model was reduced for {before}")
    ):
        reduction.set(**change)
    assert reduction.config is config
    assert torch.equal(model(tiny.images()), out)
    vitrim.reduce_(tiny.HOSTS["vit"](), "tome:keep_rate=0.7").set(keep_rate=0.8)


def test_amount_may_change_between_forwards() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.ToMe(r=0))
    with torch.no_grad():
        for r, left in ((0, 37), (4, 21), (2, 29)):
            reduction.set(r=r)
            model(tiny.images())
            assert reduction.state.num_tokens == left
    with pytest.raises(vitrim.VitrimError, match="must be at least 0"):
        reduction.set(r=-3)
    assert reduction.config.r == 2
