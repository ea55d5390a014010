"""The attention kernels: fused against unfused, and the forms of proportional attention.

    python benchmarks/kernels.py --batch-size 1 8 32 -m tome:r=13 -m topk:keep_rate=0.7
    python benchmarks/kernels.py --model vit_small_patch16_224 --size 224 384 512 768 1024 --batch-size 1 8

`attention.unfused_is_faster` decides by the first: the dense model and each method run on both kernels, all in turn,
with random weights and images. Below 1 the unfused kernel is the faster one. Run it on an idle machine.

`forms`, which benchmarks/gpu.py calls, is about softmax(q k^T scale + log s) v. vitrim adds log s as a bias
(B, 1, 1, N), which the flash kernel does not take, so torch uses another. As two more channels of queries and keys it
needs no bias: q' = [q, 1/scale, 1/scale], k' = [k, high, low] with high + low = log s, in two because one number of
half precision has too few digits. Channels are filled with zeros up to a multiple of eight, as the kernel asks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from script import Row, from_shell, spread, table
from vitrim.core.registry import host_of
from vitrim.engines import machine
from vitrim.engines.copies import dense_copies, reduced_copy
from vitrim.engines.formats.base import DTYPES
from vitrim.engines.memory import peak_memory_mib
from vitrim.loading import create_model
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved

CHOICES = ("vitrim.core.attention.unfused_is_faster", "vitrim.core.block.unfused_is_faster")
"""The functions that read the choice of the kernel, which `on` overrides."""
HEAD = ("px", "batch", "map, MB", "method", "fused ms", "unfused ms", "unfused over fused")
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


# ---- fused or unfused ------------------------------------------------------------------------------------------------


def on(kernel: str, model: nn.Module, images: Tensor) -> Any:
    """The output of ``model`` on one kernel, "fused" or "unfused"."""

    def choice(*_: object) -> bool:
        return kernel == "unfused"

    with patch(CHOICES[0], choice), patch(CHOICES[1], choice):
        return model(images)


def compare(model: nn.Module, methods: Sequence[str], images: Tensor, budget: Budget) -> list[Row]:
    """A row for the dense model and for each of ``methods``."""
    copies = dense_copies(model)
    models = {"dense": copies} | {
        method: {kernel: reduced_copy(dense, method) for kernel, dense in copies.items()} for method in methods
    }
    calls: dict[str, Callable[[], Any]] = {
        f"{name} {kernel}": partial(on, kernel, each, images)
        for name, both in models.items()
        for kernel, each in both.items()
    }
    with torch.inference_mode():
        times = time_interleaved(calls, images.device, budget)
    rows = []
    for name in models:
        fused, unfused = times[f"{name} fused"], times[f"{name} unfused"]
        ratio = paired_speedup(unfused, fused)
        row = {"method": name, "fused_ms": summarise(fused).p50_ms, "unfused_ms": summarise(unfused).p50_ms}
        rows.append({**row, "ratio": ratio.median, "q1": ratio.q1, "q3": ratio.q3})
    return rows


# ---- forms of proportional attention ---------------------------------------------------------------------------------


def as_bias(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """Proportional attention by a bias of the keys."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=size.log().to(q.dtype)[:, None, None, :])


def as_channels(q: Tensor, k: Tensor, v: Tensor, size: Tensor) -> Tensor:
    """Proportional attention by two more channels."""
    width = q.shape[-1]
    scale, filler = width**-0.5, -(width + 2) % 8
    log = size.log()[:, None, :, None].expand(-1, k.shape[1], -1, 1)
    high = log.to(k.dtype)
    wide_q = F.pad(torch.cat([q, q.new_full((*q.shape[:-1], 2), 1 / scale)], dim=-1), (0, filler))
    wide_k = F.pad(torch.cat([k, high, (log - high).to(k.dtype)], dim=-1), (0, filler))
    wide_v = F.pad(v, (0, filler + 2))
    return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, scale=scale)[..., :width]


def on_flash(*given: Tensor) -> Tensor:
    """The same on the flash kernel alone."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return as_channels(*given)


FORMS: dict[str, Callable[..., Tensor]] = {
    "without sizes": lambda q, k, v, size: F.scaled_dot_product_attention(q, k, v),  # no form can be faster
    "bias": as_bias,
    "channels": as_channels,
    "channels (flash)": on_flash,
}


def inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensors:
    """Random q, k, v (B, H, N, d), and whole sizes (B, N) from 1 to 8 in float32."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randint(1, 9, (shape[0], shape[2]), generator=generator, device=device).float()


def error(form: str, given: Tensors) -> float:
    """The largest difference of a form from the bias in float64."""
    exact = as_bias(*(tensor.double() for tensor in given))
    return (FORMS[form](*given).double() - exact).abs().max().item()


def forms(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, budget: Budget) -> Row:
    """Time, memory and error of every form at one shape (B, H, N, d)."""
    given = inputs(shape, dtype, device)
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
        first = (given[0][:1], given[1][:1], given[2][:1], given[3][:1])
        errors = {name: error(name, first) for name in calls if name != "without sizes"}
        peaks = {name: peak_memory_mib(call, device) for name, call in calls.items()}
    p50 = {name: summarise(each).p50_ms for name, each in times.items()}
    return {"p50_ms": p50, "error": errors, "peak_memory_mib": peaks, "unable": unable}


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure both kernels and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--size", nargs="+", type=int, default=[224], help="pixels")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("-m", "--method", action="append", default=[])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="at most; 3 at least, and 2 seconds of each")
    options = parser.parse_args(given)
    machine.set_threads(options.threads)
    budget = Budget(min(3, options.rounds), 2.0, max_rounds=options.rounds, warmup_rounds=1)
    rows: list[Row] = []
    for size in options.size:
        torch.manual_seed(0)
        model = create_model(options.model, options={"img_size": size}).eval()
        facts, dtype = host_of(model).facts(model), DTYPES[options.dtype]
        tokens = facts.num_prefix + facts.grid_size[0] * facts.grid_size[1]
        for batch in options.batch_size:
            images = random_images(model, batch, 0).to(dtype)
            map_mb = batch * facts.num_heads * tokens**2 * dtype.itemsize / 1e6
            for row in compare(model.to(dtype), options.method, images, budget):
                rows.append({"size": size, "batch_size": batch, "map_mb": map_mb, **row})
    cells = (
        (
            *(row["size"], row["batch_size"], f"{row['map_mb']:.1f}", f"`{row['method']}`"),
            *(f"{row['fused_ms']:.1f}", f"{row['unfused_ms']:.1f}", spread(row["ratio"], row["q1"], row["q3"])),
        )
        for row in rows
    )
    print(table(HEAD, cells))
    return rows


if __name__ == "__main__":
    from_shell(main)
