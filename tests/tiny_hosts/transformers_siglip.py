"""Hugging Face SigLIP's vision tower: with a classifier and bare. `SiglipModel` takes text too: own tests."""

from __future__ import annotations

from transformers import SiglipConfig, SiglipForImageClassification, SiglipVisionConfig, SiglipVisionModel

from tiny_hosts import Create
from tiny_hosts.common import seeded
from tiny_hosts.transformers_clip import VISION
from tiny_hosts.transformers_vit import hf

HOSTS: dict[str, Create] = {
    "hf_siglip": seeded(lambda: SiglipForImageClassification(SiglipConfig(vision_config=VISION, num_labels=5))),
    "hf_siglip_model": hf(SiglipVisionModel, SiglipVisionConfig),
}
