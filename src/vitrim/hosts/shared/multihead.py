"""`nn.MultiheadAttention` in a reduced block. It exposes no queries, keys and values, so its weights are used."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.attention import Attention, project_parts, split_parts
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError
from vitrim.hosts.shared.blocks import NamedBlock, part_of


class MultiheadBlock(NamedBlock):
    """The reduced form of a block with `nn.MultiheadAttention`."""

    attention_classes = (nn.MultiheadAttention,)

    def project(self, x: Tensor, state: TokenState, rows: int | None, given: Any) -> Attention:
        (attn,) = self.attentions(self)
        # The packed weight comes in parts: no query or value is computed that nobody reads.
        q, k, v = project_parts(partial(packed_part, attn), self.pre_norm(x), rows, self.reducer.fresh_values)
        bias, dropout = state.key_bias(q.dtype, self.proportional), attn.dropout if attn.training else 0.0
        return Attention(q, k, v, attn.head_dim**-0.5, bias, dropout)

    def values(self, x: Tensor) -> Tensor:
        return packed_part(self.attentions(self)[0], self.pre_norm(x), 2, 3)[0]

    def project_output(self, out: Tensor) -> Tensor:
        # as in the dense block, which reads the weights of `out_proj` without calling it
        (attn,) = self.attentions(self)
        return F.linear(out, attn.out_proj.weight, attn.out_proj.bias)


def packed_part(attn: Any, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
    """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d), by ``in_proj_weight``."""
    projected = part_of(attn.in_proj_weight, attn.in_proj_bias, y, first, end)
    return split_parts(projected, end - first, attn.num_heads)


def check_options(attention: nn.MultiheadAttention, family: str) -> None:
    """Raise `UnsupportedModelError` for options of ``attention`` that the packed projection does not cover."""
    problems = {
        "batch_first=False": not attention.batch_first,
        "kdim or vdim": attention.in_proj_weight is None,
        "add_bias_kv=True": attention.bias_k is not None,
        "add_zero_attn=True": attention.add_zero_attn,
    }
    # Added keys belong to no token, and q, k and v of several widths do not lie in one weight.
    for problem, is_there in problems.items():
        if is_there:
            raise UnsupportedModelError(
                f"{family} with {problem} in its MultiheadAttention is not supported; supported: "
                "batch_first=True, one width for queries, keys and values, no added keys"
            )
