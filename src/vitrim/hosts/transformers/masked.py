"""Hugging Face encoders that learn from masked images, with ViT's layers: ViTMAE, ViT-MSN, I-JEPA."""

from __future__ import annotations

from torch import nn
from transformers.models.ijepa.modeling_ijepa import IJepaAttention, IJepaLayer, IJepaModel
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEAttention, ViTMAELayer, ViTMAEModel
from transformers.models.vit_msn.modeling_vit_msn import ViTMSNAttention, ViTMSNLayer, ViTMSNModel

from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import ReducedPlainLayer
from vitrim.hosts.transformers.vit import PlainHost


class ReducedViTMAELayer(ReducedPlainLayer, ViTMAELayer):
    """`ViTMAELayer` under reduction."""

    host_class = ViTMAELayer
    attention_class = ViTMAEAttention


class ReducedViTMSNLayer(ReducedPlainLayer, ViTMSNLayer):
    """`ViTMSNLayer` under reduction."""

    host_class = ViTMSNLayer
    attention_class = ViTMSNAttention


class ReducedIJepaLayer(ReducedPlainLayer, IJepaLayer):
    """`IJepaLayer` under reduction."""

    host_class = IJepaLayer
    attention_class = IJepaAttention


class HFViTMAE(PlainHost):
    """Hugging Face ViTMAE: the encoder on whole images, ``mask_ratio=0``.

    With a mask the encoder gets a random choice of patches in random order, which its decoder counts and puts back.
    Even without one the patches are shuffled, so methods that read rows and columns are refused.
    """

    name = "transformers ViTMAE"
    heads = ("patches",)
    reduced_blocks = (ReducedViTMAELayer,)
    trunk_classes = (ViTMAEModel,)

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

    @classmethod
    def patch_maker(cls, model: nn.Module) -> None:
        return None  # the patches are shuffled behind it


class HFViTMSN(PlainHost):
    """Hugging Face ViT-MSN: its classifier reads the class token."""

    name = "transformers ViT-MSN"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedViTMSNLayer,)
    trunk_classes = (ViTMSNModel,)


class HFIJepa(PlainHost):
    """Hugging Face I-JEPA: no class token; its classifier averages the patches."""

    name = "transformers I-JEPA"
    heads = ("no class token",)
    reduced_blocks = (ReducedIJepaLayer,)
    trunk_classes = (IJepaModel,)
    num_prefix = 0
    has_class_token = False

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return None

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if cls.trunk(model).pooler is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} with add_pooling_layer=True is not supported: it pools the first patch, as "
                "if it were a class token"
            )
