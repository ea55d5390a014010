"""Hugging Face CLIP: the vision tower, alone, with its projection, with a classifier, or next to the text tower."""

from __future__ import annotations

from torch import nn
from transformers.models.clip.modeling_clip import (
    CLIPAttention,
    CLIPEncoderLayer,
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)

from vitrim.hosts.transformers.common import ReducedClipLayer, TransformersHost


class ReducedCLIPEncoderLayer(ReducedClipLayer, CLIPEncoderLayer):
    """`CLIPEncoderLayer` under reduction."""

    host_class = CLIPEncoderLayer
    attention_class = CLIPAttention


class HFCLIP(TransformersHost):
    """Hugging Face CLIP. The text tower, whose layers have the same class, is left as it is.

    Image embeddings read the class token. The classifier averages the patches, and the bare tower hands out its tokens.
    """

    name = "transformers CLIP"
    purpose = "images and text"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedCLIPEncoderLayer,)
    trunk_classes = (CLIPVisionModel,)
    layers_name = "encoder.layers"

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return 1 if isinstance(model, CLIPModel | CLIPVisionModelWithProjection) else None
