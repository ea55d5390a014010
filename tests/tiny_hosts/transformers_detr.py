"""Hugging Face LW-DETR's ViT and RF-DETR's DINOv2: four windows of 6 x 6 patches, within which some layers attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LwDetrViTConfig
from transformers.models.lw_detr.modeling_lw_detr import LwDetrViTBackbone
from transformers.models.rf_detr.configuration_rf_detr import RfDetrDinov2Config
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Backbone

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
LW: dict[str, Any] = {
    "image_size": 48,
    "pretrain_image_size": 24,
    "num_windows": 4,
    "window_block_indices": [0, 2],
    "mlp_ratio": 2,
    "out_features": ["stage2", "stage4"],
}
RF: dict[str, Any] = {"image_size": 48, "num_windows": 2, "mlp_ratio": 2, "out_features": ["stage2", "stage4"]}


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 48, 48, generator=torch.Generator().manual_seed(3))


HOSTS: dict[str, Create] = {
    "hf_lw_detr": hf(LwDetrViTBackbone, LwDetrViTConfig, **LW),
    "hf_rf_detr": hf(RfDetrDinov2Backbone, RfDetrDinov2Config, **RF),
    "hf_rf_detr_one_window": hf(
        RfDetrDinov2Backbone, RfDetrDinov2Config, **{**RF, "num_windows": 1}, use_swiglu_ffn=True
    ),
}
INPUTS: dict[str, Callable[[int], Tensor]] = dict.fromkeys(HOSTS, images)
