"""Hugging Face EoMT with DINOv2's and DINOv3's layers: four before the queries join, one behind."""

from __future__ import annotations

from torch import nn
from transformers import (
    EomtConfig,
    EomtDinov3Config,
    EomtDinov3ForUniversalSegmentation,
    EomtForUniversalSegmentation,
)

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

SIZES = {"num_hidden_layers": 5, "num_blocks": 1, "num_queries": 3, "num_upscale_blocks": 1, "num_register_tokens": 2}


def unmasked(create: Create) -> Create:
    """``create`` as the published weights are: attention is masked in training only, less and less."""

    def made() -> nn.Module:
        model = create()
        model.attn_mask_probs.zero_()
        return model

    return made


HOSTS: dict[str, Create] = {
    "hf_eomt": unmasked(hf(EomtForUniversalSegmentation, EomtConfig, **SIZES, mlp_ratio=2)),
    "hf_eomt_dinov3": hf(EomtDinov3ForUniversalSegmentation, EomtDinov3Config, **SIZES),
}
