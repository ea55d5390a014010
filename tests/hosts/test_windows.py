"""Windows as batch rows: laid out and back, attention across them, and what merging in them means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tiny
import vitrim
from vitrim.core.tokens import TokenState
from vitrim.hosts.shared.windows import AcrossWindows, Windows, WindowState, relative_bias

GRID = Windows.of((4, 6), 2)


def test_a_map_goes_into_windows_and_back() -> None:
    x = torch.arange(2 * 4 * 6).view(2, 4, 6, 1)
    rows = GRID.split(x)
    assert rows.shape == (12, 4, 1)
    assert rows[1].flatten().tolist() == [2, 3, 8, 9]  # the second of the first row of windows
    assert rows[3].flatten().tolist() == [12, 13, 18, 19]
    assert torch.equal(GRID.join(rows), x)


def test_windows_that_do_not_divide_the_patches_are_refused() -> None:
    with pytest.raises(vitrim.UnsupportedModelError, match=r"^windows of 14 x 14 do not divide 64 x 64 patches: "):
        Windows.of((64, 64), 14)
    assert Windows.of((5, 7), 0) == (1, 1, 5, 7)


def test_attention_across_windows_is_that_of_the_image() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 4, 8, generator=generator) for _ in range(3))
    keys = torch.randn(2, 1, 1, 24, generator=generator)
    bias = keys.expand(2, 6, 1, 24).reshape(12, 1, 1, 24)

    def image(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 6, 2, 4, 8).transpose(1, 2).reshape(2, 2, 24, 8)

    expected = F.scaled_dot_product_attention(image(q), image(k), image(v), attn_mask=keys, scale=0.3)
    attention = AcrossWindows(q, k, v, 0.3, bias, windows=GRID)
    torch.testing.assert_close(image(attention.output()), expected)
    received = ((image(q) @ image(k).transpose(-2, -1)) * 0.3 + keys).softmax(-1).mean((1, 2))
    torch.testing.assert_close(attention.column_mean().view(2, 24), received)
    chosen = torch.tensor([[0, 2]]).expand(12, -1)
    torch.testing.assert_close(attention.select(chosen).output(), attention.output()[:, :, [0, 2]])
    with pytest.raises(vitrim.UnsupportedModelError, match="reads the attention map of a window"):
        attention.probabilities()


def test_relative_positions_are_those_of_every_pair() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 6, 3, generator=generator)
    tables = torch.randn(2, 2, 3, generator=generator), torch.randn(3, 3, 3, generator=generator)
    rows, columns = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    found = relative_bias(q, tables, (rows, columns))
    for i in range(6):
        for j in range(6):
            vector = tables[0][rows[0, i], rows[0, j]] + tables[1][columns[0, i], columns[0, j]]
            torch.testing.assert_close(found[0, :, i, j], q[0, :, i] @ vector)


def test_the_state_of_windows_is_read_as_one_of_images() -> None:
    state = WindowState.of(TokenState.start(torch.zeros(12, 4, 1), 0), GRID)
    whole = state.of_images()
    assert whole.grid == (4, 6)
    assert whole.position[0, :8].tolist() == [0, 1, 6, 7, 2, 3, 8, 9]  # window by window
    assert torch.equal(whole.source.gather(1, whole.position), torch.arange(24).expand(2, -1))


@torch.no_grad()
def test_every_window_keeps_the_same_number_of_tokens() -> None:
    model = tiny.FURTHER["hf_sam"]()
    reduction = vitrim.reduce_(model, "tome:r=4", record=True)
    model(tiny.images())
    assert reduction.tokens_per_block == [128, 112, 96, 80]
    state = reduction.state
    for window in range(4):  # of 12 x 12 patches, 6 x 6 in each
        down, across = window // 2 * 6, window % 2 * 6
        own = state.source.view(2, 12, 12)[:, down : down + 6, across : across + 6]
        assert own.unique().tolist() == list(range(20 * window, 20 * window + 20))
    assert state.size.view(2, 4, 20).sum(2).eq(36).all()
