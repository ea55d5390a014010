"""Proportional attention, softmax(q k^T scale + log s) v, in three forms on plain tensors; used by benchmarks/gpu.py.

log s as a bias (B, 1, 1, N) is what vitrim adds; the flash kernel takes no bias, so torch falls back to another. As two
more channels of queries and keys it needs none: q' = [q, 1/scale, 1/scale], k' = [k, high, low], high + low = log s, in
two because a number of half precision has too few digits for it; q' k'^T scale is then q k^T scale + log s. Channels
are filled up with zeros to a multiple of eight, which the kernel asks for, those of v too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lines import Row
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved
from vitrim.measure.memory import peak_memory_mib

MULTIPLE = 8
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


def without(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """Plain attention, which leaves sizes out: the time that any form can only come near."""
    return F.scaled_dot_product_attention(q, k, v)


def as_bias(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """Proportional attention by a bias of the keys."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=size.log().to(q.dtype)[:, None, None, :])


def as_channels(q: Tensor, k: Tensor, v: Tensor, size: Tensor, kernel: SDPBackend | None = None) -> Tensor:
    """Proportional attention by two more channels, on ``kernel`` alone if given."""
    width = q.shape[-1]
    scale, filled = width**-0.5, -(-(width + 2) // MULTIPLE) * MULTIPLE
    log = size.log()[:, None, :, None].expand(-1, k.shape[1], -1, 1)
    high = log.to(k.dtype)
    wide_q = F.pad(torch.cat([q, q.new_full((*q.shape[:-1], 2), 1 / scale)], dim=-1), (0, filled - width - 2))
    wide_k = F.pad(torch.cat([k, high, (log - high).to(k.dtype)], dim=-1), (0, filled - width - 2))
    wide_v = F.pad(v, (0, filled - width))
    if kernel is None:
        return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, scale=scale)[..., :width]
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, scale=scale)[..., :width]


FORMS: dict[str, Callable[..., Tensor]] = {
    "without sizes": without,
    "bias": as_bias,
    "channels": as_channels,
    "channels (flash)": partial(as_channels, kernel=SDPBackend.FLASH_ATTENTION),
}


def inputs(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Random q, k, v (B, H, N, d), and whole sizes (B, N) from 1 to 8 in float32."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, tokens, width)
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randint(1, 9, (batch, tokens), generator=generator, device=device).float()


def error(form: str, given: Tensors) -> float:
    """The largest difference of a form from the bias in float64."""
    exact = as_bias(*(tensor.double() for tensor in given))
    return (FORMS[form](*given).double() - exact).abs().max().item()


def compare(
    batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device, budget: Budget
) -> Row:
    """Time, memory and error of every form at one shape."""
    given = inputs(batch, heads, tokens, width, dtype, device)
    calls: dict[str, Callable[[], Any]] = {}
    unable: dict[str, str] = {}
    with torch.inference_mode():
        for name, form in FORMS.items():
            try:
                form(*given)
            except RuntimeError as problem:  # no such kernel for this device or dtype, or no memory
                unable[name] = str(problem).splitlines()[0]
            else:
                calls[name] = partial(form, *given)
        times = time_interleaved(calls, device, budget)
        one = (given[0][:1], given[1][:1], given[2][:1], given[3][:1])
        errors = {name: error(name, one) for name in calls if name != "without sizes"}
        peaks = {name: peak_memory_mib(call, device) for name, call in calls.items()}
    base = times.get("bias")
    over_bias = {} if base is None else {name: vars(paired_speedup(base, found)) for name, found in times.items()}
    p50 = {name: summarise(found).p50_ms for name, found in times.items()}
    return {"p50_ms": p50, "over_bias": over_bias, "error": errors, "peak_memory_mib": peaks, "unable": unable}
