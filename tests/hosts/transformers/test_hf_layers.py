"""What Hugging Face's families share: facts of the config, and attention as the library runs it in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model, ViTConfig, ViTModel

import tiny
import vitrim
from tiny_hosts.transformers_vit import hf
from tiny_vlms import VLMS
from vitrim.core.registry import host_of

DROPPING: dict[str, tuple[Any, Any, str]] = {
    "vit": (ViTModel, ViTConfig, "attention_probs_dropout_prob"),
    "clip": (CLIPVisionModel, CLIPVisionConfig, "attention_dropout"),
    "dinov2": (Dinov2Model, Dinov2Config, "attention_probs_dropout_prob"),
}


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DROPPING)
def test_attention_drops_in_training_what_the_library_drops(name: str, kernel: str) -> None:
    """The same draws, and none in evaluation; the oracle is the dense model."""
    model_class, config_class, option = DROPPING[name]
    model: Any = hf(model_class, config_class, **{option: 0.5, "attn_implementation": kernel})().double()
    images = tiny.images().double()

    def tokens() -> torch.Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            return model(images).last_hidden_state  # type: ignore[no-any-return]

    evaluated = tokens()
    dense = model.train() and tokens()
    assert not torch.allclose(dense, evaluated, atol=1e-3)
    vitrim.reduce_(model, "tome:r=0")
    torch.testing.assert_close(tokens(), dense, atol=1e-6, rtol=1e-6)
    model.eval()
    torch.testing.assert_close(tokens(), evaluated, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("image", "patch", "grid"), [((16, 40), 4, (4, 10)), ((40, 16), 4, (10, 4)), ((24, 24), (8, 4), (3, 6))]
)
def test_rows_come_before_columns(image: Any, patch: Any, grid: tuple[int, int]) -> None:
    """Of images and patches that are not square; the oracle is the library's own count along each axis."""
    model = hf(ViTModel, ViTConfig, image_size=image, patch_size=patch)()
    facts = host_of(model).facts(model)
    assert (facts.grid_size, facts.input_size) == (grid, (3, *image))
    with torch.no_grad():
        assert model.embeddings.patch_embeddings.projection(torch.zeros(1, 3, *image)).shape[2:] == grid


ROTARY: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "hf_dinov3": (tiny.HOSTS["hf_dinov3"], lambda block: block.attention.k_proj),
    "hf_eomt_dinov3": (tiny.HOSTS["hf_eomt_dinov3"], lambda block: block.attention.k_proj),
    "hf_pixtral": (tiny.FURTHER["hf_pixtral"], lambda block: block.attention.k_proj),
    "hf_vjepa2": (tiny.FURTHER["hf_vjepa2_model"], lambda block: block.attention.key),
    "qwen2_vl": (lambda: VLMS["qwen2_vl"].create().model.visual, lambda block: block.attn.qkv),
    "qwen3_vl": (lambda: VLMS["qwen3_vl"].create().model.visual, lambda block: block.attn.qkv),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ROTARY)
def test_matching_compares_what_the_library_projects_before_it_is_rotated(name: str) -> None:
    """Keys of tokens at other places would differ where tokens are the same."""
    create, projection = ROTARY[name]
    model, seen = create(), list[torch.Tensor]()
    vitrim.reduce_(model, "tome:r=1")
    block, found = tiny.blocks(model)[0], list[Any]()
    projection(block).register_forward_hook(lambda module, args, output: seen.append(output))
    block.reducer.register_forward_pre_hook(lambda reducer, args: found.append(args[1]))
    if name.startswith("qwen"):
        model(torch.randn(36, 3 * 2 * 4 * 4), torch.tensor([[1, 6, 6]]))
    else:
        tiny.run(model, tiny.given(name, 1))
    keys, attention = seen[0].squeeze(), found[0]
    if name.startswith("qwen"):  # queries, keys and values of all heads, side by side
        keys = keys.chunk(3, dim=-1)[1]
    heads = keys.unflatten(-1, (attention.k.shape[1], -1)).transpose(0, 1)
    torch.testing.assert_close(attention.keys[0], heads)
    assert not torch.allclose(attention.k[0], heads, atol=1e-3)


@pytest.mark.parametrize("name", ["hf_videomae_model", "hf_vjepa2_model"])
def test_a_grid_of_clips_is_of_tubelets_of_frames(name: str) -> None:
    """Four frames in tubelets of two, of 4 x 4 patches each: as many tokens as the library makes of a clip."""
    model = tiny.FURTHER[name]()
    facts = host_of(model).facts(model)
    assert (facts.grid_size, facts.input_size) == ((2 * 4, 4), (3, 16, 16))
    with torch.no_grad():
        tokens = model(torch.zeros(1, 4, 3, 16, 16)).last_hidden_state
    assert facts.grid_size[0] * facts.grid_size[1] == tokens.shape[1]
