"""timm's `VisionTransformerRelPos`: the bias between two tokens is that of the positions of their anchors."""

from __future__ import annotations

from typing import Any

from timm.models.vision_transformer_relpos import (
    RelPosAttention,
    RelPosBlock,
    ResPostRelPosBlock,
    VisionTransformerRelPos,
)
from torch import Tensor

from vitrim.attention import Attention, add_bias
from vitrim.backbones.timm.common import TimmBlock, TimmHost, position_bias, project_qkv, project_values
from vitrim.registry import register_backbone
from vitrim.tokens import TokenState


class ReducedBiasBlock(TimmBlock):
    """What timm's blocks with a relative position bias share: everything but where their norms are."""

    attention_classes = (RelPosAttention,)

    attn: Any

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return self.run(x, shared_rel_pos)

    def pre_norm(self, x: Tensor) -> Tensor:
        """The norm before attention, (B, N, C)."""
        raise NotImplementedError

    def project(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attn = self.attn
        q, k, v = project_qkv(attn, self.pre_norm(x), rows, self.reducer.fresh_values)
        table = host_args[0] if attn.rel_pos is None else attn.rel_pos.get_bias()  # its own comes first, as in timm
        table = None if table is None else table[0]
        return Attention(
            q=attn.q_norm(q),
            k=attn.k_norm(k),
            v=v,
            scale=attn.scale,
            bias=add_bias(
                state.key_bias(q.dtype, self.proportional),
                position_bias(table, state, rows, q.dtype),
            ),
            dropout=attn.attn_drop.p if attn.training else 0.0,
            fused=attn.fused_attn,
        )

    def values(self, x: Tensor) -> Tensor:
        return project_values(self.attn, self.pre_norm(x))


class ReducedRelPosBlock(ReducedBiasBlock, RelPosBlock):
    """timm's pre-norm `RelPosBlock` under reduction."""

    host_class = RelPosBlock

    norm1: Any
    ls1: Any
    drop_path1: Any
    norm2: Any
    mlp: Any
    ls2: Any
    drop_path2: Any

    def pre_norm(self, x: Tensor) -> Tensor:
        return self.norm1(x)  # type: ignore[no-any-return]

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.drop_path1(self.ls1(self.attn.proj_drop(self.attn.proj(out))))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path2(self.ls2(self.mlp(self.norm2(x))))  # type: ignore[no-any-return]


class ReducedResPostRelPosBlock(ReducedBiasBlock, ResPostRelPosBlock):
    """timm's `ResPostRelPosBlock`, whose norms are after attention and after the MLP, under reduction."""

    host_class = ResPostRelPosBlock

    norm1: Any
    drop_path1: Any
    norm2: Any
    mlp: Any
    drop_path2: Any

    def pre_norm(self, x: Tensor) -> Tensor:
        return x

    def attention_branch(self, out: Tensor) -> Tensor:
        return self.drop_path1(self.norm1(self.attn.proj_drop(self.attn.proj(out))))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path2(self.norm2(self.mlp(x)))  # type: ignore[no-any-return]


@register_backbone("timm.models.vision_transformer_relpos.VisionTransformerRelPos")
class TimmRelPos(TimmHost):
    """Models of class `timm.models.vision_transformer_relpos.VisionTransformerRelPos`."""

    name = "timm VisionTransformerRelPos"
    reduced_blocks = (ReducedRelPosBlock, ReducedResPostRelPosBlock)
    model_classes = (VisionTransformerRelPos,)
