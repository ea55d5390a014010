"""The prefill of a vision-language model: its MACs against PyTorch's own counter, its tokens, its rows of `bench`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlavaNextForConditionalGeneration, Qwen2VLImageProcessor

from tiny_vlms import IMAGE, VLMS
from vitrim.core.reduce import reduced_parts
from vitrim.core.registry import parse_method, vision_language
from vitrim.engines.macs import profile_of
from vitrim.engines.prefill import Prefill, Prompt, as_measured, cache_bytes
from vitrim.errors import VitrimError
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget
from vitrim.measure.timing import measure

TEXT = 5
QUICK = Budget(min_rounds=1, min_seconds=0.0, warmup_rounds=0)


def flops(model: Any, inputs: dict[str, Any]) -> float:
    # as batched products: the counter of older versions of torch misses the fused kernel of CPUs
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops() / 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in VLMS if name != "qwen2_vl"])  # its image has 1024 patches
def test_macs_of_a_prompt_are_those_that_torch_counts(name: str) -> None:
    """Dense: all of a prompt that is made here by hand. Reduced: what falls, and in which share."""
    model = VLMS[name].create()
    prefill = Prefill(model, text=TEXT, images=2)
    images = random_images(prefill, 1)
    assert prefill.places == VLMS[name].tokens
    dense, few = profile_of(prefill, None, images), profile_of(prefill, "tome:r=1", images)
    for row in (dense, few):
        assert row.prefill is not None
        assert list(row.prefill.shares) == ["tower", "connector", "language model"]
        assert sum(share.total for share in row.prefill.shares.values()) == row.macs.total
    assert dense.prefill is not None
    assert few.prefill is not None

    ids = torch.tensor([[7, 7, *[IMAGE] * prefill.places, 7, 7, *[IMAGE] * prefill.places, 7]])
    inputs = prefill.family.prompts(model, images, TEXT, prefill.places)
    assert torch.equal(inputs["input_ids"] == IMAGE, ids == IMAGE)
    assert dense.macs.total - dense.macs.norm == flops(model, inputs)
    # the language model alone, on as many tokens of text: it does not know which are images'
    for row in (dense.prefill, few.prefill):
        words = torch.full((1, TEXT + int(row.image_tokens)), 7)
        alone = flops(model, {"input_ids": words, "logits_to_keep": 1})
        assert row.shares["language model"].total - row.shares["language model"].norm == alone
    assert dense.prefill.image_tokens == 2 * prefill.places
    assert few.prefill.image_tokens == 2 * (prefill.places - VLMS[name].blocks)
    assert len(dense.tokens_per_block) == len(few.tokens_per_block) == 4
    assert not reduced_parts(model)


def test_the_cache_is_counted_by_prompt() -> None:
    """Two layers, keys and values of two heads of 8 numbers, 4 bytes each: of every token of a prompt of 4 and 2 x 36;
    the same for one prompt, three, and more images than prompts."""
    model = Prefill(VLMS["llava"].create(), text=TEXT, images=2)
    for prompts in (1, 3):
        with torch.no_grad():
            model(random_images(model, prompts))
        assert model.cache_bytes == (TEXT + 72) * 2 * 2 * 2 * 8 * 4


def test_as_many_tokens_are_made_as_asked_for() -> None:
    """Also where a prompt's first token would end it."""
    model: Any = VLMS["llava"].create()
    prefill = Prefill(model, text=TEXT, new_tokens=4)
    images = random_images(prefill, 1)
    with torch.no_grad():
        model.generation_config.eos_token_id = int(prefill(images).sequences[0, -4])
        assert prefill(images).sequences.shape[1] == TEXT + 36 + 4


def test_rows_of_bench_are_those_of_the_engine() -> None:
    model = Prefill(VLMS["llava"].create(), text=TEXT, images=2)
    methods = {"tome:r=4": parse_method("tome:r=4")}
    images = random_images(model, 3)
    assert images.shape == (3, 2, 3, 24, 24)
    dense, row = measure(model, methods, images, budget=QUICK)
    assert (dense["image_tokens"], row["image_tokens"]) == (72, 48)
    promised = profile_of(model, None, images).macs.total / profile_of(model, "tome:r=4", images).macs.total
    assert row["macs_speedup"] == pytest.approx(promised)
    assert row["images_per_second"] == pytest.approx(6e3 / row["latency_ms"]["p50"])
    with pytest.raises(VitrimError, match=r"^engine compile runs models of images, not prompts"):
        measure(model, methods, images, engines=["compile"])


def test_what_has_no_prefill_is_refused() -> None:
    with pytest.raises(VitrimError, match=r"^a prompt is described, and Linear reads none$"):
        as_measured(torch.nn.Linear(2, 2), Prompt(text=3))
    with pytest.raises(VitrimError, match=r"a token of text before each, got 3 images and 2 tokens$"):
        Prefill(VLMS["llava"].create(), text=2, images=3)
    with torch.device("meta"):
        config = LlavaNextForConditionalGeneration.config_class
        next_model = LlavaNextForConditionalGeneration(config(**small()))
    with pytest.raises(VitrimError, match=r"^LlavaNextForConditionalGeneration puts the tiles"):
        Prefill(next_model)


def small() -> dict[str, Any]:
    """Parts of a LLaVA-NeXT, as small as LLaVA's."""
    config: Any = VLMS["llava"].create().config
    return {"vision_config": config.vision_config, "text_config": config.text_config}


def test_images_of_qwen_are_packed_as_its_processor_packs_them() -> None:
    """Images that are no squares, of different values everywhere."""
    model: Any = VLMS["qwen2_vl"].create()
    images = torch.arange(2 * 3 * 16 * 24).float().reshape(1, 2, 3, 16, 24)
    given = vision_language(model)[1].image_inputs(model, images)  # type: ignore[union-attr, attr-defined]
    plain = {"do_resize": False, "do_rescale": False, "do_normalize": False, "do_convert_rgb": False}
    processor = Qwen2VLImageProcessor(patch_size=4, temporal_patch_size=2, merge_size=2, **plain)
    expected = processor(list(images[0]), return_tensors="pt", input_data_format="channels_first")
    assert torch.equal(given["pixel_values"], expected["pixel_values"].to(given["pixel_values"]))
    assert given["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist() == [[1, 4, 6]] * 2


def test_a_tensor_that_two_layers_share_is_counted_once() -> None:
    keys, values = torch.zeros(2, 3, 5), torch.zeros(7)
    layers = [SimpleNamespace(keys=keys, values={"own": [values]}), SimpleNamespace(keys=keys, length=3)]
    assert cache_bytes(SimpleNamespace(layers=layers), 2) == (30 + 7) * 4 / 2
    assert cache_bytes(SimpleNamespace(layers=[]), 2) is None
