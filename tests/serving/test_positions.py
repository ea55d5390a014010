"""Positions of three axes where tokens were selected: those of the whole prompt, at what is left of it.

Transformers numbers whole prompts with images; vLLM's own models those with videos. Behind a video that is longer in
time than in rows and columns, transformers lets text go on too early.
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
IMAGE, VIDEO, WORD, START, END, WIDTH = 1, 2, 9, 3, 4, 5
GRIDS = [(4, 6), (3, 3), (7, 2)]
KEPT = [torch.tensor([0, 5, 6, 23]), torch.tensor([4]), torch.tensor([1, 2, 3])]
MOVIES = {"a": (4, 2, 3), "b": (6, 3, 2)}
LEFT = {"a": torch.tensor([1, 7, 8, 15]), "b": torch.tensor([3, 4, 5, 35])}
"""Videos, and the places in them that are kept: frames that keep all, some or nothing."""
SECONDS = {"a": 0.5, "b": 1.5}
CONFIG = SimpleNamespace(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
    vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=4),
)

PROMPTS = ["ww0www1www2www", "ww0", "w1ww0w2", "0", "w01w", "012", "2www10"]
WITH_VIDEOS = ["wwaw", "waw1w", "w1wbw", "awbw", "wwb", "ab", "a0bw"]
"""Words, images by their grids, and videos."""
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


def bare(kind: str) -> Any:
    """A model of ours without weights. Frames are told by two words each; a text is embedded as its numbers."""
    from vitrim.serving.vllm import qwen

    model = object.__new__(getattr(qwen, kind))
    model.config, model.vitrim_width = CONFIG, WIDTH
    model._tokenizer = SimpleNamespace(encode=lambda text, **_: [20 + round(float(text[1:].split()[0])), WORD])
    model.get_language_model = lambda: SimpleNamespace(
        embed_input_ids=lambda ids: ids[:, None].float().repeat(1, WIDTH)
    )
    return model


def fields(part: str) -> dict[str, Any]:
    """What vLLM's processor says of an image or a video."""
    if part.isdigit():
        return {"image_grid_thw": torch.tensor([1, *(2 * side for side in GRIDS[int(part)])])}
    frames, rows, columns = MOVIES[part]
    found = {"video_grid_thw": torch.tensor([frames, 2 * rows, 2 * columns])}
    return {**found, "second_per_grid_ts": torch.tensor(SECONDS[part]), "timestamps": [*map(float, range(frames))]}


def by_vllm(prompt: str, model: Any) -> tuple[list[int], Tensor, Tensor]:
    """The same as `whole`, also with videos, as vLLM's model of the same architecture has them."""
    tokens, left, features = [], [], []
    for part in prompt:
        if part == "w":
            own, stays = [WORD], torch.tensor([True])
        else:
            kept, pad = (KEPT[int(part)], IMAGE) if part.isdigit() else (LEFT[part], VIDEO)
            frames, rows, columns = model.grid(CONFIG, fields(part))
            one = rows * columns * [pad]
            timed = part in MOVIES and "timestamps" in model.grid_fields
            own = [word for frame in range(frames) for word in ((20 + frame, WORD, START, *one, END) if timed else one)]
            ids = torch.tensor(own)
            stays = ids != pad
            stays[(ids == pad).nonzero().squeeze(1)[kept]] = True
            data = {name: SimpleNamespace(data=value) for name, value in fields(part).items()}
            position = SimpleNamespace(offset=len(tokens), length=len(own))
            modality = "image" if pad == IMAGE else "video"
            features.append(SimpleNamespace(modality=modality, data=data, mm_position=position))
        tokens, left = tokens + own, [*left, stays]
    theirs = object.__new__(next(base for base in type(model).__mro__ if base.__module__.startswith("vllm.")))
    theirs.config = CONFIG
    positions, _ = theirs.get_mrope_input_positions(tokens, features)
    return tokens, positions, torch.cat(left)


class Asked:
    """A prompt as a server sees it: ``ids`` (L,) of what is left, ``expected`` positions, and the ``next`` of all.

    ``whole`` are the tokens that a model without selection would have of what is left.
    """

    def __init__(self, prompt: str, kind: str = "ServedQwen25VL") -> None:
        from vitrim.core.selection import Choice

        self.model = bare(kind)
        videos = any(part in MOVIES for part in prompt)
        tokens, positions, left = by_vllm(prompt, self.model) if videos else whole(prompt)
        self.whole, self.expected = torch.tensor(tokens)[left], positions[:, left]
        self.next = int(positions.max()) + 1
        self.features, self.embeddings, ids = [], [], []
        for number, part in enumerate(prompt):
            if part == "w":
                ids.append(WORD)
                continue
            item = {name: value for name, value in fields(part).items() if name in self.model.grid_fields}
            kept, pad = (KEPT[int(part)], IMAGE) if part.isdigit() else (LEFT[part], VIDEO)
            grid = self.model.grid(CONFIG, item)
            every = torch.full((grid[0] * grid[1] * grid[2], WIDTH), -1.0 - number)
            own = self.model.left(every, Choice(kept), grid, item)
            place = SimpleNamespace(offset=len(ids), length=len(own))
            place.get_embeds_indices_in_range = lambda first, last: (first, last)
            data = {name: SimpleNamespace(data=value) for name, value in item.items()}
            self.features.append(SimpleNamespace(mm_position=place, data=data))
            self.embeddings.append(own)
            ids += len(own) * [pad]
        self.ids = torch.tensor(ids)
        self.positions, self.behind = self.model.get_mrope_input_positions(ids, self.features)

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

    positions = torch.arange(0, 16_000_000, 1999).repeat(3, 1) + torch.tensor([[0], [13], [255]])
    found, extent = read(written(positions, 2**24 - 1).to(dtype))
    assert torch.equal(found, positions)
    assert extent.tolist() == [2**24 - 1] * positions.shape[1]


