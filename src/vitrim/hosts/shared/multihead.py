"""`nn.MultiheadAttention` in a reduced block: it hands out no queries, keys and values, so its weights are used."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitrim.core.attention import Attention, project_parts, split_heads
from vitrim.core.block import ReducedBlock
from vitrim.core.tokens import TokenState
from vitrim.errors import UnsupportedModelError


def attention_of(attn: Any, y: Tensor, state: TokenState, rows: int | None, block: ReducedBlock) -> Attention:
    """Attention of normed tokens ``y`` (B, N, C) by the weights of ``attn``; see `ReducedBlock.project`."""
    q, k, v = project_parts(partial(_part, attn), y, rows, block.reducer.fresh_values)
    return Attention(
        q=q,
        k=k,
        v=v,
        scale=attn.head_dim**-0.5,
        bias=state.key_bias(q.dtype, block.proportional),
        dropout=attn.dropout if attn.training else 0.0,
    )


def values_of(attn: Any, y: Tensor) -> Tensor:
    """The values (B, H, N, d) of normed tokens ``y`` (B, N, C) alone."""
    return _part(attn, y, 2, 3)[0]


def project_output(attn: Any, out: Tensor) -> Tensor:
    """Project the heads of ``attn``, side by side (B, M, C), by the weights of ``out_proj``: the dense block reads
    them, and calls the module as little as we do."""
    return F.linear(out, attn.out_proj.weight, attn.out_proj.bias)


def _part(attn: Any, y: Tensor, first: int, end: int) -> tuple[Tensor, ...]:
    """Parts first..end of q, k, v (0, 1, 2) of normed tokens (B, N, C), each (B, H, N, d)."""
    rows = slice(first * attn.embed_dim, end * attn.embed_dim)
    bias = None if attn.in_proj_bias is None else attn.in_proj_bias[rows]
    projected = F.linear(y, attn.in_proj_weight[rows], bias)
    return tuple(split_heads(part, attn.num_heads) for part in projected.chunk(end - first, dim=-1))


def check_attention(attention: Any, family: str) -> None:
    """Refuse attention for which the fused projection cannot stand in.

    Raises:
        UnsupportedModelError: saying why.
    """
    if type(attention) is not nn.MultiheadAttention:
        raise UnsupportedModelError(
            f"{family} with attention of class {type(attention).__name__} is not supported; supported: "
            "MultiheadAttention"
        )
    problem = None
    if not attention.batch_first:
        problem = "batch_first=False"
    elif attention.in_proj_weight is None:
        problem = "kdim or vdim"
    elif attention.bias_k is not None:
        problem = "add_bias_kv=True"
    elif attention.add_zero_attn:
        problem = "add_zero_attn=True"
    if problem is not None:
        raise UnsupportedModelError(
            f"{family} with {problem} in its MultiheadAttention is not supported; supported: "
            "batch_first=True, one width for queries, keys and values, no added keys"
        )
