"""Hugging Face models of an image and a text tower with CLIP's layers: AltCLIP, Chinese-CLIP, AIMv2.

Text towers, whose layers may have the same class, are left as they are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.aimv2.modeling_aimv2 import Aimv2Attention, Aimv2EncoderLayer, Aimv2VisionModel
from transformers.models.altclip.modeling_altclip import (
    AltCLIPAttention,
    AltCLIPEncoderLayer,
    AltCLIPModel,
    AltCLIPVisionModel,
)
from transformers.models.chinese_clip.modeling_chinese_clip import (
    ChineseCLIPModel,
    ChineseCLIPVisionAttention,
    ChineseCLIPVisionLayer,
    ChineseCLIPVisionModel,
)

from vitrim.hosts.transformers.common import ReducedClipLayer, ReducedLayer, TransformersHost


class ReducedAltCLIPEncoderLayer(ReducedClipLayer, AltCLIPEncoderLayer):
    """`AltCLIPEncoderLayer` under reduction."""

    host_class = AltCLIPEncoderLayer
    attention_class = AltCLIPAttention


class ReducedChineseCLIPVisionLayer(ReducedClipLayer, ChineseCLIPVisionLayer):
    """`ChineseCLIPVisionLayer` under reduction."""

    host_class = ChineseCLIPVisionLayer
    attention_class = ChineseCLIPVisionAttention


class ReducedAimv2EncoderLayer(ReducedLayer, Aimv2EncoderLayer):
    """`Aimv2EncoderLayer` under reduction."""

    host_class = Aimv2EncoderLayer
    attention_class = Aimv2Attention
    scale_name = "scale"
    dropout_name = "dropout"

    @property
    def attn(self) -> Any:
        return self.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.rms_norm1(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.attn.out_proj(out)  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.ffn(self.rms_norm2(x))  # type: ignore[no-any-return]


class _ClassTokenTower(TransformersHost):
    """Image embeddings of the two towers read the class token; the bare tower hands out its tokens."""

    heads = ("class token", "patches")
    layers_name = "encoder.layers"

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return 1 if isinstance(model, AltCLIPModel | ChineseCLIPModel) else None


class HFAltCLIP(_ClassTokenTower):
    """Hugging Face AltCLIP: the image tower, alone or next to the text tower."""

    name = "transformers AltCLIP"
    purpose = "images and text"
    reduced_blocks = (ReducedAltCLIPEncoderLayer,)
    trunk_classes = (AltCLIPVisionModel,)


class HFChineseCLIP(_ClassTokenTower):
    """Hugging Face Chinese-CLIP: the image tower, alone or next to the text tower."""

    name = "transformers Chinese-CLIP"
    purpose = "images and text"
    reduced_blocks = (ReducedChineseCLIPVisionLayer,)
    trunk_classes = (ChineseCLIPVisionModel,)


class HFAimv2(TransformersHost):
    """Hugging Face AIMv2: no class token; its head, if it has one, attends to the patches with a probe."""

    name = "transformers AIMv2"
    purpose = "images and text"
    heads = ("no class token",)
    reduced_blocks = (ReducedAimv2EncoderLayer,)
    trunk_classes = (Aimv2VisionModel,)
    num_prefix = 0
    has_class_token = False
    layers_name = "encoder.layers"

    @classmethod
    def patch_maker(cls, model: nn.Module) -> nn.Module | None:
        return cls.trunk(model).embeddings.patch_embed  # type: ignore[no-any-return]
