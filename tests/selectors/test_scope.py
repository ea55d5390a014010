"""SCOPE: the worked example of its specification, a plain loop over all gains, and what follows from the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vitrim
from vitrim.core.selection import Seen
from vitrim.selectors.scope import covering

EXAMPLE = torch.tensor([[1.0, 0], [1, 1], [0, 1], [0, 2], [3, 0]], dtype=torch.float64)
SALIENCY = torch.tensor([0.4, 0.1, 0.2, 0.1, 0.2], dtype=torch.float64)


def given(tokens: int, width: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    return features, torch.rand(tokens, generator=generator, dtype=torch.float64)


def direct(features: Tensor, weights: Tensor, count: int) -> list[int]:
    """All gains, for every pick; of gains that differ by rounding alone the first."""
    alike = torch.nn.functional.cosine_similarity(features[:, None], features[None], dim=2)
    covered, picked = torch.zeros(len(features), dtype=features.dtype), []
    for _ in range(count):
        gains = (alike - covered).clamp(min=0).sum(dim=1) * weights
        gains[picked] = -1
        picked.append(int((gains >= gains.max() - 1e-12).nonzero()[0]))
        covered = torch.maximum(covered, alike[picked[-1]])
    return picked


def test_the_worked_example() -> None:
    assert covering(EXAMPLE, SALIENCY, 3).tolist() == [0, 2, 1]
    assert covering(EXAMPLE, torch.ones(5), 3).tolist() == [1, 0, 2]
    seen = Seen(EXAMPLE[None], scores=SALIENCY[None])
    (choice,) = vitrim.parse_selector("scope:tokens=2").select(seen)
    assert choice.kept.tolist() == [0, 2]
    (choice,) = vitrim.parse_selector("scope:tokens=2,saliency=none").select(seen)
    assert choice.kept.tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [1, 2, 15, 40, 60])
def test_old_gains_find_the_order_of_all_gains(tokens: int, seed: int) -> None:
    """All tokens, and so every step; 40 and 60 are more than are computed at once."""
    features, weights = given(tokens, seed=seed)
    assert covering(features, weights, tokens).tolist() == direct(features, weights, tokens)


def test_old_gains_find_the_largest_where_tokens_weigh_the_same() -> None:
    """Two tokens that only add to each other gain the same, but for rounding."""
    features, _ = given(60)
    alike = torch.nn.functional.cosine_similarity(features[:, None], features[None], dim=2)
    covered, picked = torch.zeros(60, dtype=features.dtype), covering(features, torch.ones(60), 60).tolist()
    assert sorted(picked) == list(range(60))
    for number, place in enumerate(picked):
        gains = (alike - covered).clamp(min=0).sum(dim=1)
        gains[picked[:number]] = -1
        assert gains[place] >= gains.max() - 1e-12
        covered = torch.maximum(covered, alike[place])


def test_only_the_ratios_of_saliency_count_and_its_exponent_takes_it_away() -> None:
    features, scores = given(40)
    kept = {
        (text, factor): tuple(
            vitrim.parse_selector(text).select(Seen(features[None], scores=factor * scores[None]))[0].kept.tolist()
        )
        for text in (
            "scope:tokens=9",
            "scope:tokens=9,alpha=0",
            "scope:tokens=9,alpha=3",
            "scope:tokens=9,saliency=none",
        )
        for factor in (1.0, 64.0)
    }
    assert kept["scope:tokens=9", 1.0] == kept["scope:tokens=9", 64.0]
    assert kept["scope:tokens=9,alpha=0", 1.0] == kept["scope:tokens=9,saliency=none", 1.0]
    assert len(set(kept.values())) == 3
    assert kept["scope:tokens=9,alpha=3", 1.0] == tuple(sorted(direct(features, scores**3, 9)))


def test_what_repeats_a_taken_token_is_taken_last() -> None:
    """Tokens twice, the second time longer: as long as one adds something, none is repeated."""
    features, weights = given(10, width=16)
    order = covering(torch.cat([features, 3 * features]), torch.cat([weights, weights]), 20).tolist()
    assert {place % 10 for place in order[:10]} == set(range(10))
    equal = covering(features[:1].repeat(30, 1), torch.ones(30), 30)
    assert equal.tolist() == list(range(30))


def test_no_attention_is_asked_for_where_none_weighs() -> None:
    selector = vitrim.parse_selector("scope:saliency=none,keep=0.5")
    features, _ = given(12)
    assert selector.mask(features).nonzero().squeeze(1).tolist() == sorted(direct(features, torch.ones(12), 6))
    with pytest.raises(vitrim.VitrimError, match="attention"):
        vitrim.parse_selector("scope").mask(features)