CASES = [("ServedQwen25VL", prompt) for prompt in (*PROMPTS, *WITH_VIDEOS)]
CASES += [("ServedQwen3VL", prompt) for prompt in (*PROMPTS[:2], *WITH_VIDEOS)]


@pytest.mark.parametrize(("kind", "prompt"), CASES)
def test_text_is_numbered_as_in_the_whole_prompt_before_a_pixel_is_seen(kind: str, prompt: str) -> None:
    asked = Asked(prompt, kind)
    words = ~torch.isin(asked.ids, torch.tensor([IMAGE, VIDEO]))
    assert torch.equal(asked.positions[:, words], asked.expected[:, words])
    assert asked.behind + len(asked.ids) == asked.next


@pytest.mark.parametrize("kind", ["ServedQwen2VL", "ServedQwen25VL", "ServedQwen3VL", "ServedQwen35"])
def test_cells_that_a_tower_gets_alone_stand_where_they_stood(kind: str) -> None:
    """Text goes on behind the whole image, also if its last row and column are left out."""
    from vitrim.core.selection import Choice
    from vitrim.serving.vllm.cells import CELLS
    from vitrim.serving.vllm.qwen import CHANNELS, read
    from vitrim.serving.vllm.setting import selector_of

    model, kept = bare(kind), torch.zeros(24, dtype=torch.bool)
    kept[[0, 3, 8]] = True
    item = {**fields("0"), CELLS: kept}
    item = {name: value for name, value in item.items() if name in model.grid_fields}
    tokens, every = torch.full((24,), IMAGE), torch.ones(24, dtype=torch.bool)
    cut, embed = model.cut(CONFIG, item, tokens, every, selector_of("none"))
    assert (cut, embed.tolist()) == ([IMAGE] * 3, [True] * 3)
    (grid,) = model.units(CONFIG, item, 3)
    own = model.left(torch.ones(3, WIDTH), Choice(torch.arange(3)), grid, item)
    places, extent = read(own[:, -CHANNELS:])
    assert places.tolist() == [[0, 0, 0], [0, 0, 1], [0, 3, 2]]
    assert extent.tolist() == [6, 6, 6]
    data = {name: SimpleNamespace(data=value) for name, value in item.items()}
    feature = SimpleNamespace(mm_position=SimpleNamespace(offset=1, length=3), data=data)
    positions, offset = model.get_mrope_input_positions([WORD, *cut, WORD], [feature])
    assert positions[0].tolist() == [0, 1, 1, 1, 7]
    assert offset == 8 - 5


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("kind", "prompt"), CASES)
def test_what_is_left_stands_where_it_stood(kind: str, prompt: str, cuts: list[int]) -> None:
    """However the prompt is cut into pieces; the first of them may come from a cache.

    As vLLM's first runner does it: it keeps one tensor, and asks in every step, also for answers, and after a
    preemption from the beginning.
    """
    asked = Asked(prompt, kind)
    positions = asked.positions
    for first, last, here in (*asked.steps(cuts), *asked.steps([])):
        shown, found, offset = asked.model.recompute_mrope_positions(asked.ids.tolist(), here, positions, first)
        positions.copy_(found)
        assert offset + len(asked.ids) == asked.next
        assert torch.equal(positions[:, first:last], asked.expected[:, first:last])
        assert all(part.shape[1] == WIDTH for part in shown)
    assert torch.equal(positions, asked.expected)
    pads = torch.tensor([IMAGE, VIDEO])
    inside = asked.whole[torch.isin(asked.ids, pads)]  # features, and the times between frames
    assert torch.equal(torch.cat(shown)[:, 0].long().clamp_min(-1), inside.where(~torch.isin(inside, pads), -1))
    length = len(asked.ids)
    _, found, offset = asked.model.recompute_mrope_positions(asked.ids.tolist(), [], positions, length)
    assert torch.equal(found, asked.expected)
    assert offset + length == asked.next


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("kind", "prompt"), CASES)
def test_the_other_runner_finds_the_same(kind: str, prompt: str, cuts: list[int]) -> None:
    """vLLM's second runner, on GPUs, keeps numbers, not the tensor: its own code, beside a plain table of numbers."""
    from vllm.v1.worker.gpu.model_states.mm_pruning import MultiModalPruner

    asked = Asked(prompt, kind)
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
