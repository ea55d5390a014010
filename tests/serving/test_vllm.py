"""Models whose image tokens are selected, inside vLLM: answers are those of transformers with the same selection.

`make test-vllm` runs these in an environment of its own; elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import served
from vitrim.errors import VitrimError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-vllm` makes an environment that has it", allow_module_level=True)

TOLERANCE, COMPILED = 1e-4, 1e-3
SELECT = "divprune:keep=0.5"
OTHERS = ("pool:tokens=20", "random:tokens=5,seed=3", "cdpruner:text=none,keep=0.5", "dart:text_pivots=0")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder and its model."""
    place = tmp_path_factory.mktemp("llava")
    return place, served.folder("llava", place)


def same(got: list[served.Answer], expected: list[served.Answer], tolerance: float = TOLERANCE) -> None:
    for (tokens, logs), (own, own_logs) in zip(got, expected, strict=True):
        assert tokens == own
        assert logs == pytest.approx(own_logs, abs=tolerance)


def answers(name: str, place: Path, model: Any, select: str | None) -> list[served.Answer]:
    from transformers import AutoProcessor

    by_hand = served.FAMILIES[name].by_hand and select is not None
    answered = served.by_hand if by_hand else served.by_transformers
    return answered(model, AutoProcessor.from_pretrained(place), served.prompts(name), select)


@pytest.mark.parametrize("name", served.FAMILIES)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Text alone, one to three images, and two turns, in one batch that is cut into steps; again from the caches.

    Then half of the requests are without a selection.
    """
    model, prompts, family = served.folder(name, tmp_path), served.prompts(name), served.FAMILIES[name]
    video, options = family.video, dict(family.options)
    refused = video is not None and name not in ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    expected, dense = answers(name, tmp_path, model, SELECT), answers(name, tmp_path, model, None)
    assert [tokens for tokens, _ in expected[1:]] != [tokens for tokens, _ in dense[1:]]  # a selection matters
    with served.engine(tmp_path, SELECT, ["none"], **options) as (llm, steps):
        same(served.by_vllm(llm, prompts), expected)
        assert steps.cut
        steps.cached = 0
        same(served.by_vllm(llm, prompts), expected)
        assert steps.cached or not options.get("enable_prefix_caching", True)
        twice = [prompt for prompt in prompts for _ in range(2)]
        both = [answer for pair in zip(expected, dense, strict=True) for answer in pair]
        same(served.by_vllm(llm, twice, [None, "none"] * len(prompts)), both)
        limits = llm.llm_engine.input_processor.renderer.get_mm_processor().info.allowed_mm_limits
        selected = {"image"} if video is None or refused else {"image", "video"}
        assert {modality for modality, limit in limits.items() if limit} == selected
        if refused:
            from vllm.exceptions import VLLMValidationError

            frames = (
                numpy.zeros((4, 64, 64, 3), "uint8"),
                {"fps": 2.0, "total_num_frames": 4, "frames_indices": [*range(4)]},
            )
            movie = {"prompt": f"w5 {video} w6", "multi_modal_data": {"video": frames}}
            with pytest.raises(VLLMValidationError, match=r"At most 0 video\(s\)"):
                llm.generate([movie], use_tqdm=False)
    if refused:
        limits = {"limit_mm_per_prompt": {"video": 1}}
        with pytest.raises(VitrimError, match="cannot be selected in vLLM"), served.engine(tmp_path, SELECT, **limits):
            pass


def test_slices_may_have_four_times_as_many_tokens(tmp_path: Path) -> None:
    """MiniCPM-V's other mode, in which patches of the tower are joined once."""
    from transformers import AutoProcessor

    name = "minicpmv4_6"
    model, processor = served.folder(name, tmp_path), AutoProcessor.from_pretrained(tmp_path)
    model.config.downsample_mode = processor.image_processor.downsample_mode = "4x"
    processor.save_pretrained(tmp_path)
    expected = answers(name, tmp_path, model, SELECT)
    with served.engine(tmp_path, SELECT, max_num_batched_tokens=48, **served.FAMILIES[name].options) as (llm, steps):
        same(served.by_vllm(llm, served.prompts(name)), expected)
        assert steps.cut


