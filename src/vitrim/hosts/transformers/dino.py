"""Hugging Face DINOv2, with and without registers, and DINOv3 with ViT weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as dinov2_with_registers
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3_vit

from vitrim.core.attention import Attention
from vitrim.core.tokens import TokenState
from vitrim.hosts.transformers.common import ReducedDinoLayer, TransformersHost, refuse_mask
from vitrim.hosts.transformers.versions import DINOV3_LAYERS, OLDER_DINO, DinoForm, attention


class ReducedDinov2Layer(DinoForm, dinov2.Dinov2Layer):
    attention_classes = (attention(dinov2, "Dinov2", OLDER_DINO),)


class ReducedDinov2WithRegistersLayer(DinoForm, dinov2_with_registers.Dinov2WithRegistersLayer):
    attention_classes = (attention(dinov2_with_registers, "Dinov2WithRegisters", OLDER_DINO),)


class ReducedRotaryLayer(ReducedDinoLayer):
    """The reduced form of DINOv3's layers: patch tokens keep the rotary angles of their place."""

    dropout_name = "dropout"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        refuse_mask(attention_mask)
        return self.run(hidden_states, position_embeddings)

    def projected(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attention = super().projected(x, state, rows, given)
        # (P, d) as it is, (B, P, d) to (B, 1, P, d)
        tables = [state.patch_rows(table) for table in given]
        cos, sin = (table if table.dim() == 2 else table.unsqueeze(1) for table in tables)
        q = attention.q if rows is not None else _rotated(attention.q, cos, sin, state.num_prefix)
        return replace(attention, q=q, k=_rotated(attention.k, cos, sin, state.num_prefix), k_raw=attention.k)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, num_prefix: int) -> Tensor:
    """Queries or keys (B, H, N, d) with rotated patch tokens."""
    prefix, patches = x[:, :, :num_prefix], x[:, :, num_prefix:]
    return torch.cat([prefix, patches * cos + dinov3_vit.rotate_half(patches) * sin], dim=2)


class ReducedDINOv3ViTLayer(ReducedRotaryLayer, dinov3_vit.DINOv3ViTLayer):
    attention_classes = (dinov3_vit.DINOv3ViTAttention,)


class HFDinov2(TransformersHost):
    """Hugging Face DINOv2."""

    name = "transformers DINOv2"
    heads = ("patches",)  # the classifier reads the class token and the mean of the patches
    reduced_blocks = (ReducedDinov2Layer,)
    trunk_classes = (dinov2.Dinov2Model, dinov2.Dinov2Backbone)


class HFDinov2WithRegisters(TransformersHost):
    """Hugging Face DINOv2 with register tokens, which are protected like the class token."""

    name = "transformers DINOv2 with registers"
    heads = ("patches",)
    reduced_blocks = (ReducedDinov2WithRegistersLayer,)
    trunk_classes = (dinov2_with_registers.Dinov2WithRegistersModel, dinov2_with_registers.Dinov2WithRegistersBackbone)


class HFDINOv3(TransformersHost):
    """Hugging Face DINOv3: class token, registers, rotary positions."""

    name = "transformers DINOv3"
    heads = ("patches",)
    reduced_blocks = (ReducedDINOv3ViTLayer,)
    trunk_classes = (dinov3_vit.DINOv3ViTModel, dinov3_vit.DINOv3ViTBackbone)
    layers_name = DINOV3_LAYERS
