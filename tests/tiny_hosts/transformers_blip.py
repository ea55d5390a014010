"""Hugging Face BLIP and BLIP-2: the bare image towers."""

from __future__ import annotations

from transformers import Blip2VisionConfig, Blip2VisionModel, BlipVisionConfig, BlipVisionModel

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
HOSTS: dict[str, Create] = {
    "hf_blip": hf(BlipVisionModel, BlipVisionConfig),
    "hf_blip_2": hf(Blip2VisionModel, Blip2VisionConfig),
}
