from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tiny
import vitrim
from vitrim.core.attention import MAP_BYTES, Attention
from vitrim.core.plan import Layer
from vitrim.engines.memory import peak_memory_mib


def reducer(depth: int, num_layers: int = 5, **options: Any) -> vitrim.Reducer:
    return tiny.reducer(vitrim.PiToMe(**options), Layer(depth, num_layers, 4, 1, 0, 1, True, (1, 8)))


def test_which_blocks_protect_and_how_the_margin_falls() -> None:
    assert [reducer(depth).protects for depth in range(5)] == [False] * 3 + [True] * 2
    assert [reducer(depth, protect="early").protects for depth in range(5)] == [True] * 3 + [False] * 2
    assert all(reducer(depth, protect="always").protects for depth in range(5))
    assert [round(reducer(depth).margin, 3) for depth in range(5)] == [0.75, 0.6, 0.45, 0.3, 0.15]


@pytest.mark.parametrize("patches", [7, 1500])  # all rows at once, some at a time
def test_energy_is_the_mean_over_all_pairs(patches: int) -> None:
    keys = torch.nn.functional.normalize(torch.randn(1, patches, 8), dim=-1)
    cosine = keys[0].double() @ keys[0].double().T
    excess = cosine - 0.9  # the margin of the first block
    expected = torch.where(excess > 0, excess, excess.exp() - 1).mean(1)
    found = []
    peak = peak_memory_mib(lambda: found.append(reducer(0, margin=0.9).energy(keys)))
    torch.testing.assert_close(found[0][0].double(), expected, atol=1e-5, rtol=1e-5)
    assert peak is not None
    assert peak < 15  # all pairs of 1,500 take 8.6 MiB, several times


def test_macs_of_the_energy_count_each_pair_once_and_are_those_of_the_meta_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = torch.nn.functional.normalize(torch.randn(1, 36, 8), dim=-1)
    monkeypatch.setitem(MAP_BYTES, "cpu", 9 * 36 * 4)  # nine rows at once
    rows = [36, 27, 18, 9]  # the columns that are left in each of four steps
    for tokens in (keys, keys.to("meta")):
        with FlopCounterMode(display=False) as counter:
            reducer(0).energy(tokens)
        assert counter.get_total_flops() == 2 * sum(9 * columns * 8 for columns in rows)


def test_tokens_without_look_alikes_are_protected() -> None:
    """Three look-alike pairs of one direction and two singles: the singles stay, whatever else happens."""
    base = torch.eye(8, dtype=torch.float64)[:3]
    noise = 0.05 * torch.randn(1, 6, 8, dtype=torch.float64)
    crowd = base[0] + noise[0]
    keys = torch.stack([crowd[0], base[1], crowd[1], crowd[2], base[2], crowd[3], crowd[4], crowd[5]])[None]
    tokens = torch.cat([torch.ones(1, 1, 8, dtype=torch.float64), keys], dim=1)
    state = vitrim.TokenState.start(tokens, 1)
    attention = Attention(tokens[:, None], tokens[:, None], tokens[:, None], 1.0)
    _, after = reducer(4, protect="always", keep_rate=0.6).reduce("between", tokens, attention, state)
    assert after.num_patches == 5
    kept = {int(position): float(size) for position, size in zip(after.position[0], after.size[0], strict=True)}
    assert kept[2] == kept[5] == kept[0] == 1.0  # both singles and the class token
    assert sum(kept.values()) == 9.0
