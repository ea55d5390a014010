"""Hugging Face SAM's and SAM 3's image encoders and ViTDet. Windows are batch rows (`vitrim.hosts.shared.windows`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.sam import modeling_sam as sam
from transformers.models.sam3 import modeling_sam3 as sam3
from transformers.models.vitdet import modeling_vitdet as vitdet

from vitrim.core.attention import Attention
from vitrim.core.plan import Part
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import JointBlock, scale_of
from vitrim.hosts.shared.windows import AcrossWindows, WindowBlock, WindowedHost, WindowState
from vitrim.hosts.transformers.common import DenseBackbone, ReducedLayer
from vitrim.hosts.transformers.library import TransformersLibrary


class _ReducedWindowLayer(WindowBlock, JointBlock):
    """The attention of SAM and ViTDet: q, k and v from one projection, relative positions along two axes."""

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        (attn,) = self.attentions(self)
        q, k, v = self.project_all(x, None)
        relative = getattr(attn, "get_rel_pos", vitdet.get_rel_pos)  # SAM's is a method
        # only written-out attention may have dropout
        dropout = attn.dropout if self.training and type(attn) is sam.SamVisionAttention else 0.0
        fused = isinstance(attn, sam.SamVisionSdpaAttention)
        scale = scale_of(fused, attn, q)
        return self.window_attention(state, attn, q, k, v, scale, relative=relative, dropout=dropout, fused=fused)


class ReducedSamVisionLayer(_ReducedWindowLayer, sam.SamVisionLayer):
    attention_classes = (sam.SamVisionAttention, sam.SamVisionSdpaAttention)
    heads_name = "num_attention_heads"
    norm_name = "layer_norm1"
    mlp_names = ("layer_norm2", "mlp")

    def forward(self, hidden_states: Tensor) -> Any:
        return self.run(hidden_states)


class ReducedVitDetLayer(_ReducedWindowLayer, vitdet.VitDetLayer):
    attention_classes = (vitdet.VitDetAttention,)
    attention_name = "attention"
    update_names = ("drop_path",)
    mlp_names = ("norm2", "mlp", "drop_path")
    channels_first = True

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
        return (self.run(hidden_states),)


class ReducedSam3Layer(WindowBlock, ReducedLayer, sam3.Sam3ViTLayer):
    """Reduced `Sam3ViTLayer`: tokens keep the angles of their place in the window, or in the image."""

    attention_classes = (sam3.Sam3ViTRoPEAttention,)
    norm_name = "layer_norm1"
    update_names = ()
    mlp_names = ("layer_norm2", "mlp", "dropout")

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self.run(hidden_states)

    def projected(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        assert isinstance(state, WindowState)
        attention = super().projected(x, state, rows, given)
        table = torch.cat(self.rotary_emb(x, self.position_ids), dim=-1)[0]  # (P, 2d)
        cos, sin = self.rows_of_table(table, state, x.shape[0]).chunk(2, dim=-1)
        q, k = sam3.apply_rotary_pos_emb_2d(attention.q, attention.k, cos=cos, sin=sin)
        parts = {**attention.parts(), "q": q, "k": k, "k_raw": attention.k}
        if not self.crosses or state.windows.number == 1:
            return Attention(**parts)
        bias = state.windows.bias_of_images(attention.bias)
        return AcrossWindows(**{**parts, "bias": bias}, windows=state.windows)


class _Windowed(WindowedHost, DenseBackbone):
    """The map of the last layer is read."""

    has_maps = False
    num_prefix = 0
    tokens_of_images = False  # it returns maps, from a neck or in its own layout
    chooses_kernel = False  # the class of the attention determines it


class HFSam(_Windowed):
    """The image encoder, whose neck reads every patch at its place: [windows](hosts.md#windows)."""

    name = "transformers SAM"
    reduced_blocks = (ReducedSamVisionLayer,)
    trunk_classes = (sam.SamVisionEncoder,)
    layers_name = "layers"
    maker_name = "patch_embed"


class HFSam3(_Windowed):
    """SAM 3's image encoder, alone or in a model with its neck, prompts and decoder: [windows](hosts.md#windows)."""

    name = "transformers SAM 3"
    reduced_blocks = (ReducedSam3Layer,)
    trunk_classes = (sam3.Sam3ViTModel,)
    layers_name = "layers"
    chooses_kernel = True


class HFVitDet(_Windowed):
    """ViTDet without the convolutional blocks that some versions have between layers: [windows](hosts.md#windows)."""

    name = "transformers ViTDet"
    reduced_blocks = (ReducedVitDetLayer,)
    trunk_classes = (vitdet.VitDetModel, vitdet.VitDetBackbone)
    maker_name = "embeddings.projection"

    @classmethod
    def check(cls, model: nn.Module) -> None:
        super().check(model)
        if any(block.use_residual_block for block in cls.blocks(model)):
            raise UnsupportedModelError(
                f"{type(model).__name__} with residual_block_indices is not supported: convolutions between its "
                "layers read every patch at its place"
            )


class HFSamLibrary(TransformersLibrary):
    """A model whose head is the neck."""

    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        **TransformersLibrary.parts,
        "head": ("neck",),
        "positions": ("pos_embed",),
    }
