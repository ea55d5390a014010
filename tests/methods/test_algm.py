"""ALGM against its rules written in plain lines, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tiny
import vitrim
from vitrim.core.assignment import Hard
from vitrim.methods.algm import mean_cosine, window_patches


def plain_local(patches: Tensor, rows: int, columns: int, threshold: float) -> list[set[frozenset[int]]]:
    """The windows that merge in every image of ``patches`` (B, P, C), by the rule."""
    found = []
    for image in patches.double():
        scores = {}
        for top in range(0, rows, 2):
            for left in range(0, columns, 2):
                window = [(top + i) * columns + left + j for i in (0, 1) for j in (0, 1)]
                pairs = [(a, b) for a in window for b in window if a != b]
                cosines = [torch.cosine_similarity(image[a], image[b], dim=0) for a, b in pairs]
                scores[frozenset(window)] = float(sum(cosines)) / 12
        found.append(scores)
    count = min(sum(score >= threshold for score in scores.values()) for scores in found)
    return [set(sorted(scores, key=lambda window, s=scores: -s[window])[:count]) for scores in found]


def plain_global(patches: Tensor, num_prefix: int, number: int) -> list[set[tuple[int, int]]]:
    """The (source, destination) pairs that merge in every image of ``patches`` (B, P, C) in block ``number``."""
    images, means, deviations = [], [], []
    for image in patches.double():
        pairs = {}
        for source in range(num_prefix % 2, len(image), 2):
            others = range(1 - num_prefix % 2, len(image), 2)
            cosine = {other: float(torch.cosine_similarity(image[source], image[other], dim=0)) for other in others}
            partner = max(cosine, key=lambda other, c=cosine: c[other])
            pairs[source, partner] = cosine[partner]
        best = torch.tensor(list(pairs.values()), dtype=torch.float64)
        means.append(best.mean())
        deviations.append((best - best.mean()).square().sum().div(len(best) - 1).sqrt())
        images.append(pairs)
    least = sum(means) / len(means) + sum(deviations) / len(deviations) / number
    count = min(sum(value > least for value in pairs.values()) for pairs in images)
    return [set(sorted(pairs, key=lambda pair, p=pairs: -p[pair])[:count]) for pairs in images]


def decided(model: torch.nn.Module, images: Tensor) -> dict[int, tuple[Tensor, Hard | None, int]]:
    """By depth: the patches (B, P, C) that a reducer saw, what it decided, and the prefix."""
    seen = {}
    for depth, block in enumerate(model.blocks):

        def note(module, args, out, depth=depth):
            seen[depth] = args[0][:, args[2].num_prefix :], out, args[2].num_prefix

        block.reducer.register_forward_hook(note)
    with torch.no_grad():
        model(images)
    return seen


def members(hard: Hard, image: int, num_prefix: int) -> dict[int, set[int]]:
    """The patches that join each anchor in one image."""
    groups: dict[int, set[int]] = {}
    for moved, into in zip(hard.moved[image].tolist(), hard.into[image].tolist(), strict=True):
        groups.setdefault(int(hard.anchor[image, into]) - num_prefix, set()).add(moved - num_prefix)
    return groups


@pytest.mark.parametrize("prefix", [0, 1])
def test_both_steps_follow_the_rules_written_plainly(prefix: int) -> None:
    host = {"class_token": False, "global_pool": "avg"} if prefix == 0 else {}
    model = tiny.vit(img_size=(24, 32), **host)().double()
    images = tiny.images(3, size=32)[:, :, :24].double()
    vitrim.reduce_(model, vitrim.ALGM(threshold=0.3, global_block=2))
    seen = decided(model, images)
    assert sorted(seen) == [0, 2]
    patches, hard, num_prefix = seen[0]
    assert isinstance(hard, Hard)
    expected = plain_local(patches, 6, 8, 0.3)
    assert 0 < len(expected[0]) < 12
    for image in range(3):
        groups = members(hard, image, num_prefix)
        assert {frozenset((anchor, *joined)) for anchor, joined in groups.items()} == expected[image]
        assert all(anchor == min((anchor, *joined)) for anchor, joined in groups.items())
        assert hard.anchor[image].tolist() == sorted(hard.anchor[image].tolist())  # raster order
    patches, hard, num_prefix = seen[2]
    assert isinstance(hard, Hard)
    expected = plain_global(patches, num_prefix, 3)
    assert len(expected[0]) > 0
    for image in range(3):
        found = members(hard, image, num_prefix)
        assert {(source, anchor) for anchor, sources in found.items() for source in sources} == expected[image]


def test_merged_tokens_are_means_of_their_windows() -> None:
    model = tiny.vit(class_token=False, global_pool="", num_classes=0)().double()
    reduction = vitrim.reduce_(model, vitrim.ALGM(threshold=-1.0), record=True)
    seen = decided(model, tiny.images().double())
    assert reduction.tokens_per_block[0] == 9  # every window
    state = reduction.states[1]
    assert torch.equal(state.size, torch.full_like(state.size, 4.0))
    patches, hard, _ = seen[0]
    pooled = hard.pool(patches, torch.ones(patches.shape[:2], dtype=torch.float64))
    torch.testing.assert_close(pooled, patches[:, window_patches(6, 6)].mean(2))


def test_a_window_of_equal_patches_has_cosine_one_and_of_opposite_ones_a_third_below() -> None:
    one = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    assert mean_cosine(
        torch.stack([one, one * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])]), window_patches(2, 2)
    ).flatten().tolist() == pytest.approx([1.0, -1 / 3])


def test_amounts_beyond_what_a_step_can_merge_are_told_and_counted() -> None:
    # of 36 patches 9 windows merge, of 36 tokens 18 pairs
    for r, counts in (([10, 0], [9, 9, 9, 9]), ([0, 20], [36, 36, 18, 18])):
        model = tiny.HOSTS["vit"]()
        config = vitrim.ALGM(r=r)
        with pytest.warns(vitrim.ReductionWarning, match="asks for more than 36 patch tokens allow"):
            reduction = vitrim.reduce_(model, config, record=True)
        model(tiny.images())
        assert [count - 1 for count in reduction.tokens_per_block[:-1]] == counts[:-1] == config.counts(36, 4)[:-1]
        with pytest.raises(vitrim.VitrimError, match="refused because strict=true"):
            vitrim.reduce_(tiny.HOSTS["vit"](), vitrim.ALGM(r=r, strict=True))


def test_published_blocks_and_those_of_other_depths() -> None:
    assert vitrim.ALGM().stages(12) == (0, 4)
    assert vitrim.ALGM().stages(24) == (0, 6)
    assert vitrim.ALGM().stages(4) == (0, 2)
    assert vitrim.ALGM().stages(2) == (0, 1)


def test_the_last_row_and_column_of_an_odd_grid_are_in_no_window() -> None:
    model = tiny.vit(img_size=(20, 12))()
    reduction = vitrim.reduce_(model, vitrim.ALGM(threshold=-1.0), record=True)
    with torch.no_grad():
        model(tiny.images(size=20)[:, :, :, :12])
    size = reduction.states[1].size[0, 1:]  # 5 x 3 patches: two windows, then what is left of every row
    assert size.tolist() == [4.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0]
