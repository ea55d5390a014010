"""Hugging Face BLIP and BLIP-2: the image tower, whose attention has one projection for q, k and v."""

from __future__ import annotations

from typing import Any

from transformers.models.blip.modeling_blip import BlipAttention, BlipEncoderLayer, BlipModel, BlipVisionModel
from transformers.models.blip_2.modeling_blip_2 import Blip2Attention, Blip2EncoderLayer, Blip2VisionModel

from vitrim.hosts.transformers.common import ClassTokenTower, ReducedClipLayer, ReducedJointLayer, TransformersHost


class ReducedBlipEncoderLayer(ReducedJointLayer, ReducedClipLayer, BlipEncoderLayer):
    attention_classes = (BlipAttention,)
    output_names = ("projection",)

    def kernel(self, attn: Any) -> dict[str, Any]:
        return {"fused": False, "drop": attn.dropout}  # BLIP writes its attention out


class ReducedBlip2EncoderLayer(ReducedJointLayer, ReducedClipLayer, Blip2EncoderLayer):
    attention_classes = (Blip2Attention,)
    output_names = ("projection",)
    dropout_name = "attention_dropout"


class HFBlip(ClassTokenTower):
    """`BlipModel` reads the class token; text decoders attend to all tokens of the bare tower."""

    name = "transformers BLIP"
    reduced_blocks = (ReducedBlipEncoderLayer,)
    trunk_classes = (BlipVisionModel,)
    chooses_kernel = False
    prefix_readers = (BlipModel,)


class HFBlip2(TransformersHost):
    """The image tower; queries attend to all its tokens."""

    name = "transformers BLIP-2"
    purpose = "vision-language models"
    heads = ("patches",)
    reduced_blocks = (ReducedBlip2EncoderLayer,)
    trunk_classes = (Blip2VisionModel,)
    layers_name = "encoder.layers"
