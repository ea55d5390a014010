"""Random, fixed radial patterns, Top-K and EViT beyond their reference vectors."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
import vitrim
from vitrim.core.registry import methods
from vitrim.methods.fixed_radial import _float32_axis

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
        kept[config.amounts(12)[3].patches((14, 14))] = 1
        grid = kept.view(14, 14)
        assert torch.equal(grid, grid.flip(0))
        assert torch.equal(grid, grid.flip(1))
        assert torch.equal(grid, grid.T)
    assert vitrim.L1(keep_rate=0.5).counts(196, 12)[3] == 84  # float32 gives 92 and a jagged outline


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


# ---- the grid of the forward  -------------------------------------------------------------------------------------

NORMS = {"l1": lambda a, b: a + b, "l2": lambda a, b: math.hypot(a, b), "linf": max}


@pytest.mark.parametrize("grid", [(4, 16), (16, 4), (5, 9), (1, 12), (6, 6)])
@pytest.mark.parametrize("name", NORMS)
def test_rings_on_a_rectangle_by_plain_lines(name: str, grid: tuple[int, int]) -> None:
    """A distance is measured in patches from the centre of the image, along either side."""
    rows, columns = grid
    distance = [
        round(NORMS[name](abs(row - (rows - 1) / 2), abs(column - (columns - 1) / 2)), 9)
        for row in range(rows)
        for column in range(columns)
    ]
    config = methods()[name](keep_rate=0.6, blocks=(1, 2))
    for amount, stage in zip(config.amounts(4)[1:3], (1, 2), strict=True):
        target = int(round(0.6**stage * rows * columns, 9))
        count = {radius: sum(d <= radius for d in distance) for radius in distance}
        radius = min(count, key=lambda r: (abs(count[r] - target), r))
        assert amount.patches(grid) == [patch for patch, d in enumerate(distance) if d <= radius]
    assert config.counts(rows * columns, 4, grid=grid)[1] == len(config.amounts(4)[1].patches(grid))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("options", [{}, {"float32_rings": True}, {"contiguous": True}])
def test_patterns_are_nested_and_symmetric_on_any_grid(name: str, options: dict) -> None:
    for grid in ((4, 16), (7, 3), (2, 9), (14, 14)):
        kept = set(range(grid[0] * grid[1]))
        for amount in methods()[name](**options).amounts(12):
            if amount is None:
                continue
            patches = set(amount.patches(grid))
            assert patches
            assert patches <= kept
            kept = patches


@pytest.mark.parametrize("name", NORMS)
def test_counts_of_a_rectangle_need_its_sides(name: str) -> None:
    config = methods()[name]()
    with pytest.raises(vitrim.VitrimError, match=r"24 patches make no square: give counts\(..., grid="):
        config.counts(24, 12)
    with pytest.raises(vitrim.VitrimError, match="a grid of 4 x 7 does not hold 24 patches"):
        config.counts(24, 12, grid=(4, 7))
    assert len(config.counts(24, 12, grid=(4, 6))) == 12


@pytest.mark.parametrize("method", ["l1:keep_rate=0.5", "l2:keep_rate=0.5", "linf:keep_rate=0.5"])
@pytest.mark.parametrize("own", [(32, 128), (64, 64)])
def test_patterns_follow_the_grid_of_the_forward(method: str, own: tuple[int, int]) -> None:
    """The same 64 patches as 4 x 16 and as 8 x 8, on a model of either size."""
    model = tiny.vit(img_size=own, patch_size=8, dynamic_img_size=True)()
    reduction = vitrim.reduce_(model, method)
    pattern = reduction.config.amounts(4)[3]
    for grid in ((4, 16), (8, 8), (16, 4), (3, 5)):
        with torch.no_grad():
            model(torch.randn(2, 3, 8 * grid[0], 8 * grid[1]))
        assert reduction.state.grid == grid
        assert (reduction.state.position[0, 1:] - 1).tolist() == pattern.patches(grid)


def test_published_coordinates_are_those_of_a_float32_linspace() -> None:
    for side in range(1, 80):
        expected = torch.linspace(-side // 2, side // 2, side, dtype=torch.float32).abs()
        assert torch.equal(torch.from_numpy(_float32_axis(side)), expected)
