"""Hugging Face CLIP's vision tower: with projection, bare, with a classifier. `CLIPModel` takes text too: own tests."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.transformers_vit import GEOMETRY, hf

VISION: dict[str, Any] = {key: value for key, value in GEOMETRY.items() if key != "num_labels"}

HOSTS: dict[str, Create] = {
    "hf_clip": hf(CLIPVisionModelWithProjection, CLIPVisionConfig, projection_dim=6),
    "hf_clip_model": hf(CLIPVisionModel, CLIPVisionConfig),
    "hf_clip_classifier": seeded(lambda: CLIPForImageClassification(CLIPConfig(vision_config=VISION, num_labels=5))),
}
