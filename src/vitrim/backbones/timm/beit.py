"""timm's `Beit`: BEiT and BEiT v2. The bias between two tokens is that of the positions of their anchors."""

from __future__ import annotations

from typing import Any

from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit, Block
from torch import Tensor

from vitrim.attention import Attention, add_bias
from vitrim.backbones.timm.common import TimmBlock, TimmHost, position_bias, project_qkv, project_values, scaled
from vitrim.registry import register_backbone
from vitrim.tokens import TokenState


class ReducedBeitBlock(TimmBlock, Block):
    """BEiT's block under reduction."""

    host_class = Block
    attention_classes = (BeitAttention,)

    norm1: Any
    attn: Any
    drop_path1: Any
    norm2: Any
    mlp: Any
    drop_path2: Any

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.run(x, shared_rel_pos_bias)

    def project(self, x: Tensor, state: TokenState, rows: int | None, *host_args: Any) -> Attention:
        attn: Any = self.attn
        q, k, v = project_qkv(attn, self.norm1(x), rows, self.reducer.fresh_values)
        own = None if attn.relative_position_bias_table is None else attn._get_rel_pos_bias()[0]
        return Attention(
            q=q,
            k=k,
            v=v,
            scale=attn.scale,
            bias=add_bias(
                state.key_bias(q.dtype, self.proportional),
                position_bias(add_bias(own, host_args[0]), state, rows, q.dtype),
            ),
            dropout=attn.attn_drop.p if attn.training else 0.0,
            fused=attn.fused_attn,
        )

    def values(self, x: Tensor) -> Tensor:
        return project_values(self.attn, self.norm1(x))

    def attention_branch(self, out: Tensor) -> Tensor:
        attn = self.attn
        return self.drop_path1(scaled(attn.proj_drop(attn.proj(out)), self.gamma_1))  # type: ignore[no-any-return]

    def mlp_branch(self, x: Tensor) -> Tensor:
        return self.drop_path2(scaled(self.mlp(self.norm2(x)), self.gamma_2))  # type: ignore[no-any-return]


@register_backbone("timm.models.beit.Beit")
class TimmBeit(TimmHost):
    """Models of class `timm.models.beit.Beit`."""

    name = "timm Beit"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedBeitBlock,)
    model_classes = (Beit,)
