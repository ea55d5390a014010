"""Hugging Face OWL-ViT and OWLv2: the image tower, alone, next to the text tower, or in the detector."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers.models.owlv2.modeling_owlv2 import (
    Owlv2Attention,
    Owlv2EncoderLayer,
    Owlv2ForObjectDetection,
    Owlv2Model,
    Owlv2VisionTransformer,
)
from transformers.models.owlvit.modeling_owlvit import (
    OwlViTAttention,
    OwlViTEncoderLayer,
    OwlViTForObjectDetection,
    OwlViTModel,
    OwlViTVisionTransformer,
)

from vitrim.core.plan import HostFacts
from vitrim.hosts.transformers.common import ReducedClipLayer, TransformersHost


class ReducedOwlViTEncoderLayer(ReducedClipLayer, OwlViTEncoderLayer):
    """`OwlViTEncoderLayer` under reduction."""

    host_class = OwlViTEncoderLayer
    attention_class = OwlViTAttention


class ReducedOwlv2EncoderLayer(ReducedClipLayer, Owlv2EncoderLayer):
    """`Owlv2EncoderLayer` under reduction."""

    host_class = Owlv2EncoderLayer
    attention_class = Owlv2Attention


class _Owl(TransformersHost):
    """Embeddings of whole images read the class token; the detector has a box and a class for every patch."""

    heads = ("class token", "patches", "grid")
    layers_name = "encoder.layers"

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return 1 if isinstance(model, OwlViTModel | Owlv2Model) else None

    @classmethod
    def facts(cls, model: nn.Module) -> HostFacts:
        detects = isinstance(model, OwlViTForObjectDetection | Owlv2ForObjectDetection)
        return replace(super().facts(model), dense=detects)


class HFOwlViT(_Owl):
    """Hugging Face OWL-ViT: the detector has a box and a class for every patch, so pruned ones come back."""

    name = "transformers OWL-ViT"
    purpose = "images and text"
    reduced_blocks = (ReducedOwlViTEncoderLayer,)
    trunk_classes = (OwlViTVisionTransformer,)


class HFOwlv2(_Owl):
    """Hugging Face OWLv2: as OWL-ViT."""

    name = "transformers OWLv2"
    purpose = "images and text"
    reduced_blocks = (ReducedOwlv2EncoderLayer,)
    trunk_classes = (Owlv2VisionTransformer,)