BARE = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|image_pad|>"),
    **dict.fromkeys(("glm4v", "glm_ocr"), "<|image|>"),
    "paddleocr_vl": "<|IMAGE_PLACEHOLDER|>",
    "minicpmv4_6": "<|image_pad|>",
}
"""An image of a prompt without the tokens around it."""
EMBEDDED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families for which vLLM takes embeddings of images."""


@pytest.mark.parametrize("name", BARE)
def test_images_at_the_end_or_side_by_side(name: str, tmp_path: Path) -> None:
    """Also in a server that takes embeddings, as vLLM makes those that only answer.

    Transformers refuses images that touch if positions have three axes, and a forward by hand knows no features for
    further layers.
    """
    from transformers import AutoProcessor

    model, image, options = served.folder(name, tmp_path), BARE[name], dict(served.FAMILIES[name].options)
    pictures = [served.photograph(number, *size) for number, size in enumerate(served.WIDE)]
    texts = {
        f"w5 w6 {image}": pictures[1:2],
        f"w5 {image} w6 {image}": pictures[1:3],
        f"w5 {image} {image} w6 w7": pictures[1:3],
        f"{image} {image} {image}": pictures[:3],
    }
    prompts, processor = [*texts.items()], AutoProcessor.from_pretrained(tmp_path)
    if name == "qwen3_vl":
        prompts = prompts[:2]
    by_hand = name not in ("qwen3_vl", "minicpmv4_6")
    expected = (served.by_hand if by_hand else served.by_transformers)(model, processor, prompts, SELECT)
    with served.engine(tmp_path, SELECT, enable_mm_embeds=name in EMBEDDED, **options) as (llm, steps):
        same(served.by_vllm(llm, prompts), expected)
        assert steps.cut
        same(served.by_vllm(llm, prompts), expected)
        assert steps.cached or not options.get("enable_prefix_caching", True)
        if name in EMBEDDED:
            given = processor.image_processor(pictures[3:], return_tensors="pt")
            with torch.no_grad():
                output = model.model.get_image_features(**given)
            layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
            features = torch.cat([torch.cat([*layer]) for layer in layers], dim=1)
            by_pixels = served.by_vllm(llm, [(f"w5 {image} w6", pictures[3:])])
            embeddings = {"image_embeds": features, "image_grid_thw": given["image_grid_thw"]}
            same(served.by_vllm(llm, [(f"w5 {image} w6", {"image": embeddings})]), by_pixels)


def test_settings_share_no_caches(llava: tuple[Path, Any]) -> None:
    """Each answers right, also none; keys of prompts with the same images have nothing in common but text."""
    from transformers import AutoProcessor

    place, model = llava
    prompts = [(" ".join(f"w{number}" for number in range(40)), []), *served.prompts("llava")[1:]]  # more than a block
    processor = AutoProcessor.from_pretrained(place)

    # a function of its own: what it holds of an engine ends with it, before the next one begins
    def keys(select: str | None) -> tuple[set[Any], set[Any]]:
        expected = served.by_transformers(model, processor, prompts, select)
        with served.engine(place, select) as (llm, steps):
            config = llm.llm_engine.vllm_config.model_config
            assert hasattr(config.hf_config, "vitrim_select") == (select is not None)
            same(served.by_vllm(llm, prompts[:1]), expected[:1])
            text, steps.keys = steps.keys, set()
            same(served.by_vllm(llm, prompts[1:]), expected[1:])
            return text, steps.keys

    found = [keys(select) for select in (None, SELECT, *OTHERS)]
    assert found[0][0]
    assert all(text == found[0][0] for text, _ in found)
    assert len(set().union(*(images for _, images in found))) == sum(len(images) for _, images in found)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_requests_choose_their_settings(name: str, tmp_path: Path) -> None:
    """The same images under every setting, in one batch, and one after the other: each is answered as if alone.

    The server itself selects nothing. A setting has its own keys in the caches, however it is written.
    """
    model, prompts = served.folder(name, tmp_path), served.prompts(name)[1:]
    texts = ["none", SELECT, *(OTHERS if name == "llava" else OTHERS[1:])]  # Qwen's tokens keep their places
    expected = {text: answers(name, tmp_path, model, None if text == "none" else text) for text in texts}
    expected = {text: own[1:] for text, own in expected.items()}
    with served.engine(tmp_path, None, ["any"]) as (llm, steps):
        asked = [(prompt, text) for prompt in prompts for text in texts]
        wanted = [expected[text][number] for number in range(len(prompts)) for text in texts]
        same(served.by_vllm(llm, *zip(*asked, strict=True)), wanted)
        keys = []
        for text in texts:
            steps.keys = set()
            same(served.by_vllm(llm, prompts, [text] * len(prompts)), expected[text])
            keys.append(steps.keys)
        assert len(set().union(*keys)) == sum(len(own) for own in keys)
        steps.keys, steps.cached = set(), 0
        same(served.by_vllm(llm, prompts), expected["none"])
        same(served.by_vllm(llm, prompts, ["divprune:keep=.50"] * len(prompts)), expected[SELECT])
        assert steps.keys == keys[0] | keys[1]
        assert steps.cached
        other = f"random:positions={'original' if name == 'llava' else 'closed'}"
        with pytest.raises(VitrimError, match="leave positions out"):
            served.by_vllm(llm, prompts[:1], [other])


def test_a_bad_request_is_one_line_and_the_next_is_answered(llava: tuple[Path, Any]) -> None:
    place, model = llava
    prompts = served.prompts("llava")[1:2]
    with served.engine(place, SELECT, ["pool:tokens=20"]) as (llm, _):
        for text, words in {
            "divprun": "did you mean 'divprune'",
            "fastervlm": "needs the attention",
            "random:positions=original": "allowed: divprune:keep=0.5, pool:tokens=20$",
            "none": "allowed: divprune:keep=0.5, pool:tokens=20$",
        }.items():
            with pytest.raises(VitrimError, match=words):
                served.by_vllm(llm, prompts, [text])
        for text in (None, "pool:tokens=20", SELECT):
            same(served.by_vllm(llm, prompts, [text]), answers("llava", place, model, text or SELECT)[1:2])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_answers_stay_when_compiled(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.compile, vLLM's usual way; positions are closed up in one family, and kept in the other."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model = served.folder(name, tmp_path)
    counters.clear()
    with served.engine(tmp_path, SELECT, enforce_eager=False) as (llm, _):
        got = served.by_vllm(llm, served.prompts(name))
    assert counters["stats"]["unique_graphs"]
    same(got, answers(name, tmp_path, model, SELECT), COMPILED)


@pytest.mark.parametrize(
    ("select", "words"),
    [
        ("divprun", "divprune"),
        ("fastervlm", "attention"),
        ("dart", "question"),
        ("random:positions=original", "positions"),
    ],
)
def test_bad_settings_end_the_start_in_one_line(select: str, words: str, llava: tuple[Path, Any]) -> None:
    with pytest.raises(VitrimError, match=words), served.engine(llava[0], select):
        pass
