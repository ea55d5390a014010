"""Positions of three axes where image tokens were selected: those of the whole prompt, at what is left of it.

Transformers numbers the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` makes an environment that has it")
IMAGE, WORD, WIDTH = 1, 9, 5
GRIDS = [(4, 6), (3, 3), (7, 2)]
KEPT = [torch.tensor([0, 5, 6, 23]), torch.tensor([4]), torch.tensor([1, 2, 3])]
CONFIG = SimpleNamespace(image_token_id=IMAGE, vision_config=SimpleNamespace(spatial_merge_size=2))

PROMPTS = ["ww0www1www2www", "ww0", "w1ww0w2", "0", "w01w", "012", "2www10"]
"""Words, and images by their grids."""
CUTS = [[], [3], [2, 4], [1, 5, 6]]


def whole(prompt: str) -> tuple[list[int], Tensor, Tensor]:
    """Tokens and positions (3, L) of a whole prompt, and (L,) bool: what is left of it.

    Transformers takes images that touch for a single one, so every other image is called a video, of one frame.
    """
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    tokens, types, left, grids = [], [], [], {1: [], 2: []}
    kind = 1
    for part in prompt:
        if part == "w":
            tokens, types, left = [*tokens, WORD], [*types, 0], [*left, True]
            continue
        rows, columns = GRIDS[int(part)]
        tokens += [IMAGE] * (rows * columns)
        types += [kind] * (rows * columns)
        left += [place in KEPT[int(part)].tolist() for place in range(rows * columns)]
        grids[kind].append([1, 2 * rows, 2 * columns])
        kind = 3 - kind
    model = SimpleNamespace(config=CONFIG)
    model.get_vision_position_ids = partial(Qwen2VLModel.get_vision_position_ids, model)
    images, videos = (torch.tensor(found) if found else None for found in grids.values())
    positions, _ = Qwen2VLModel.get_rope_index(model, torch.tensor([tokens]), torch.tensor([types]), images, videos)
    return tokens, positions[:, 0], torch.tensor(left)


class Asked:
    """A prompt as a server sees it: ``ids`` (L,) of what is left, ``expected`` positions, and the ``next`` of all."""

    def __init__(self, prompt: str) -> None:
        from vitrim.serving.vllm.qwen import Axes, written

        tokens, positions, left = whole(prompt)
        self.ids, self.expected = torch.tensor(tokens)[left], positions[:, left]
        self.next = int(positions.max()) + 1
        self.model = SimpleNamespace(config=CONFIG, grid_fields=Axes.grid_fields, grid=Axes.grid)
        self.model.recompute_mrope_positions = partial(Axes.recompute_mrope_positions, self.model)
        self.features, self.embeddings, start = [], [], 0
        for number, part in enumerate(prompt):
            if part == "w":
                start += 1
                continue
            (rows, columns), kept = GRIDS[int(part)], KEPT[int(part)]
            place = SimpleNamespace(offset=start, length=len(kept))
            place.get_embeds_indices_in_range = lambda first, last: (first, last)
            table = SimpleNamespace(data=torch.tensor([1, 2 * rows, 2 * columns]))
            self.features.append(SimpleNamespace(mm_position=place, data={"image_grid_thw": table}))
            own = torch.full((len(kept), WIDTH), float(number))
            self.embeddings.append(torch.cat([own, written(kept, rows, columns)], dim=1))
            start += len(kept)
        self.positions, self.behind = Axes.get_mrope_input_positions(self.model, self.ids.tolist(), self.features)

    def steps(self, cuts: list[int]) -> Iterator[tuple[int, int, list[Tensor]]]:
        """First and last token of the pieces of the prompt, and the embeddings in each."""
        cuts = [cut for cut in cuts if cut < len(self.ids)]
        for first, last in zip([0, *cuts], [*cuts, len(self.ids)], strict=True):
            here = []
            for feature, own in zip(self.features, self.embeddings, strict=True):
                start = feature.mm_position.offset
                part = own[max(first - start, 0) : max(last - start, 0)]
                here += [part] if len(part) else []
            yield first, last, here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_places_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    from vitrim.serving.vllm.qwen import read, written

    rows, columns = 3000, 1000
    kept = torch.arange(0, 3_000_000, 999)
    found, extent = read(written(kept, rows, columns).to(dtype))
    assert torch.equal(found, torch.stack([torch.zeros_like(kept), kept // columns, kept % columns]))
    assert extent.tolist() == [3000] * len(kept)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_numbered_as_in_the_whole_prompt_before_a_pixel_is_seen(prompt: str) -> None:
    asked = Asked(prompt)
    words = asked.ids != IMAGE
    assert torch.equal(asked.positions[:, words], asked.expected[:, words])
    assert asked.behind + len(asked.ids) == asked.next


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_is_left_stands_where_it_stood(prompt: str, cuts: list[int]) -> None:
    """However the prompt is cut into pieces; the first of them may come from a cache.

    As vLLM's first runner does it: it keeps one tensor, and asks in every step, also for answers.
    """
    asked = Asked(prompt)
    positions = asked.positions
    for first, last, here in asked.steps(cuts):
        shown, found, offset = asked.model.recompute_mrope_positions(asked.ids.tolist(), here, positions, first)
        positions.copy_(found)
        assert offset + len(asked.ids) == asked.next
        assert torch.equal(positions[:, first:last], asked.expected[:, first:last])
        assert all(part.shape[1] == WIDTH for part in shown)
    assert torch.equal(positions, asked.expected)
    length = len(asked.ids)
    _, found, offset = asked.model.recompute_mrope_positions(asked.ids.tolist(), [], positions, length)
    assert torch.equal(found, asked.expected)
    assert offset + length == asked.next


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_other_runner_finds_the_same(prompt: str, cuts: list[int]) -> None:
    """vLLM's second runner, on GPUs, keeps numbers, not the tensor: its own code, beside a plain table of numbers."""
    from vllm.v1.worker.gpu.model_states.mm_pruning import MultiModalPruner

    asked = Asked(prompt)
    length, table = len(asked.ids), torch.zeros(3, 64, dtype=torch.int32)
    table[:, :length] = asked.positions
    offsets = [asked.behind]

    def update(row: int, positions: Tensor, offset: int) -> None:
        table[:, :length] = positions
        offsets.append(offset)

    def array(*values: int) -> Any:
        return torch.tensor(values).numpy()

    rope = SimpleNamespace(read_prefill_positions=lambda row, end: table[:, :end], update_prefill_positions=update)
    pruner = MultiModalPruner(asked.model, rope, SimpleNamespace(mm_features={"one": asked.features}), WIDTH)
    states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=asked.ids[None]))
    for first, last, here in asked.steps(cuts):
        batch = SimpleNamespace(req_ids=["one"], idx_mapping_np=array(0), prefill_len_np=array(length))
        batch.num_computed_prefill_tokens_np, batch.num_scheduled_tokens = array(first), array(last - first)
        assert all(part.shape[1] == WIDTH for part in pruner.recompute(here, batch, states))
        assert torch.equal(table[:, first:last].long(), asked.expected[:, first:last])
    assert offsets[-1] + length == asked.next
