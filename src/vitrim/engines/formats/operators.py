"""ONNX forms of operators that torch 2.15 does not translate, or translates into more operations than necessary.

Importing this file imports onnxscript, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from math import prod
from typing import Any

import onnxscript
import torch

from vitrim.engines.formats.base import Graph

aten = torch.ops.aten
op: Any = onnxscript.opset18


def translations(graph: Graph) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ONNX form of every operator that has one here, for ``torch.onnx.export``."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {
        aten.max.dim: maximum,
        aten.mean.dim: mean,
        aten.sort.stable: sort_stable,
        aten.searchsorted.Tensor: searchsorted,
        aten._cdist_forward.default: cdist,
        aten._is_all_true.default: is_all_true,
    }
    attends = aten.scaled_dot_product_attention.default
    calls = [node for node in graph.program.graph.nodes if node.target is attends]
    # ONNX has its own attention operator from 23 on; ONNX Runtime 1.32 does not repeat a row of its mask
    if all(_is_plain(call) for call in calls) and (graph.opset < 23 or any(_has_row_mask(call) for call in calls)):
        table[attends] = attention
    return table


def _is_plain(call: torch.fx.Node) -> bool:
    """True for an attention call whose mask, if any, is additive, without dropout, causal mask or grouped heads."""
    given = signature(attention).bind(*call.args, **call.kwargs).arguments
    mask = given.get("attn_mask")
    additive = not isinstance(mask, torch.fx.Node) or mask.meta["val"].dtype != torch.bool
    return additive and not any(given.get(option) for option in ("dropout_p", "is_causal", "enable_gqa"))


def _has_row_mask(call: torch.fx.Node) -> bool:
    """True for an attention call whose mask has one row for all queries, as that of proportional attention."""
    given = signature(attention).bind(*call.args, **call.kwargs).arguments
    query, mask = given["query"], given.get("attn_mask")
    return isinstance(mask, torch.fx.Node) and mask.meta["val"].shape[-2] != query.meta["val"].shape[-2]


def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """TopK over the entire axis: among equal values the lower index comes first, in both directions."""
    numbers = self
    small = self.dtype is not None and self.dtype.name in ("INT8", "UINT8", "INT16", "BOOL")
    if small:  # runtimes sort wide integers only
        numbers = op.Cast(self, to=6)
    size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    values, indices = op.TopK(numbers, size, axis=dim, largest=int(descending), sorted=1)
    return (op.CastLike(values, self) if small else values), indices


def searchsorted(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """The number of entries below (or up to) each value."""
    # Every value against every entry: the number passed is the place that bisection would find.
    entries = op.Unsqueeze(sorted_sequence, op.Constant(value_ints=[-2]))
    values = op.Unsqueeze(self, op.Constant(value_ints=[-1]))
    passed = op.LessOrEqual(entries, values) if right or side == "right" else op.Less(entries, values)
    count = op.ReduceSum(op.Cast(passed, to=7), op.Constant(value_ints=[-1]), keepdims=0)
    return op.Cast(count, to=6) if out_int32 else count


def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """Distances for p = 2, the only value that methods use, as torch computes many rows: |a|^2 + |b|^2 - 2 a b."""
    last = op.Constant(value_ints=[-1])
    first_square = op.ReduceSum(op.Mul(x1, x1), last, keepdims=1)
    second_square = op.Transpose(op.ReduceSum(op.Mul(x2, x2), last, keepdims=1), perm=[0, 2, 1])
    product = op.MatMul(x1, op.Transpose(x2, perm=[0, 2, 1]))
    twice = op.Add(product, product)
    # Rounding may make the square of a small distance negative.
    return op.Sqrt(op.Relu(op.Sub(op.Add(first_square, second_square), twice)))


def is_all_true(self: Any) -> Any:
    """True if all entries are: a check that a library makes in its forward, of a value that the file then ignores."""
    return op.Cast(op.ReduceMin(op.Cast(self, to=6), keepdims=0), to=9)


def maximum(self: Any, dim: int, keepdim: bool = False) -> Any:
    """Values and indices in one operation instead of two."""
    values, places = op.TopK(self, op.Constant(value_ints=[1]), axis=dim)
    if keepdim:
        return values, places
    axis = op.Constant(value_ints=[dim])
    return op.Squeeze(values, axis), op.Squeeze(places, axis)


def mean(self: Any, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
    """A sum times a number: in bf16, OpenVINO inserts a conversion after a mean, but not after a product."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    counts = [self.shape[each] for each in dims] or list(self.shape)
    if dtype not in (-1, self.dtype):
        self = op.Cast(self, to=dtype)
    axes = op.Constant(value_ints=dims) if dims else None
    if not all(isinstance(count, int) and count > 0 for count in counts):
        return op.ReduceMean(self, axes, keepdims=int(keepdim))
    share = op.CastLike(op.Constant(value_float=1 / prod(counts)), self)
    return op.Mul(op.ReduceSum(self, axes, keepdims=int(keepdim)), share)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Scale only the queries, where torch scales queries and keys by the root: keys are then used unchanged."""
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scaled = op.Mul(query, op.CastLike(op.Constant(value_float=scale), query))
    logits = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    if attn_mask is not None:
        logits = op.Add(logits, attn_mask)
    return op.MatMul(op.Softmax(logits, axis=-1), value)
