"""Hugging Face SAM's and SAM 3's image encoders and ViTDet: windows of 6 x 6 patches, four in an image, or one."""

from __future__ import annotations

from typing import Any

from transformers import (
    Sam3ViTConfig,
    Sam3ViTModel,
    SamVisionConfig,
    SamVisionModel,
    VitDetBackbone,
    VitDetConfig,
    VitDetModel,
)

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
SAM: dict[str, Any] = {
    "patch_size": 2,
    "window_size": 6,
    "global_attn_indexes": [1, 3],
    "output_channels": 8,
    "mlp_dim": 64,
}
DET: dict[str, Any] = {
    "patch_size": 2,
    "pretrain_image_size": 24,
    "window_size": 6,
    "window_block_indices": [0, 2],
    "use_relative_position_embeddings": True,
    "mlp_ratio": 2,
}
SAM3: dict[str, Any] = {
    "patch_size": 2,
    "pretrain_image_size": 12,
    "window_size": 6,
    "global_attn_indexes": [1, 3],
}

HOSTS: dict[str, Create] = {
    "hf_sam": hf(SamVisionModel, SamVisionConfig, **SAM),
    "hf_sam_eager": hf(SamVisionModel, SamVisionConfig, **SAM, attn_implementation="eager"),
    "hf_sam3": hf(Sam3ViTModel, Sam3ViTConfig, **SAM3),
    "hf_vitdet": hf(VitDetModel, VitDetConfig, **DET),
    "hf_vitdet_backbone": hf(
        VitDetBackbone, VitDetConfig, **{**DET, "window_size": 0, "patch_size": 4, "window_block_indices": []}
    ),
}
