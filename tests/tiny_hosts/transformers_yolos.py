"""Hugging Face YOLOS, as a detector and bare, with mid positions and without."""

from __future__ import annotations

from transformers import YolosConfig, YolosForObjectDetection, YolosModel

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

SIZES = {"image_size": [24, 24], "num_detection_tokens": 3}

HOSTS: dict[str, Create] = {
    "hf_yolos": hf(YolosForObjectDetection, YolosConfig, **SIZES),
    "hf_yolos_model": hf(YolosModel, YolosConfig, **SIZES, use_mid_position_embeddings=False),
}
