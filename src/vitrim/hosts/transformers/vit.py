"""Hugging Face ViT and DeiT: `ViTModel`, `DeiTModel` and their classifiers."""

from __future__ import annotations

from torch import nn
from transformers.models.deit.modeling_deit import DeiTAttention, DeiTLayer, DeiTModel
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer, ViTModel

from vitrim.hosts.transformers.common import ReducedPlainLayer, TransformersHost, classifiers


class ReducedViTLayer(ReducedPlainLayer, ViTLayer):
    """`ViTLayer` under reduction."""

    host_class = ViTLayer
    attention_class = ViTAttention


class ReducedDeiTLayer(ReducedPlainLayer, DeiTLayer):
    """`DeiTLayer` under reduction."""

    host_class = DeiTLayer
    attention_class = DeiTAttention


class PlainHost(TransformersHost):
    """Models laid out as ViT: layers side by side with the embeddings, one classifier per prefix token."""

    layers_name = "layers"

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return len(classifiers(model)) or None  # one classifier per prefix token


class HFViT(PlainHost):
    """Hugging Face ViT."""

    name = "transformers ViT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedViTLayer,)
    trunk_classes = (ViTModel,)


class HFDeiT(PlainHost):
    """Hugging Face DeiT: a class and a distillation token; its classifiers read one or both."""

    name = "transformers DeiT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedDeiTLayer,)
    trunk_classes = (DeiTModel,)
    num_prefix = 2
