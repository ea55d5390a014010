"""Hugging Face AltCLIP, Chinese-CLIP, MetaCLIP 2, AIMv2: image towers, bare and with heads that attend to patches."""

from __future__ import annotations

from transformers import (
    Aimv2VisionConfig,
    Aimv2VisionModel,
    AltCLIPVisionConfig,
    AltCLIPVisionModel,
    ChineseCLIPVisionConfig,
    ChineseCLIPVisionModel,
    MetaClip2VisionConfig,
    MetaClip2VisionModel,
)

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
HOSTS: dict[str, Create] = {
    "hf_aimv2": hf(Aimv2VisionModel, Aimv2VisionConfig, use_head=True),
    "hf_aimv2_native": hf(Aimv2VisionModel, Aimv2VisionConfig, use_head=False, is_native=True),
    "hf_altclip": hf(AltCLIPVisionModel, AltCLIPVisionConfig),
    "hf_chinese_clip": hf(ChineseCLIPVisionModel, ChineseCLIPVisionConfig),
    "hf_metaclip_2": hf(MetaClip2VisionModel, MetaClip2VisionConfig),
}
