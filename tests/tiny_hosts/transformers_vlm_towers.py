"""The image towers of Hugging Face's Idefics3, SmolVLM, InternVL and Pixtral."""

from __future__ import annotations

from typing import Any

from transformers import InternVLVisionConfig, InternVLVisionModel, PixtralVisionConfig, PixtralVisionModel
from transformers.models.idefics3 import Idefics3VisionConfig, Idefics3VisionTransformer
from transformers.models.smolvlm import SmolVLMVisionConfig, SmolVLMVisionTransformer

from tiny_hosts import Create
from tiny_hosts.transformers_vit import hf

FURTHER = True
PAIRS: dict[str, Any] = {"image_size": [24, 24], "patch_size": [4, 4]}

HOSTS: dict[str, Create] = {
    "hf_idefics3": hf(Idefics3VisionTransformer, Idefics3VisionConfig),
    "hf_smolvlm": hf(SmolVLMVisionTransformer, SmolVLMVisionConfig, attn_implementation="eager"),
    "hf_internvl": hf(InternVLVisionModel, InternVLVisionConfig, **PAIRS, use_mean_pooling=True),
    "hf_internvl_qk_norm": hf(
        InternVLVisionModel,
        InternVLVisionConfig,
        **PAIRS,
        use_mean_pooling=False,
        use_qk_norm=True,
        norm_type="rms_norm",
    ),
    "hf_pixtral": hf(PixtralVisionModel, PixtralVisionConfig),
}
