"""What training, measuring and files ask about a Hugging Face model: its head, and how its images are prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPImageProcessor, ViTConfig, ViTForImageClassification, ViTImageProcessor

import tiny
from tiny_hosts.transformers_vit import GEOMETRY
from vitrim.core.registry import ask
from vitrim.loading import create_model

MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.6, 0.8]


def prepared(folder: Path, processor: Any) -> Any:
    """What the library says of a model that is saved beside an image processor."""
    ViTForImageClassification(ViTConfig(**GEOMETRY)).save_pretrained(folder)
    processor.save_pretrained(folder)
    model = create_model(f"hf:{folder}")
    return ask(model).preprocessing(model)


def test_images_are_prepared_as_the_processor_says(tmp_path: Path) -> None:
    """A crop of 224 of 256 pixels, or none at all; each channel has its own mean and deviation."""
    sizes: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 24, "width": 24}}
    told = prepared(tmp_path / "crop", CLIPImageProcessor(**sizes, image_mean=MEAN, image_std=STD))
    assert (told.mean, told.std, told.channels, told.size) == (tuple(MEAN), tuple(STD), 3, (24, 24))
    assert (told.crop_share, told.crop_mode, told.interpolation) == (0.75, "center", "bicubic")
    told = prepared(
        tmp_path / "squash", ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=MEAN, resample=3)
    )
    assert (told.mean, told.std) == (tuple(MEAN), (0.5, 0.5, 0.5))
    assert (told.crop_share, told.crop_mode, told.interpolation) == (1.0, "squash", "bicubic")
    told = prepared(tmp_path / "as it is", ViTImageProcessor(do_resize=False))
    assert (told.crop_share, told.crop_mode) == (None, "center")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_head_is_built_like_the_old_one(bias: bool, dtype: torch.dtype) -> None:
    model: Any = tiny.HOSTS["hf_vit"]()
    model.classifier = nn.Linear(model.classifier.in_features, 5, bias=bias)
    model.to(dtype)
    others = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith("classifier")}
    ask(model).reset_head(model, 7)
    assert (model.classifier.out_features, model.classifier.bias is not None) == (7, bias)
    assert model.classifier.weight.dtype == dtype
    assert ask(model).num_classes(model) == model.num_labels == model.config.num_labels == 7
    assert all(torch.equal(model.state_dict()[key], value) for key, value in others.items())
    assert model(tiny.images().to(dtype), labels=torch.tensor([6, 0])).logits.shape == (2, 7)


@pytest.mark.parametrize("size", [(24, 24), (32, 32), (16, 40)])
def test_tokens_of_images_of_another_size_are_those_of_interpolated_positions(size: tuple[int, int]) -> None:
    model, images = tiny.HOSTS["hf_vit_model"](), torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = model(images, interpolate_pos_encoding=True).last_hidden_state
        assert torch.equal(ask(model).tokens(model, images), expected)
    assert expected.shape[1] == 1 + size[0] * size[1] // 16
