"""OTPrune: the determinants themselves, for every candidate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vitrim
from vitrim.core.selection import Seen
from vitrim.selectors.otprune import transported


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("tokens", "width"), [(9, 40), (12, 60), (14, 5)])
def test_each_token_makes_the_determinant_largest(tokens: int, width: int) -> None:
    """Channels of unit length over the tokens; I + 0.01 S S^T, and the best of all determinants at each step."""
    x = features(2, tokens, width) * features(2, tokens, 1, seed=1)
    for own, order in zip(x, transported(x, 6).tolist(), strict=True):
        columns = own / own.norm(dim=0)
        alike = columns @ columns.T
        kernel = torch.eye(tokens, dtype=own.dtype) + 0.01 * alike @ alike.T
        for number in range(6):
            before = order[:number]
            values = {
                place: float(torch.linalg.det(kernel[[*before, place]][:, [*before, place]]))
                for place in range(tokens)
                if place not in before
            }
            assert order[number] == max(values, key=lambda place: values[place])


def test_a_channel_has_one_length_whatever_its_scale() -> None:
    x = features(1, 20, 30)
    scaled = x * torch.arange(1, 31)
    assert torch.equal(transported(x, 8), transported(scaled, 8))
    assert not torch.equal(transported(x, 8), transported(x * torch.arange(1, 21)[:, None], 8))


def test_equal_tokens_are_picked_once_each() -> None:
    """Of a wide image whose similarities are large, too: half a million on the diagonal of the kernel."""
    same = torch.ones(1, 40, 8192)
    assert transported(same, 40)[0].sort().values.tolist() == list(range(40))
    few = features(1, 3, 8192).float().repeat(1, 4, 1)
    assert transported(few, 12)[0].sort().values.tolist() == list(range(12))
    assert {place % 3 for place in transported(few, 3)[0].tolist()} == {0, 1, 2}


def test_kept_in_raster_order() -> None:
    x = features(1, 12, 20)
    selector = vitrim.parse_selector("otprune:keep=0.33")
    (choice,) = selector.select(Seen(x))
    assert choice.kept.tolist() == sorted(transported(x, 4)[0].tolist())
    assert selector.count(12) == 4
