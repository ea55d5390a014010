"""Hugging Face ViT and DeiT, as classifiers and bare."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from tiny_hosts import Create
from tiny_hosts.common import seeded

GEOMETRY: dict[str, Any] = {
    "image_size": 24,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": 5,
}


def hf(model_class: Any, config_class: Any, **kwargs: Any) -> Create:
    return seeded(lambda: model_class(config_class(**{**GEOMETRY, **kwargs})))


HOSTS: dict[str, Create] = {
    "hf_vit": hf(ViTForImageClassification, ViTConfig),
    "hf_vit_model": hf(ViTModel, ViTConfig),
    "hf_vit_eager": hf(ViTForImageClassification, ViTConfig, attn_implementation="eager"),
    "hf_deit": hf(DeiTForImageClassification, DeiTConfig),
    "hf_deit_teacher": hf(DeiTForImageClassificationWithTeacher, DeiTConfig),
}
