"""What Hugging Face's families share: facts of the config, and attention as the library runs it in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model, ViTConfig, ViTModel

import tiny
import vitrim
from tiny_hosts.transformers_vit import hf
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
    """Of images and patches that are not square; what a method that reads them gets is the same as the config says."""
    model = hf(ViTModel, ViTConfig, image_size=image, patch_size=patch)()
    facts = host_of(model).facts(model)
    assert (facts.grid_size, facts.input_size) == (grid, (3, *image))
    reduction = vitrim.reduce_(model, "cubist_merge", record=True)
    with torch.no_grad():
        model(torch.zeros(1, 3, *image))
    assert reduction.states[0].grid == grid
