"""SigLIP 2 (NaFlex), whose images come as patches with a mask: reduced where nothing is padded, refused elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    Siglip2Config,
    Siglip2ForImageClassification,
    Siglip2Model,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)

import tiny
import vitrim
from tiny_hosts.common import seeded
from vitrim.core.registry import make_method

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_patches": 36,
}
CLASSIFIER = seeded(lambda: Siglip2ForImageClassification(Siglip2Config(vision_config=VISION, num_labels=5)))
TOWER = seeded(lambda: Siglip2VisionModel(Siglip2VisionConfig(**VISION)))


def naflex(padding: int = 0) -> dict[str, torch.Tensor]:
    """Images of 4 x 8 patches as the processor gives them."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(2, 32 + padding, dtype=torch.int32)
    mask[:, 32:] = 0
    patches = torch.randn(2, 32 + padding, 48, generator=generator)
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[4, 8]] * 2)}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("make", [CLASSIFIER, TOWER], ids=["mean", "map"])
def test_reducing_nothing_equals_dense(make: Any, kind: str) -> None:
    model = make()
    model.set_attn_implementation(kind)
    with torch.no_grad():
        dense = model(**naflex())
        vitrim.reduce_(model, "tome:r=0")
        for a, b in zip(model(**naflex()).to_tuple(), dense.to_tuple(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        vitrim.restore_(model)
        assert torch.equal(model(**naflex())[0], dense[0])


@pytest.mark.parametrize("name", ["random", "topk", "evit", "tome", "mctf", "cropr", "patchmerger"])
def test_methods(name: str) -> None:
    model = CLASSIFIER()
    config = tiny.fits(make_method(name, **tiny.SETTINGS.get(name, [{}])[0]), model)
    if config.kind == "soft":
        pytest.skip("has parameters for one number of patches")
    reduction = vitrim.reduce_(model, config, record=True)
    given = naflex()
    torch.manual_seed(5)
    logits = model(**given, labels=torch.tensor([1, 2]))
    logits.loss.backward()
    assert min(reduction.tokens_per_block) < 32
    torch.manual_seed(5)
    without = model(given["pixel_values"], spatial_shapes=given["spatial_shapes"]).logits
    assert torch.equal(without, logits.logits)  # a mask that masks nothing changes nothing
    torch.manual_seed(5)
    assert torch.equal(copy.deepcopy(model)(**given).logits, logits.logits)
    hidden = model(**given, output_hidden_states=True).hidden_states
    assert [layer.shape[1] for layer in hidden] == [32] * 5


@pytest.mark.parametrize("make", [CLASSIFIER, TOWER], ids=["mean", "map"])
def test_padding_is_refused(make: Any) -> None:
    model = make()
    vitrim.reduce_(model, "tome:r=4")
    with pytest.raises(vitrim.UnsupportedModelError, match="takes no padded images") as refusal:
        model(**naflex(padding=4))
    assert "\n" not in str(refusal.value)
    values = naflex(padding=4)
    with pytest.raises(vitrim.UnsupportedModelError, match="takes no padded images"):
        model(values["pixel_values"], values["pixel_attention_mask"], values["spatial_shapes"])


def test_both_towers() -> None:
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 20,
        "max_position_embeddings": 8,
    }
    model = seeded(lambda: Siglip2Model(Siglip2Config(text_config=text, vision_config=VISION)))()
    ids = torch.tensor([[0, 4, 7, 19], [0, 5, 2, 19]])
    with torch.no_grad():
        dense = model(input_ids=ids, **naflex())
        vitrim.reduce_(model, "topk:score=column_mean")
        reduced = model(input_ids=ids, **naflex())
        assert model.get_image_features(**naflex()).pooler_output.shape == (2, 32)
    assert torch.equal(reduced.text_embeds, dense.text_embeds)
    assert not torch.equal(reduced.image_embeds, dense.image_embeds)
