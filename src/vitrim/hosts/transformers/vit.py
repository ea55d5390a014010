"""Hugging Face ViT, DeiT, and encoders with ViT's layers: ViTMAE, ViT-MSN, I-JEPA."""

from __future__ import annotations

from torch import nn
from transformers.models.deit import modeling_deit as deit
from transformers.models.ijepa import modeling_ijepa as ijepa
from transformers.models.vit import modeling_vit as vit
from transformers.models.vit_mae import modeling_vit_mae as vit_mae
from transformers.models.vit_msn import modeling_vit_msn as vit_msn

from vitrim.errors import UnsupportedModelError
from vitrim.hosts.transformers.common import TransformersHost, classifiers
from vitrim.hosts.transformers.versions import OLDER_VIT, VIT_LAYERS, ViTForm, attention


class ReducedViTLayer(ViTForm, vit.ViTLayer):
    attention_classes = (attention(vit, "ViT", OLDER_VIT),)


class ReducedDeiTLayer(ViTForm, deit.DeiTLayer):
    attention_classes = (attention(deit, "DeiT", OLDER_VIT),)


class ReducedViTMAELayer(ViTForm, vit_mae.ViTMAELayer):
    attention_classes = (attention(vit_mae, "ViTMAE", OLDER_VIT),)


class ReducedViTMSNLayer(ViTForm, vit_msn.ViTMSNLayer):
    attention_classes = (attention(vit_msn, "ViTMSN", OLDER_VIT),)


class ReducedIJepaLayer(ViTForm, ijepa.IJepaLayer):
    attention_classes = (attention(ijepa, "IJepa", OLDER_VIT),)


class HFViT(TransformersHost):
    """Hugging Face ViT."""

    name = "transformers ViT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedViTLayer,)
    trunk_classes = (vit.ViTModel,)
    layers_name = VIT_LAYERS
    prefix_readers = (vit.ViTForImageClassification,)


class HFDeiT(TransformersHost):
    """A class and a distillation token; the classifiers read one or both."""

    name = "transformers DeiT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedDeiTLayer,)
    trunk_classes = (deit.DeiTModel,)
    layers_name = VIT_LAYERS
    num_prefix = 2

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return len(classifiers(model)) or None  # one classifier per prefix token


class HFViTMAE(TransformersHost):
    """The encoder on whole images, ``mask_ratio=0``.

    With a mask, the encoder gets a random choice of patches in random order, which its decoder counts and puts back.
    Even without one the patches are shuffled, so methods that read rows and columns are refused.
    """

    name = "transformers ViTMAE"
    heads = ("patches",)
    reduced_blocks = (ReducedViTMAELayer,)
    trunk_classes = (vit_mae.ViTMAEModel,)
    layers_name = VIT_LAYERS
    maker_name = None  # patches are shuffled behind it
    counter_name = "embeddings.patch_embeddings.projection"

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
    """The classifier reads the class token."""

    name = "transformers ViT-MSN"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedViTMSNLayer,)
    trunk_classes = (vit_msn.ViTMSNModel,)
    layers_name = VIT_LAYERS
    prefix_readers = (vit_msn.ViTMSNForImageClassification,)


class HFIJepa(TransformersHost):
    """No class token; the classifier averages the patches. Refused: a pooling layer, which reads the first patch."""

    name = "transformers I-JEPA"
    heads = ("no class token",)
    reduced_blocks = (ReducedIJepaLayer,)
    trunk_classes = (ijepa.IJepaModel,)
    layers_name = VIT_LAYERS
    num_prefix = 0

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if cls.trunk(model).pooler is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} with add_pooling_layer=True is not supported: it pools the first patch, as "
                "if it were a class token"
            )
