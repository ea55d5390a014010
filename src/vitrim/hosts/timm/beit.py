"""timm's `Beit`: BEiT and BEiT v2. The bias between two tokens follows the positions of their anchors."""

from __future__ import annotations

from typing import Any

from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit, Block
from torch import Tensor

from vitrim.core.attention import Attention, add_bias
from vitrim.core.tokens import TokenState
from vitrim.hosts.timm.common import BiasBeside, PreNormGamma, TimmHost


class ReducedBeitBlock(PreNormGamma, BiasBeside, Block):
    attention_classes = (BeitAttention,)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.run(x, shared_rel_pos_bias)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        attn = self.attn
        q, k, v = self.project_all(x, rows)
        own = None if attn.relative_position_bias_table is None else attn._get_rel_pos_bias()[0]
        return self.attention_of(attn, state, q, k, v, table=add_bias(own, given), rows=rows)


class TimmBeit(TimmHost):
    """BEiT, BEiT v2. The relative position bias is gathered by rows and columns."""

    name = "timm Beit"
    heads = ("class token", "patches")
    reduced_blocks = (ReducedBeitBlock,)
    model_classes = (Beit,)
