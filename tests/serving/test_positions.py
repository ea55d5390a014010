"""Positions of three axes where image tokens were selected: those of the whole prompt, at what is left of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")
IMAGE, START, END, WORD = 1, 2, 3, 9
GRIDS = [(4, 6), (3, 3), (7, 2)]
KEPT = [torch.tensor([0, 5, 6, 23]), torch.tensor([4]), torch.tensor([1, 2, 13])]


def whole() -> tuple[list[int], Tensor, Tensor]:
    """Tokens and positions (3, L) of a prompt with three images, and (L,) bool: what is left of it."""
    tokens, positions, left, position = [WORD, WORD, START], [[0, 1, 2]] * 3, [True] * 3, 3
    positions = [list(axis) for axis in positions]
    for (rows, columns), kept in zip(GRIDS, KEPT, strict=True):
        for place in range(rows * columns):
            tokens.append(IMAGE)
            for axis, value in zip(positions, (0, place // columns, place % columns), strict=True):
                axis.append(position + value)
            left.append(place in kept.tolist())
        position += max(rows, columns)
        for word in (END, WORD, START):
            tokens.append(word)
            left.append(True)
            for axis in positions:
                axis.append(position)
            position += 1
    return tokens, torch.tensor(positions), torch.tensor(left)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_places_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    from vitrim.serving.vllm.qwen import read, written

    columns = 1000
    kept = torch.arange(0, 3_000_000, 999)
    found = read(written(kept, columns).to(dtype))
    assert torch.equal(found, torch.stack([torch.zeros_like(kept), kept // columns, kept % columns]))


@pytest.mark.parametrize("cuts", [[], [5], [3, 4], [1, 8, 9, 13]])
def test_what_is_left_stands_where_it_stood(cuts: list[int]) -> None:
    """However the prompt is cut into pieces; the first of them may come from a cache."""
    from vitrim.serving.vllm.qwen import Axes, written

    tokens, expected, left = whole()
    ids = torch.tensor(tokens)[left]
    config = SimpleNamespace(image_token_id=IMAGE, vision_config=SimpleNamespace(spatial_merge_size=2))
    model = SimpleNamespace(config=config, grid_fields=Axes.grid_fields, grid=Axes.grid)
    features, starts = [], (ids == START).nonzero().squeeze(1)
    for (rows, columns), kept, start in zip(GRIDS, KEPT, starts.tolist(), strict=False):
        place = SimpleNamespace(offset=start + 1, length=len(kept))
        table = SimpleNamespace(data=torch.tensor([1, 2 * rows, 2 * columns]))
        features.append(SimpleNamespace(mm_position=place, data={"image_grid_thw": table}))
    positions, behind = Axes.get_mrope_input_positions(model, ids.tolist(), features)
    words = ids != IMAGE
    assert torch.equal(positions[:, words], expected[:, left][:, words])  # of text, before a pixel is seen
    embeddings = [
        torch.cat([torch.full((len(kept), 5), float(number)), written(kept, columns)], dim=1)
        for number, ((_, columns), kept) in enumerate(zip(GRIDS, KEPT, strict=True))
    ]
    for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        here = []
        for feature, own in zip(features, embeddings, strict=True):
            place = feature.mm_position
            part = own[max(first - place.offset, 0) : max(last - place.offset, 0)]
            here += [part] if len(part) else []
        shown, positions, delta = Axes.recompute_mrope_positions(model, ids.tolist(), here, positions, first)
        assert delta == behind
        assert all(part.shape[1] == 5 for part in shown)
    assert torch.equal(positions, expected[:, left])
    assert behind == int(expected[:, -1].max()) + 1 - len(ids)
