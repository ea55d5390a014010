"""Hugging Face VideoMAE and V-JEPA 2, as classifiers and bare, on clips of two times 4 x 4 patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    VideoMAEModel,
    VJEPA2Config,
    VJEPA2ForVideoClassification,
    VJEPA2Model,
)

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
MAE: dict[str, Any] = {"image_size": 16, "num_frames": 4, "tubelet_size": 2}
JEPA: dict[str, Any] = {
    "crop_size": 16,
    "frames_per_clip": 4,
    "tubelet_size": 2,
    "mlp_ratio": 2,
    "num_pooler_layers": 1,
    "pred_hidden_size": 24,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 1,
}


def clips(batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 3, 16, 16, generator=torch.Generator().manual_seed(3))


HOSTS: dict[str, Create] = {
    "hf_videomae": hf(VideoMAEForVideoClassification, VideoMAEConfig, **MAE),
    "hf_videomae_model": hf(VideoMAEModel, VideoMAEConfig, **MAE, use_mean_pooling=False),
    "hf_vjepa2": hf(VJEPA2ForVideoClassification, VJEPA2Config, **JEPA),
    "hf_vjepa2_model": hf(VJEPA2Model, VJEPA2Config, **JEPA),
}
INPUTS: dict[str, Callable[[int], Tensor]] = dict.fromkeys(HOSTS, clips)
