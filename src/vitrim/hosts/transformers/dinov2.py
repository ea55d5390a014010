"""Hugging Face DINOv2, with and without register tokens: model, classifier, backbone."""

from __future__ import annotations

from transformers.models.dinov2.modeling_dinov2 import Dinov2Attention, Dinov2Backbone, Dinov2Layer, Dinov2Model
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersAttention,
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersLayer,
    Dinov2WithRegistersModel,
)

from vitrim.hosts.transformers.common import ReducedDinoLayer, TransformersHost


class ReducedDinov2Layer(ReducedDinoLayer, Dinov2Layer):
    """`Dinov2Layer` under reduction."""

    host_class = Dinov2Layer
    attention_class = Dinov2Attention


class ReducedDinov2WithRegistersLayer(ReducedDinoLayer, Dinov2WithRegistersLayer):
    """`Dinov2WithRegistersLayer` under reduction."""

    host_class = Dinov2WithRegistersLayer
    attention_class = Dinov2WithRegistersAttention


class _Dino(TransformersHost):
    """The classifier reads the class token and the mean of the patches; model and backbone hand out tokens."""

    layers_name = "encoder.layer"


class HFDinov2(_Dino):
    """Hugging Face DINOv2."""

    name = "transformers DINOv2"
    heads = ("patches",)
    reduced_blocks = (ReducedDinov2Layer,)
    trunk_classes = (Dinov2Model, Dinov2Backbone)


class HFDinov2WithRegisters(_Dino):
    """Hugging Face DINOv2 with register tokens, which are protected like the class token."""

    name = "transformers DINOv2 with registers"
    heads = ("patches",)
    reduced_blocks = (ReducedDinov2WithRegistersLayer,)
    trunk_classes = (Dinov2WithRegistersModel, Dinov2WithRegistersBackbone)
