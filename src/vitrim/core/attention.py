"""The attention of one block as a method sees it, computed on request, and the choice of kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.core.tokens import changed, decision_dtype, is_traced, take
from vitrim.core.versions import cpu_capabilities
from vitrim.errors import UnsupportedModelError

# read once: torch.compile cannot trace the query
_CAPABILITIES = cpu_capabilities()
CPU_HAS_AMX = bool(_CAPABILITIES.get("amx_bf16"))
CPU_HAS_BFLOAT16 = CPU_HAS_AMX or bool(_CAPABILITIES.get("avx512_bf16"))


OwnAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
HIDDEN = (
    "a function of your own computes the attention of this model, which shows none: let the library compute it, e.g. "
    'model.set_attn_implementation("sdpa"), or take a method that reads none, such as tome'
)
"""The reason why `Attention.own` is refused where probabilities are read, and the way out."""


@dataclass(frozen=True)
class Attention:
    """Queries, keys and values of one block.

    Attributes:
        q, k, v: (B, H, M, d), (B, H, N, d), (B, H, N, d), after q/k norm and rotary embedding. ``v`` is None only until
            a reducer with ``fresh_values`` has fused the tokens.
        bias: (B, 1, 1, N) or (B, H, M, N), added to the logits: log(size), mask, relative position; None for none.
        drop: the host's own dropout module for the map (B, H, M, N), where it computes the map and calls one.
        k_raw: keys before rotary embedding, which matching compares; None if they are ``k``.
        queries: (B, M) token index of each query row; None for all tokens in order.
        fused: the host allows a fused kernel.
        own: a function of the user's that the host calls in place of its kernels: q, k, v and bias to (B, H, M, d). It
            shows no probabilities, so whatever reads them is refused.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    scale: float
    bias: Tensor | None = None
    dropout: float = 0.0
    k_raw: Tensor | None = None
    queries: Tensor | None = None
    fused: bool = True
    drop: Callable[[Tensor], Tensor] | None = None
    own: OwnAttention | None = None

    def parts(self) -> dict[str, Any]:
        """The fields by name, to make another kind of attention."""
        # torch.compile of 2.11 cannot read `vars`.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def keys(self) -> Tensor:
        """(B, H, N, d) keys for matching, before rotary embedding."""
        return self.k if self.k_raw is None else self.k_raw

    @property
    def values(self) -> Tensor:
        """(B, H, N, d) values, for methods that score by them."""
        if self.v is None:
            raise RuntimeError("the values of this attention have not been projected yet")
        return self.v

    def mean_keys(self) -> Tensor:
        """(B, N, d) keys averaged over heads, in at least float32: the similarity metric of ToMe and its successors."""
        return self.keys.mean(dim=1, dtype=decision_dtype(self.k.dtype))

    def output(self) -> Tensor:
        """(B, H, M, d), softmax(q k^T scale + bias) v, by the faster kernel; or what the user's function returns."""
        if self.own is not None:
            return self.own(self.q, self.k, self.values, self.bias)
        if self.fused and not unfused_is_faster(self.q.device, self.q.dtype, *self.q.shape[:3], self.k.shape[2]):
            return F.scaled_dot_product_attention(
                self.q, self.k, self.values, attn_mask=self.bias, dropout_p=self.dropout, scale=self.scale
            )
        return self.weigh(self.logits().softmax(dim=-1))

    def weigh(self, probabilities: Tensor) -> Tensor:
        """(B, H, M, d), the values weighted by a given map (B, H, M, N) after dropout."""
        return self.dropped(probabilities.to(self.values.dtype)) @ self.values

    def dropped(self, probabilities: Tensor) -> Tensor:
        """The map (B, H, M, N) after the host's dropout."""
        if self.drop is not None:
            return self.drop(probabilities)
        return F.dropout(probabilities, self.dropout) if self.dropout > 0.0 else probabilities

    def logits(self) -> Tensor:
        """(B, H, M, N), q k^T scale + bias in the dtype of q. Materialised."""
        if self.own is not None:
            raise UnsupportedModelError(f"attention probabilities are read here, and {HIDDEN}")
        logits = (self.q * self.scale) @ self.k.transpose(-2, -1)
        return logits if self.bias is None else logits + self.bias

    def probabilities(self) -> Tensor:
        """(B, H, M, N) attention map in at least float32. Materialised."""
        return self.logits().to(decision_dtype(self.q.dtype)).softmax(dim=-1)

    def rows(self, count: int) -> Attention:
        """The same attention for the first ``count`` query rows; exact, because rows are independent."""
        bias = self.bias
        # A bias with one row serves every query; one per query, such as relative positions, follows the rows.
        if bias is not None and bias.shape[2] != 1:
            bias = bias[:, :, :count]
        queries = None if self.queries is None else self.queries[:, :count]
        return changed(self, q=self.q[:, :, :count], bias=bias, queries=queries)

    def select(self, index: Tensor) -> Attention:
        """The same attention for the query rows ``index`` (B, M)."""
        batch, heads, n, dim = self.q.shape
        q = take(self.q.transpose(1, 2).reshape(batch, n, heads * dim), index)
        q = q.view(batch, index.shape[1], heads, dim).transpose(1, 2)
        bias = self.bias
        if bias is not None and bias.shape[2] != 1:
            rows = index[:, None, :, None].expand(batch, bias.shape[1], -1, bias.shape[3])
            bias = bias.expand(batch, -1, -1, -1).gather(2, rows)  # one bias may serve all images
        queries = index if self.queries is None else self.queries.gather(1, index)
        return changed(self, q=q, bias=bias, queries=queries)

    def with_values(self, values: Tensor) -> Attention:
        """The same attention over ``values`` (B, N, H*d)."""
        batch, n, width = values.shape
        heads = self.k.shape[1]
        return changed(self, v=values.view(batch, n, heads, width // heads).transpose(1, 2))

    def detach(self) -> Attention:
        """The same attention outside the autograd graph: decisions carry no gradient."""
        if not torch.is_grad_enabled():  # nothing computed from it carries one
            return self
        k_raw = None if self.k_raw is None else self.k_raw.detach()
        bias = None if self.bias is None else self.bias.detach()  # a relative position bias is learned
        return changed(self, q=self.q.detach(), k=self.k.detach(), k_raw=k_raw, bias=bias)

    def class_row(self) -> Tensor:
        """(B, H, N) attention probabilities of the class token (query 0), in at least float32."""
        return self.rows(1).probabilities().squeeze(2)

    def class_mean(self) -> Tensor:
        """(B, N) attention from the class token to each token, averaged over heads, in at least float32."""
        return self.class_row().mean(dim=1)

    def column_mean(self) -> Tensor:
        """(B, N) attention each token receives, averaged over heads and queries, in at least float32."""
        batch, heads, m, _ = self.q.shape
        n = self.k.shape[2]
        # The whole map never has to fit into memory: a few heads at a time, as `MAP_BYTES` allows.
        # a compiler fuses the steps, and must not specialise on the batch size
        compiling, wide = torch.compiler.is_compiling(), decision_dtype(self.q.dtype)
        step = 1 if compiling else at_once(heads, batch * m * n * wide.itemsize, self.q.device)
        received = self.narrow(1, 0, step).probabilities().sum(dim=(1, 2))
        for first in range(step, heads, step):
            received = received + self.narrow(1, first, step).probabilities().sum(dim=(1, 2))
        return received / (heads * m)

    def images_at_once(self) -> int:
        """The number of images whose maps fit into `MAP_BYTES`, at least one."""
        batch, heads, m, _ = self.q.shape
        if torch.compiler.is_compiling():  # a graph must not specialise on the batch size
            return batch
        return at_once(batch, heads * m * self.k.shape[2] * decision_dtype(self.q.dtype).itemsize, self.q.device)

    def narrow(self, dim: int, first: int, count: int) -> Attention:
        """``count`` images (``dim`` 0) or heads (``dim`` 1), to decide by; without values, unless that is all."""
        if first == 0 and count >= self.q.shape[dim]:
            return self
        own = (slice(None),) * dim + (slice(first, first + count),)
        # A dimension of 1 is broadcast over images or heads and stays as it is.
        bias = self.bias if self.bias is None or self.bias.shape[dim] == 1 else self.bias[own]
        k_raw = None if self.k_raw is None else self.k_raw[own]
        queries = self.queries if self.queries is None or dim > 0 else self.queries[own]
        return changed(self, q=self.q[own], k=self.k[own], v=None, k_raw=k_raw, bias=bias, queries=queries)


@dataclass(frozen=True)
class KnownMap(Attention):
    """Attention whose map (B, H, M, N) is computed once, for both deciding and attending."""

    known: Tensor = field(kw_only=True)

    @classmethod
    def of(cls, attention: Attention) -> KnownMap:
        """``attention`` with its map in at least float32; takes B*H*N*N memory."""
        return cls(**attention.parts(), known=attention.probabilities())

    def output(self) -> Tensor:
        return self.weigh(self.known)

    def probabilities(self) -> Tensor:
        return self.known

    def column_mean(self) -> Tensor:
        return self.known.mean(dim=(1, 2))

    def rows(self, count: int) -> Attention:
        return changed(super().rows(count), known=self.known[:, :, :count])

    def select(self, index: Tensor) -> Attention:
        rows = index[:, None, :, None].expand(-1, self.known.shape[1], -1, self.known.shape[3])
        return changed(super().select(index), known=self.known.gather(2, rows))

    def narrow(self, dim: int, first: int, count: int) -> Attention:
        own = (slice(None),) * dim + (slice(first, first + count),)
        return changed(super().narrow(dim, first, count), known=self.known[own])

    def detach(self) -> Attention:
        return changed(super().detach(), known=self.known.detach())


def map_is_faster(attention: Attention) -> bool:
    """True if a method that decides by the map should attend with it too, instead of calling the fused kernel."""
    # On a CPU one map costs less than a map and a fused kernel; on a GPU it is the slow part, and takes memory.
    if attention.q.dtype == torch.bfloat16 and not CPU_HAS_BFLOAT16:  # the fused kernel computes in float32 inside
        return False
    return attention.q.device.type in ("cpu", "meta")  # MACs are counted on meta


MAP_BYTES = {"cpu": 4 * 2**20, "gpu": 64 * 2**20}
"""Memory for the maps of one step: about a core's cache, or enough to keep a GPU busy."""


def at_once(count: int, bytes_each: int, device: torch.device) -> int:
    """The number of ``count`` heads, rows or images whose maps fit into `MAP_BYTES`, at least one.

    Example:
        >>> cpu = torch.device("cpu")
        >>> at_once(12, 197 * 197 * 4, cpu), at_once(12, 32 * 197 * 197 * 4, cpu)
        (12, 1)
    """
    budget = MAP_BYTES["cpu" if device.type in ("cpu", "meta") else "gpu"]  # MACs are counted on meta
    return count if bytes_each * count <= budget else max(1, budget // bytes_each)


def rows_at_once(rows: Tensor) -> int:
    """The number of ``rows`` (B, N, d) whose products with all N fit into `MAP_BYTES`, at least one."""
    if torch.compiler.is_compiling():  # a compiler fuses the steps, and must not specialise on the batch size
        return rows.shape[1]
    return at_once(rows.shape[1], rows.shape[0] * rows.shape[1] * rows.element_size(), rows.device)


def add_bias(*biases: Tensor | None) -> Tensor | None:
    """The sum of the additive biases that are not None; None if there are none."""
    total = None
    for bias in biases:
        if bias is not None:
            total = bias if total is None else total + bias
    return total


def project_parts(
    part: Callable[[Tensor, int, int], tuple[Tensor, ...]], y: Tensor, rows: int | None, skip_values: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and values (B, H, N, d) of normed tokens ``y`` (B, N, C), from a projection that comes in parts.

    Args:
        part: maps (tokens, first, end) to the parts first..end of q, k, v (0, 1, 2).
        rows: project the queries of the first ``rows`` tokens only; None for all.
        skip_values: leave v None; ignored if ``rows`` is given.
    """
    if rows is not None:
        (q,), (k, v) = part(y[:, :rows], 0, 1), part(y, 1, 3)
        return q, k, v
    if skip_values:
        q, k = part(y, 0, 2)
        return q, k, None
    q, k, v = part(y, 0, 3)
    return q, k, v


UNFUSED_BYTES = 16 * 2**20
"""Bytes of the largest bfloat16 map, in cache, for which plain matrix products keep up with the fused kernel."""


def unfused_is_faster(device: torch.device, dtype: torch.dtype, *map_shape: int) -> bool:
    """True if plain matrix products beat the fused kernel for a map (B, H, M, N). Decided here and nowhere else."""
    # In bfloat16 the fused kernel wins by 1.02 to 1.16 times on CPUs with AMX, and by 1.4 to 1.5 on those without
    # bfloat16 instructions. With AVX-512's bfloat16 instructions but no AMX it computes in float32 inside, and oneDNN's
    # products do not: they win by 1.1 to 1.6 times while the map fits into the cache, and lose by up to 1.3 times
    # beyond (docs/results/overhead.md). In float32 the two are close.
    if device.type != "cpu" or dtype != torch.bfloat16 or not CPU_HAS_BFLOAT16 or CPU_HAS_AMX:
        return False
    if torch.compiler.is_compiling() or is_traced():  # a graph must not specialise on the batch size
        return True
    return prod(map_shape) * dtype.itemsize <= UNFUSED_BYTES


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H*d) to (B, H, N, d)."""
    batch, n, width = x.shape
    return x.view(batch, n, num_heads, width // num_heads).transpose(1, 2)  # no -1: an empty batch leaves it ambiguous


def split_parts(x: Tensor, count: int, num_heads: int) -> tuple[Tensor, ...]:
    """``count`` parts of (B, N, count*H*d), such as q, k and v, as (B, H, N, d) each."""
    if count == 1:
        return (split_heads(x, num_heads),)
    parts = x.unflatten(-1, (count, num_heads, x.shape[-1] // (count * num_heads))).permute(2, 0, 3, 1, 4)
    return tuple(parts.unbind(0))  # one transposition: engines pay for each


def merge_heads(out: Tensor) -> Tensor:
    """(B, H, M, d) to (B, M, H*d)."""
    return out.transpose(1, 2).flatten(2)
