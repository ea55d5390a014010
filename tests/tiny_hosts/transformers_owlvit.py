"""Hugging Face OWL-ViT and OWLv2: the bare image towers. Their detectors take text too: own tests."""

from __future__ import annotations

from transformers import Owlv2VisionConfig, Owlv2VisionModel, OwlViTVisionConfig, OwlViTVisionModel

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
HOSTS: dict[str, Create] = {
    "hf_owlvit": hf(OwlViTVisionModel, OwlViTVisionConfig),
    "hf_owlv2": hf(Owlv2VisionModel, Owlv2VisionConfig),
}
