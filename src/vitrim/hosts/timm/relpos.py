"""timm's `VisionTransformerRelPos`: the bias between two tokens follows the positions of their anchors."""

from __future__ import annotations

from typing import Any

from timm.models import vision_transformer_relpos as relpos
from torch import Tensor, nn

from vitrim.core.attention import Attention
from vitrim.core.tokens import TokenState
from vitrim.hosts.timm.common import PostNorm, PreNorm, TimmBlock, TimmHost


class ReducedBiasBlock(TimmBlock):
    """Base of timm's reduced blocks with a relative position bias, without their norms."""

    attention_classes = (relpos.RelPosAttention,)

    @classmethod
    def bypassed(cls, block: Any) -> list[nn.Module]:
        rel_pos = block.attn.rel_pos  # the library calls it, too, when it writes out the map
        return super().bypassed(block) + ([] if rel_pos is None else [rel_pos])

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return self.run(x, shared_rel_pos)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn = self.attn
        q, k, v = self.project_all(x, rows)
        table = given if attn.rel_pos is None else attn.rel_pos.get_bias()  # its own comes first, as in timm
        table = None if table is None else table[0]
        return self.attention_of(attn, state, attn.q_norm(q), attn.k_norm(k), v, table=table, rows=rows)


class ReducedRelPosBlock(PreNorm, ReducedBiasBlock, relpos.RelPosBlock):
    """timm's pre-norm `RelPosBlock` under reduction."""


class ReducedResPostRelPosBlock(PostNorm, ReducedBiasBlock, relpos.ResPostRelPosBlock):
    """timm's `ResPostRelPosBlock`, whose norms are after attention and after the MLP, under reduction."""


class TimmRelPos(TimmHost):
    """ViT with relative positions: the bias, per block or shared, is gathered by rows and columns."""

    name = "timm VisionTransformerRelPos"
    reduced_blocks = (ReducedRelPosBlock, ReducedResPostRelPosBlock)
    model_classes = (relpos.VisionTransformerRelPos,)
