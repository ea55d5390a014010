"""Models whose video tokens are selected, inside vLLM: answers are those of transformers with the same selection.

`make test-vllm` runs these in an environment of its own; elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-vllm` makes an environment that has it", allow_module_level=True)

LIMITS = {"image": 2, "video": 2}
CASES = [
    ("qwen2_vl", "pool:keep=0.4"),
    ("qwen2_5_vl", "evs:keep=0.6"),
    ("qwen3_vl", "evs:keep=0.6"),
    ("qwen3_vl", "vidcom2:keep=0.4"),
    ("qwen2_5_vl", "resize:keep=0.5"),
    ("qwen3_vl", "resize:keep=0.5"),
    ("llava_onevision", "vcast:keep=0.4"),
    ("llava_onevision", "random:keep=0.4"),
]


def prompts(name: str) -> list[served.Prompt]:
    """One video; video then image and the reverse, as in vLLM's issue 27859; two videos; a video at the end; none.

    Frames are fast, so that videos are shorter in time than in rows or columns: behind longer ones, transformers lets
    text go on before their last frame, and vLLM behind it.
    """
    video, image = served.FAMILIES[name].video, served.FAMILIES[name].image
    sizes = served.FAMILIES[name].sizes
    movies = [served.movie(seed, frames, *sizes[seed % 4], fps=8.0) for seed, frames in enumerate((6, 4, 5, 4, 6))]
    pictures = [served.photograph(seed, *size) for seed, size in enumerate(sizes)]
    return [
        (f"w5 {video} w6 w7", movies[:1]),
        (f"w8 {video} w9 {image} w10", [movies[1], pictures[1]]),
        (f"{image} w9 {video} w10 w11", [pictures[2], movies[2]]),
        (f"w1 {video} w2 {video} w3 w4", [movies[0], movies[4]]),
        (f"w12 w13 {video}", movies[3:4]),
        (f"w14 {image} w15", pictures[3:]),
        ("w1 w2 w3 w4", []),
    ]


def same(got: list[served.Answer], expected: list[served.Answer]) -> None:
    for (tokens, logs), (own, own_logs) in zip(got, expected, strict=True):
        assert tokens == own
        assert logs == pytest.approx(own_logs, abs=1e-4)


@pytest.mark.parametrize(("name", "select"), CASES)
def test_answers_are_those_of_transformers(name: str, select: str, tmp_path: Path) -> None:
    """In one batch that is cut into steps, and again from the caches."""
    from transformers import AutoProcessor

    model, asked = served.folder(name, tmp_path), prompts(name)
    processor = AutoProcessor.from_pretrained(tmp_path)
    expected = served.by_transformers(model, processor, asked, select)
    dense = served.by_transformers(model, processor, asked[:5], None)
    assert all(own[0] != whole[0] for own, whole in zip(expected, dense, strict=False))  # a selection matters
    with served.engine(tmp_path, select, limit_mm_per_prompt=LIMITS) as (llm, steps):
        same(served.by_vllm(llm, asked), expected)
        assert steps.cut
        steps.cached = 0
        same(served.by_vllm(llm, asked), expected)
        assert steps.cached


def test_frames_keep_their_times(tmp_path: Path) -> None:
    """The text between frames belongs to the embeddings of a Qwen3-VL's video: other times, other embeddings.

    A selector that keeps all changes nothing, also not in a server that takes embeddings; vLLM's own model tells.
    """
    served.folder("qwen3_vl", tmp_path)
    video = served.FAMILIES["qwen3_vl"].video
    frames, facts = served.movie(1, 6, 128, 64)
    asked = [(f"w5 {video} w6 w7", [(frames, {**facts, "fps": fps})]) for fps in (2.0, 4.0)]

    def answered(select: str | None) -> list[served.Answer]:
        with served.engine(tmp_path, select, limit_mm_per_prompt=LIMITS) as (llm, _):
            return [answer for one in asked for answer in served.by_vllm(llm, [one])]

    slow, fast = answered("random:keep=1")
    assert slow[0] != fast[0]
    same([slow, fast], answered(None))


def test_embeddings_are_selected_as_videos_are(tmp_path: Path) -> None:
    """As one server encodes and another answers. With times, as Qwen3-VL needs them."""
    from transformers import AutoProcessor

    model = served.folder("qwen3_vl", tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path).video_processor
    frames, facts = served.movie(1, 6, 128, 64)
    given = processor([frames], do_sample_frames=False, return_tensors="pt")
    with torch.no_grad():
        output = model.model.get_video_features(**given)
    features = torch.cat([torch.cat([*layer]) for layer in (output.pooler_output, *output.deepstack_features)], dim=1)
    data: dict[str, Any] = {"video_embeds": features, "video_grid_thw": given["video_grid_thw"]}
    data["timestamps"] = torch.tensor([[(2 * number + 0.5) / facts["fps"] for number in range(3)]])
    prompt = f"w5 {served.FAMILIES['qwen3_vl'].video} w6"
    options = {"limit_mm_per_prompt": LIMITS, "enable_mm_embeds": True}
    with served.engine(tmp_path, "vidcom2:keep=0.5", **options) as (llm, _):
        by_pixels = served.by_vllm(llm, [(prompt, [(frames, facts)])])
        same(served.by_vllm(llm, [(prompt, {"video": data})]), by_pixels)
