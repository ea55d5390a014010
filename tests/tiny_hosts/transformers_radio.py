"""Hugging Face C-RADIO: class tokens and registers in front."""

from __future__ import annotations

from transformers.models.radio.configuration_radio import RadioConfig
from transformers.models.radio.modeling_radio import RadioModel

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
HOSTS: dict[str, Create] = {
    "hf_radio": hf(RadioModel, RadioConfig, mlp_ratio=2.0, max_img_size=32, num_cls_tokens=2, num_registers=3),
}
