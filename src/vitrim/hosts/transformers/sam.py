"""Hugging Face SAM's image encoder and ViTDet: windows are batch rows (`vitrim.hosts.shared.windows`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.sam.modeling_sam import (
    SamVisionAttention,
    SamVisionEncoder,
    SamVisionLayer,
    SamVisionSdpaAttention,
)
from transformers.models.vitdet.modeling_vitdet import (
    VitDetAttention,
    VitDetBackbone,
    VitDetLayer,
    VitDetModel,
    get_rel_pos,
)

from vitrim.core.attention import Attention, split_heads
from vitrim.core.plan import Part
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.windows import WindowBlock, WindowedHost
from vitrim.hosts.transformers.common import TransformersHost
from vitrim.hosts.transformers.library import TransformersLibrary


class _ReducedWindowLayer(WindowBlock):
    """The attention SAM and ViTDet have in common: q, k and v of one projection, relative positions in two axes."""

    heads_name: ClassVar[str] = "num_heads"

    def project(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        (attn,) = self.attentions(self)
        heads = getattr(attn, self.heads_name)
        q, k, v = (split_heads(part, heads) for part in attn.qkv(self.pre_norm(x)).chunk(3, dim=-1))
        return self.window_attention(
            state,
            attn,
            q,
            k,
            v,
            relative=getattr(attn, "get_rel_pos", get_rel_pos),  # SAM's is a method
            # attention that is written out alone may have dropout
            dropout=attn.dropout if self.training and type(attn) is SamVisionAttention else 0.0,
            fused=isinstance(attn, SamVisionSdpaAttention),
        )

    def values(self, x: Tensor) -> Tensor:
        (attn,) = self.attentions(self)
        return split_heads(attn.qkv(self.pre_norm(x)).chunk(3, dim=-1)[2], getattr(attn, self.heads_name))


class ReducedSamVisionLayer(_ReducedWindowLayer, SamVisionLayer):
    """`SamVisionLayer` under reduction."""

    host_class = SamVisionLayer
    attention_classes = (SamVisionAttention, SamVisionSdpaAttention)
    norm_name = "layer_norm1"
    mlp_names = ("layer_norm2", "mlp")
    heads_name = "num_attention_heads"

    def forward(self, hidden_states: Tensor) -> Any:
        return self.run(hidden_states)


class ReducedVitDetLayer(_ReducedWindowLayer, VitDetLayer):
    """`VitDetLayer` under reduction."""

    host_class = VitDetLayer
    attention_classes = (VitDetAttention,)
    attention_name = "attention"
    update_names = ("drop_path",)
    mlp_names = ("norm2", "mlp", "drop_path")
    channels_first = True

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
        return (self.run(hidden_states),)


class _Windowed(WindowedHost, TransformersHost):
    """The map of the last layer is read place by place, so pruned patches come back at the end."""

    has_maps = False
    num_prefix = 0
    has_class_token = False
    tokens_of_images = False  # it hands out maps, of a neck or of its own layout
    chooses_kernel = False  # the class of the attention says which it is


class HFSam(_Windowed):
    """The image encoder, whose neck reads every patch at its place: [windows](#windows)."""

    name = "transformers SAM"
    purpose = "segmentation, detection, poses, depth"
    reduced_blocks = (ReducedSamVisionLayer,)
    trunk_classes = (SamVisionEncoder,)
    layers_name = "layers"
    maker_name = "patch_embed"


class HFVitDet(_Windowed):
    """ViTDet without the convolutional blocks that some have between their layers: [windows](#windows)."""

    name = "transformers ViTDet"
    purpose = "segmentation, detection, poses, depth"
    reduced_blocks = (ReducedVitDetLayer,)
    trunk_classes = (VitDetModel, VitDetBackbone)
    layers_name = "encoder.layer"
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
    """The neck is the head."""

    parts: ClassVar[Mapping[Part, tuple[str, ...]]] = {
        **TransformersLibrary.parts,
        "head": ("neck",),
        "positions": ("pos_embed",),
    }
