"""Hugging Face DINOv2, with and without registers, as classifiers and bare."""

from __future__ import annotations

from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
)

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

HOSTS: dict[str, Create] = {
    "hf_dinov2": hf(Dinov2ForImageClassification, Dinov2Config, mlp_ratio=2),
    "hf_dinov2_model": hf(Dinov2Model, Dinov2Config, mlp_ratio=2, use_swiglu_ffn=True),
    "hf_dinov2_registers": hf(
        Dinov2WithRegistersForImageClassification, Dinov2WithRegistersConfig, mlp_ratio=2, num_register_tokens=3
    ),
}
