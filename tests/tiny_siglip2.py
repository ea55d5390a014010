"""Tiny models of SigLIP 2 (NaFlex), which take patches with a mask."""

from __future__ import annotations

from typing import Any

from transformers import Siglip2Config, Siglip2ForImageClassification, Siglip2VisionConfig, Siglip2VisionModel

from tiny_hosts.common import seeded

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "patch_size": 4,
    "num_patches": 36,
}
CLASSIFIER = seeded(lambda: Siglip2ForImageClassification(Siglip2Config(vision_config=VISION, num_labels=5)))
TOWER = seeded(lambda: Siglip2VisionModel(Siglip2VisionConfig(**VISION)))
