from __future__ import annotations

import pytest
import torch

import tiny
import vitrim
from vitrim.core.attention import Attention
from vitrim.core.plan import Layer


def one_block(config: vitrim.ToFu, x: torch.Tensor, num_layers: int = 1) -> tuple[torch.Tensor, vitrim.TokenState]:
    """Tokens ``x`` (B, N, C) after the reduction of the last of ``num_layers`` blocks; the tokens are the keys."""
    state = vitrim.TokenState.start(x, 1)
    layer = Layer(num_layers - 1, num_layers, x.shape[2], 1, 0, 1, True, (1, x.shape[1] - 1))
    keys = x[:, None]
    return tiny.reducer(config, layer).reduce("between", x, Attention(keys, keys, keys, 1.0), state)


@pytest.mark.parametrize("norm_of", ["average", "destination"])
def test_merged_tokens_keep_the_largest_norm(norm_of: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    out, state = one_block(vitrim.ToFu(keep_rate=0.6, prune_until=-1, norm_of=norm_of), x)
    assert out.shape[1] == 9
    for image in range(2):
        for token in range(9):
            members = x[image, state.source[image] == token]
            anchor = x[image, state.position[image, token]]
            if len(members) == 1:
                assert torch.equal(out[image, token], anchor)
                continue
            mean, largest = members.mean(0), members.norm(dim=1).max()
            reference = mean.norm() if norm_of == "average" else anchor.norm()
            torch.testing.assert_close(out[image, token], mean / reference * largest)
            if norm_of == "average":
                torch.testing.assert_close(out[image, token].norm(), largest)


def test_pruning_blocks_change_no_token() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 13, 6)
    out, state = one_block(vitrim.ToFu(keep_rate=0.6, prune_until=0), x)
    assert torch.equal(out, torch.stack([x[i, state.position[i]] for i in range(2)]))
    assert state.lost
    assert (state.size == 1).all()


def test_which_blocks_prune() -> None:
    layers = [Layer(depth, 6, 8, 1, 0, 1, True, (4, 4)) for depth in range(6)]
    assert [vitrim.ToFu().prunes_at(layer.depth, layer.num_layers) for layer in layers] == [True] * 4 + [False] * 2
    assert not vitrim.ToFu(prune_until=-1).prunes_at(0, 6)


def test_zero_tokens_give_no_nan() -> None:
    out, _ = one_block(vitrim.ToFu(keep_rate=0.6, prune_until=-1), torch.zeros(1, 9, 4))
    assert out.isfinite().all()


def test_a_list_of_rates_is_one_for_every_block() -> None:
    config = vitrim.ToFu(keep_rate=(0.9, 0.5, 1.0, 0.8))
    assert config.counts(36, 4) == [33, 17, 17, 14]
    model = tiny.HOSTS["vit"]()
    reduction = vitrim.reduce_(model, "tofu:keep_rate=[0.9,0.5,1.0,0.8]", record=True)
    with torch.no_grad():
        found = model(tiny.images())
        assert [tokens - 1 for tokens in reduction.tokens_per_block] == [33, 17, 17, 14]
        reduction.set(keep_rate=0.9)
        one = model(tiny.images())
        reduction.set(keep_rate=(0.9, 0.9, 0.9, 0.9))
        assert torch.equal(model(tiny.images()), one)
        assert not torch.equal(found, one)
