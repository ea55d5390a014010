"""DINOv2 from its original repository, as ``torch.hub`` loads it, with and without registers."""

from __future__ import annotations

from typing import Any

from dinov2.layers.attention import Attention as DinoAttention
from dinov2.layers.attention import MemEffAttention
from dinov2.layers.block import Block, NestedTensorBlock
from dinov2.models.vision_transformer import DinoVisionTransformer
from torch import Tensor, nn

from vitrim.core.attention import Attention
from vitrim.core.block import is_bare
from vitrim.core.tokens import TokenState
from vitrim.hosts.dinov2.common import DinoHost, ReducedDinoBlock
from vitrim.hosts.shared.blocks import scale_of


class ReducedDinov2Block(ReducedDinoBlock):
    """The reduced form of both blocks of DINOv2."""

    attention_classes = (DinoAttention, MemEffAttention)
    update_names = ("ls1", "dropped")
    mlp_names = ("norm2", "mlp", "ls2", "dropped")
    scales_up_to = 0.1

    drop_path1: Any

    def forward(self, x_or_x_list: Any) -> Any:
        return self.run_one(x_or_x_list)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn = self.attn
        q, k, v = self.project_all(x, rows)
        drop: Any = attn.attn_drop
        if isinstance(drop, float):  # later versions have a fused kernel and no module
            way: dict[str, Any] = {"dropout": drop if attn.training else 0.0}
        elif is_bare(drop, nn.Dropout):
            way = {"dropout": drop.p if attn.training else 0.0}
        else:
            way = {"fused": False, "drop": drop}
        scale = scale_of(isinstance(drop, float), attn, q)
        return Attention(q, k, v, scale, state.key_bias(q.dtype, self.proportional), **way)

    def dropped(self, update: Tensor) -> Tensor:
        """The update of either branch under stochastic depth."""
        # in training the library takes the first drop path for both branches
        return self.drop_path1(update) if self.training and self.sample_drop_ratio > 0.0 else update


class ReducedPlainDinov2Block(ReducedDinov2Block, Block):
    """`Block` under reduction."""


class ReducedNestedTensorBlock(ReducedDinov2Block, NestedTensorBlock):
    """Reduced `NestedTensorBlock`, on images of one size."""


class Dinov2(DinoHost):
    """DINOv2 of facebookresearch, also with registers. Refused: lists of crops; drop path above 0.1 in training."""

    name = "dinov2 DinoVisionTransformer"
    reduced_blocks = (ReducedPlainDinov2Block, ReducedNestedTensorBlock)
    model_class = DinoVisionTransformer
    registers = "num_register_tokens"
