"""Random, fixed radial patterns, Top-K and EViT beyond their reference vectors."""

from __future__ import annotations

import pytest
import torch

import tiny
import vitrim
from vitrim.registry import methods

RULES = {  # 196 patches, keep rate 0.7, three stages: specs of the three papers
    "ceil_current": (138, 97, 68),
    "floor_initial_power": (137, 96, 67),
    "floor_initial": (137, 137, 137),
    "floor_current": (137, 95, 66),
}


@pytest.mark.parametrize("rule", RULES)
def test_keep_rules_give_the_counts_of_their_papers(rule: str) -> None:
    counts = vitrim.TopK(keep_rate=0.7, rule=rule).counts(196, 12)
    assert tuple(counts[block] for block in (3, 6, 9)) == RULES[rule]


def test_evit_counts_with_its_fused_token() -> None:
    assert [vitrim.EViT(keep_rate=0.7).counts(196, 12)[block] for block in (3, 6, 9)] == [139, 99, 71]


PUBLISHED = {  # counts on 14 x 14 with the published float32 rings, "Which Tokens to Use?" settings
    ("l1", 0.25): (40, 12, 4),
    ("l1", 0.5): (92, 40, 24),
    ("l1", 0.7): (136, 92, 68),
    ("l1", 0.9): (172, 156, 136),
    ("l2", 0.25): (52, 12, 4),
    ("l2", 0.5): (96, 52, 24),
    ("l2", 0.7): (140, 96, 68),
    ("l2", 0.9): (176, 156, 140),
    ("linf", 0.25): (36, 16, 4),
    ("linf", 0.5): (100, 36, 16),
    ("linf", 0.7): (144, 100, 64),
    ("linf", 0.9): (196, 144, 144),
}


@pytest.mark.parametrize(("name", "rate"), PUBLISHED)
def test_published_ring_counts(name: str, rate: float) -> None:
    config = methods()[name](keep_rate=rate, float32_rings=True)
    counts = config.counts(196, 12)
    assert tuple(counts[block] for block in (3, 6, 9)) == PUBLISHED[name, rate]


def test_exact_rings_are_symmetric() -> None:
    for name in ("l1", "l2", "linf"):
        config = methods()[name](keep_rate=0.5)
        kept = torch.zeros(196)
        kept[config.schedule(12)[3].patches(196)] = 1
        grid = kept.view(14, 14)
        assert torch.equal(grid, grid.flip(0))
        assert torch.equal(grid, grid.flip(1))
        assert torch.equal(grid, grid.T)
    assert vitrim.L1(keep_rate=0.5).counts(196, 12)[3] == 84  # float32 gives 92 and a jagged outline


def test_fixed_patterns_need_a_square_grid() -> None:
    model = tiny.vit(img_size=(24, 32))()
    with pytest.raises(vitrim.VitrimError, match="square grid of patches, and 48"):
        vitrim.reduce_(model, vitrim.L2())
    model(torch.zeros(1, 3, 24, 32))  # left as it was
    with pytest.raises(vitrim.VitrimError, match="not reduced"):
        vitrim.restore_(model)


def test_topk_keeps_the_highest_class_attention() -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, vitrim.TopK(keep_rate=0.5, blocks=(0,)), record=True)
    images = tiny.images().double()
    rows = []
    model.blocks[0].reducer.register_forward_hook(lambda module, args, out: rows.append(args[1].class_row().mean(1)))
    with torch.no_grad():
        model(images)
    expected = rows[0][:, 1:].topk(18, dim=1).indices + 1
    assert torch.equal(reduction.states[1].position[:, 1:], expected)


def test_scores_without_a_class_token_are_refused_with_the_substitute_named() -> None:
    model = tiny.HOSTS["no_class_token_avg"]()
    with pytest.raises(vitrim.UnsupportedModelError, match="has none; use score=column_mean"):
        vitrim.reduce_(model, vitrim.TopK())
    vitrim.reduce_(model, vitrim.TopK(score="column_mean"))
    assert model(tiny.images()).shape == (2, 5)


def test_evit_fused_token_is_the_weighted_sum_and_accounts_for_all() -> None:
    model = tiny.HOSTS["vit"]().double()
    reduction = vitrim.reduce_(model, vitrim.EViT(keep_rate=0.5, blocks=(0,)), record=True)
    with torch.no_grad():
        model(tiny.images().double())
    state = reduction.states[1]
    assert state.num_tokens == 1 + 18 + 1
    assert not state.lost
    assert (state.size[:, -1] == 18).all()
    assert (state.size.sum(1) == 37).all()


def test_random_differs_per_image_and_repeats_with_the_seed() -> None:
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, vitrim.Random(keep_rate=0.5))
    seen = []
    with torch.no_grad():
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            model(tiny.images())
            seen.append(reduction.state.position.clone())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][0].sort().values, seen[0][1].sort().values)


def test_evit_gradients_of_plain_lines() -> None:
    """The fused token's weights carry gradient into queries and keys, as in the published code."""
    model, images = tiny.HOSTS["vit"]().double().train(), tiny.images(3).double()
    vitrim.reduce_(model, vitrim.EViT(keep_rate=0.6, blocks=(1, 2)))
    model(images).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    vitrim.restore_(model)
    model.zero_grad()
    x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for depth, block in enumerate(model.blocks):
        heads = block.attn.num_heads
        q, k, v = block.attn.qkv(block.norm1(x)).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(2, 3) * block.attn.scale).softmax(-1)
        x = x + block.attn.proj((attention @ v).transpose(1, 2).flatten(2))
        if depth in (1, 2):
            score = attention[:, :, 0, 1:].mean(1)
            keep = -(-score.shape[1] * 6 // 10)
            order = score.argsort(1, descending=True)[:, :, None]
            patches = x[:, 1:].take_along_dim(order, 1)
            weight = score[:, :, None].take_along_dim(order, 1)
            fused = (patches * weight)[:, keep:].sum(1, keepdim=True)
            x = torch.cat([x[:, :1], patches[:, :keep], fused], 1)
        x = x + block.mlp(block.norm2(x))
    model.forward_head(model.norm(x)).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-10, rtol=1e-9, msg=name)
