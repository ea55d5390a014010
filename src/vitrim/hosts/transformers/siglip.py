"""Hugging Face SigLIP: the vision tower, alone, with a classifier, or next to the text tower."""

from __future__ import annotations

from transformers.models.siglip.modeling_siglip import SiglipAttention, SiglipEncoderLayer, SiglipVisionModel

from vitrim.hosts.transformers.common import ReducedClipLayer, TransformersHost


class ReducedSiglipEncoderLayer(ReducedClipLayer, SiglipEncoderLayer):
    """`SiglipEncoderLayer` under reduction."""

    host_class = SiglipEncoderLayer
    attention_class = SiglipAttention


class HFSiglip(TransformersHost):
    """Hugging Face SigLIP: no class token; its heads attend to the patches with a probe, or average them.

    The text tower, whose layers have the same class, is left as it is.
    """

    name = "transformers SigLIP"
    purpose = "images and text"
    heads = ("no class token",)
    reduced_blocks = (ReducedSiglipEncoderLayer,)
    trunk_classes = (SiglipVisionModel,)
    num_prefix = 0
    has_class_token = False
    layers_name = "encoder.layers"
