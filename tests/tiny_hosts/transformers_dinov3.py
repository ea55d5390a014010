"""Hugging Face DINOv3: class token, registers, rotary positions."""

from __future__ import annotations

from transformers import DINOv3ViTConfig, DINOv3ViTModel

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

HOSTS: dict[str, Create] = {
    "hf_dinov3": hf(DINOv3ViTModel, DINOv3ViTConfig, num_register_tokens=4),
    "hf_dinov3_gated": hf(DINOv3ViTModel, DINOv3ViTConfig, num_register_tokens=0, use_gated_mlp=True),
}
