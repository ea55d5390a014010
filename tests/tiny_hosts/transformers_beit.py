"""Hugging Face BEiT: relative position bias per layer, shared, both or none; class token or mean."""

from __future__ import annotations

from typing import Any

from transformers import BeitConfig, BeitForImageClassification, BeitModel

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf


def beit(model_class: Any = BeitForImageClassification, **kwargs: Any) -> Create:
    return hf(model_class, BeitConfig, **{"use_relative_position_bias": True, "use_mean_pooling": False, **kwargs})


HOSTS: dict[str, Create] = {
    "hf_beit": beit(),
    "hf_beit_mean": beit(use_mean_pooling=True, layer_scale_init_value=0.0),
    "hf_beit_shared": beit(use_relative_position_bias=False, use_shared_relative_position_bias=True),
    "hf_beit_model": beit(BeitModel, use_shared_relative_position_bias=True, attn_implementation="eager"),
    "hf_beit_absolute": beit(use_relative_position_bias=False, use_absolute_position_embeddings=True),
}
