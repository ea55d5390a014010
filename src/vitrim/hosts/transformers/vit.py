"""Hugging Face ViT, DeiT, and encoders that learn from masked images with ViT's layers: ViTMAE, ViT-MSN, I-JEPA."""

from __future__ import annotations

from torch import nn
from transformers.models.deit.modeling_deit import DeiTAttention, DeiTLayer, DeiTModel
from transformers.models.ijepa.modeling_ijepa import IJepaAttention, IJepaLayer, IJepaModel
from transformers.models.vit.modeling_vit import ViTAttention, ViTForImageClassification, ViTLayer, ViTModel
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEAttention, ViTMAELayer, ViTMAEModel
from transformers.models.vit_msn.modeling_vit_msn import (
    ViTMSNAttention,
    ViTMSNForImageClassification,
    ViTMSNLayer,
    ViTMSNModel,
)

from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import ReducedLayer, TransformersHost, classifiers


class ReducedViTLayer(ReducedLayer, ViTLayer):
    """`ViTLayer` under reduction."""

    host_class = ViTLayer
    attention_classes = (ViTAttention,)


class ReducedDeiTLayer(ReducedLayer, DeiTLayer):
    """`DeiTLayer` under reduction."""

    host_class = DeiTLayer
    attention_classes = (DeiTAttention,)


class ReducedViTMAELayer(ReducedLayer, ViTMAELayer):
    """`ViTMAELayer` under reduction."""

    host_class = ViTMAELayer
    attention_classes = (ViTMAEAttention,)


class ReducedViTMSNLayer(ReducedLayer, ViTMSNLayer):
    """`ViTMSNLayer` under reduction."""

    host_class = ViTMSNLayer
    attention_classes = (ViTMSNAttention,)


class ReducedIJepaLayer(ReducedLayer, IJepaLayer):
    """`IJepaLayer` under reduction."""

    host_class = IJepaLayer
    attention_classes = (IJepaAttention,)


class HFViT(TransformersHost):
    """Hugging Face ViT."""

    name = "transformers ViT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedViTLayer,)
    trunk_classes = (ViTModel,)
    layers_name = "layers"
    prefix_readers = (ViTForImageClassification,)


class HFDeiT(TransformersHost):
    """Hugging Face DeiT: a class and a distillation token; its classifiers read one or both."""

    name = "transformers DeiT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedDeiTLayer,)
    trunk_classes = (DeiTModel,)
    layers_name = "layers"
    num_prefix = 2

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return len(classifiers(model)) or None  # one classifier per prefix token


class HFViTMAE(TransformersHost):
    """Hugging Face ViTMAE: the encoder on whole images, ``mask_ratio=0``.

    With a mask the encoder gets a random choice of patches in random order, which its decoder counts and puts back.
    Even without one the patches are shuffled, so methods that read rows and columns are refused.
    """

    name = "transformers ViTMAE"
    heads = ("patches",)
    reduced_blocks = (ReducedViTMAELayer,)
    trunk_classes = (ViTMAEModel,)
    layers_name = "layers"
    maker_name = None  # the patches are shuffled behind it

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        ratio = cls.trunk(model).config.mask_ratio
        if ratio:
            raise UnsupportedModelError(
                f"{type(model).__name__} with mask_ratio={ratio} drops patches at random before its layers; set "
                "model.config.mask_ratio = 0 to encode whole images"
            )

    @classmethod
    def form(cls, model: nn.Module) -> float:
        return float(cls.trunk(model).config.mask_ratio)


class HFViTMSN(TransformersHost):
    """Hugging Face ViT-MSN: its classifier reads the class token."""

    name = "transformers ViT-MSN"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedViTMSNLayer,)
    trunk_classes = (ViTMSNModel,)
    layers_name = "layers"
    prefix_readers = (ViTMSNForImageClassification,)


class HFIJepa(TransformersHost):
    """Hugging Face I-JEPA: no class token; its classifier averages the patches."""

    name = "transformers I-JEPA"
    heads = ("no class token",)
    reduced_blocks = (ReducedIJepaLayer,)
    trunk_classes = (IJepaModel,)
    layers_name = "layers"
    num_prefix = 0
    has_class_token = False

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if cls.trunk(model).pooler is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} with add_pooling_layer=True is not supported: it pools the first patch, as "
                "if it were a class token"
            )
