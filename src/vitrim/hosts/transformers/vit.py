"""Hugging Face ViT and DeiT: `ViTModel`, `DeiTModel` and their classifiers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.deit.modeling_deit import DeiTAttention, DeiTLayer, DeiTModel
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer, ViTModel

from vitrim.core.registry import register_host
from vitrim.hosts.transformers.common import ReducedLayer, TransformersHost


class _ReducedPlainLayer(ReducedLayer):
    """ViT and DeiT have the same layer."""

    @property
    def attn(self) -> Any:
        return self.attention

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.layernorm_before(x)  # type: ignore[no-any-return, operator]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.dropout(self.attn.o_proj(out))  # type: ignore[no-any-return, operator]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.dropout(self.mlp(self.layernorm_after(x)))  # type: ignore[no-any-return, operator]


class ReducedViTLayer(_ReducedPlainLayer, ViTLayer):
    """`ViTLayer` under reduction."""

    host_class = ViTLayer
    attention_class = ViTAttention


class ReducedDeiTLayer(_ReducedPlainLayer, DeiTLayer):
    """`DeiTLayer` under reduction."""

    host_class = DeiTLayer
    attention_class = DeiTAttention


class _Plain(TransformersHost):
    layers_name = "layers"

    @classmethod
    def head_rows(cls, model: nn.Module) -> int | None:
        return len(cls.find_classifiers(model)) or None  # one classifier per prefix token


@register_host(
    "transformers.models.vit.modeling_vit.ViTModel",
    "transformers.models.vit.modeling_vit.ViTForImageClassification",
)
class HFViT(_Plain):
    """Hugging Face ViT."""

    name = "transformers ViT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedViTLayer,)
    trunk_classes = (ViTModel,)


@register_host(
    "transformers.models.deit.modeling_deit.DeiTModel",
    "transformers.models.deit.modeling_deit.DeiTForImageClassification",
    "transformers.models.deit.modeling_deit.DeiTForImageClassificationWithTeacher",
)
class HFDeiT(_Plain):
    """Hugging Face DeiT: a class and a distillation token; its classifiers read one or both."""

    name = "transformers DeiT"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedDeiTLayer,)
    trunk_classes = (DeiTModel,)
    num_prefix = 2
