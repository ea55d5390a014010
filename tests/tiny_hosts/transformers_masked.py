"""Hugging Face ViTMAE on whole images, ViT-MSN and I-JEPA."""

from __future__ import annotations

from transformers import (
    IJepaConfig,
    IJepaForImageClassification,
    IJepaModel,
    ViTMAEConfig,
    ViTMAEModel,
    ViTMSNConfig,
    ViTMSNForImageClassification,
    ViTMSNModel,
)

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
HOSTS: dict[str, Create] = {
    "hf_ijepa": hf(IJepaForImageClassification, IJepaConfig),
    "hf_ijepa_model": hf(IJepaModel, IJepaConfig, attn_implementation="eager"),
    "hf_vit_msn": hf(ViTMSNForImageClassification, ViTMSNConfig),
    "hf_vit_msn_model": hf(ViTMSNModel, ViTMSNConfig),
    "hf_vit_mae": hf(ViTMAEModel, ViTMAEConfig, mask_ratio=0.0),
}
