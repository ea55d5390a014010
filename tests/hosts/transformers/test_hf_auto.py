"""Reduced models inside what users of transformers write: auto classes, backbones, pipelines."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoBackbone,
    AutoModel,
    AutoModelForImageClassification,
    BeitConfig,
    BeitForSemanticSegmentation,
    CLIPConfig,
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    DINOv3ViTConfig,
    SiglipConfig,
    SiglipVisionConfig,
    ViTConfig,
    ViTImageProcessor,
    pipeline,
)

import tiny
import vitrim
from tiny_hosts.common import seeded
from tiny_hosts.transformers_clip import VISION
from tiny_hosts.transformers_vit import GEOMETRY

BEIT = BeitConfig(**GEOMETRY, use_relative_position_bias=True)
CONFIGS = [
    ViTConfig(**GEOMETRY),
    Dinov2Config(**GEOMETRY),
    Dinov2WithRegistersConfig(**GEOMETRY),
    DINOv3ViTConfig(**VISION),
    CLIPVisionConfig(**VISION),
    SiglipVisionConfig(**VISION),
    BEIT,
]
CLASSIFIERS = [
    ViTConfig(**GEOMETRY),
    Dinov2Config(**GEOMETRY),
    CLIPConfig(vision_config=VISION, num_labels=5),
    SiglipConfig(vision_config=VISION, num_labels=5),
    BEIT,
]


def model_type(config: Any) -> str:
    return str(config.model_type)


@pytest.mark.parametrize("config", CONFIGS, ids=model_type)
def test_auto_model_hands_out_every_token(config: Any) -> None:
    model = seeded(lambda: AutoModel.from_config(config))()
    reduction = vitrim.reduce_(model, "tome:r=4")
    with torch.no_grad():
        tokens = model(tiny.images()).last_hidden_state
    assert tokens.shape == (2, 36 + tiny.num_prefix(model), 32)
    assert reduction.state.num_patches == 36 - 16


@pytest.mark.parametrize("config", CLASSIFIERS, ids=model_type)
def test_auto_model_for_image_classification(config: Any) -> None:
    model = seeded(lambda: AutoModelForImageClassification.from_config(config))()
    vitrim.reduce_(model, "tome:r=4")
    labels = torch.tensor([0, 3])
    out = model(tiny.images(), labels=labels)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))


@pytest.mark.parametrize(
    "config", [CONFIGS[1], CONFIGS[2], CONFIGS[3], BEIT], ids=lambda config: str(config.model_type)
)
def test_backbones_give_maps_of_the_full_grid(config: Any) -> None:
    config = copy.deepcopy(config)
    config.out_features = [f"stage{depth}" for depth in (1, 3, 4)]
    model = seeded(lambda: AutoBackbone.from_config(config))()
    with torch.no_grad():
        dense = model(tiny.images()).feature_maps
        reduction = vitrim.reduce_(model, "tome:r=0")
        for a, b in zip(model(tiny.images()).feature_maps, dense, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        reduction.set(r=4)
        maps = model.forward_with_filtered_kwargs(tiny.images()).feature_maps
    assert [tuple(entry.shape) for entry in maps] == [(2, 32, 6, 6)] * 3
    assert reduction.state.num_patches == 20
    assert not torch.equal(maps[-1], dense[-1])


def test_beit_segments() -> None:
    config = BeitConfig(**GEOMETRY, use_relative_position_bias=True, out_indices=[1, 2, 3, 4], pool_scales=[1, 2])
    model = seeded(lambda: BeitForSemanticSegmentation(config))()
    with torch.no_grad():
        dense = model(tiny.images()).logits
        reduction = vitrim.reduce_(model, "tome:r=0")
        torch.testing.assert_close(model(tiny.images()).logits, dense, atol=1e-5, rtol=1e-5)
        reduction.set(r=4)
        assert model(tiny.images()).logits.shape == dense.shape
    assert reduction.state.num_patches == 20


def test_the_image_classification_pipeline() -> None:
    model = tiny.HOSTS["hf_vit"]()
    processor = ViTImageProcessor(size={"height": 24, "width": 24})
    classify = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (40, 30, 3), dtype=np.uint8))
    dense = classify(image, top_k=5)
    reduction = vitrim.reduce_(classify.model, "tome:r=4")
    reduced = classify([image, image], top_k=5)
    assert reduction.state.num_patches == 20
    assert len(reduced[0]) == 5
    assert reduced[0] == reduced[1]
    assert dense != reduced[0]
    vitrim.restore_(classify.model)
    assert classify(image, top_k=5) == dense
