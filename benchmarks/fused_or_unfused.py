"""Time both attention kernels: `attention.unfused_is_faster` decides by these numbers.

    python benchmarks/fused_or_unfused.py --size 224 --batch-size 1 8 32 -m tome:r=13 -m topk:keep_rate=0.7
    python benchmarks/fused_or_unfused.py --model vit_small_patch16_224 --size 224 384 512 768 1024 --batch-size 1 8

The dense model and each method run on the fused and on the unfused kernel, all in turn. A row has the median of the
ratios of their times within a round, with quartiles: below 1 the unfused kernel is the faster one. Weights and images
are random. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lines import Row
from script import from_shell
from vitrim.core.registry import host_of
from vitrim.engines.formats.base import DTYPES
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.copies import dense_copies, reduced_copy
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget, paired_speedup, summarise, time_interleaved

CHOICES = ("vitrim.core.attention.unfused_is_faster", "vitrim.core.block.unfused_is_faster")
"""The module that reads the choice of the kernel, which this file overrides."""
HEADER = "| px | batch | map, MB | method | fused ms | unfused ms | unfused over fused |\n|---|---|---|---|---|---|---|"


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
        ratio = paired_speedup(unfused, fused)  # of times: unfused over fused
        row = {"method": name, "fused_ms": summarise(fused).p50_ms, "unfused_ms": summarise(unfused).p50_ms}
        rows.append({**row, "ratio": ratio.median, "q1": ratio.q1, "q3": ratio.q3, "rounds": len(fused)})
    return rows


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--size", nargs="+", type=int, default=[224], help="pixels")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("-m", "--method", action="append", default=[])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="at most; 3 at least, and 2 seconds of each")
    arguments = parser.parse_args(given)
    machine.set_threads(arguments.threads)
    budget = Budget(min(3, arguments.rounds), 2.0, max_rounds=arguments.rounds, warmup_rounds=1)
    found = []
    print(HEADER)
    for size in arguments.size:
        torch.manual_seed(0)
        model = create_model(arguments.model, options={"img_size": size}).eval()
        facts = host_of(model).facts(model)
        for batch in arguments.batch_size:
            dtype = DTYPES[arguments.dtype]
            images = random_images(model, batch, 0).to(dtype)
            tokens = facts.num_prefix + facts.grid_size[0] * facts.grid_size[1]
            entries = batch * facts.num_heads * tokens**2
            for row in compare(model.to(dtype), arguments.method, images, budget):
                found.append({"size": size, "batch_size": batch, "map_mb": entries * dtype.itemsize / 1e6, **row})
                print(line(found[-1]), flush=True)
    return found


def line(row: Row) -> str:
    """A row of the table."""
    return (
        f"| {row['size']} | {row['batch_size']} | {row['map_mb']:.1f} | `{row['method']}` | {row['fused_ms']:.1f} | "
        f"{row['unfused_ms']:.1f} | {row['ratio']:.2f} [{row['q1']:.2f}, {row['q3']:.2f}] |"
    )


if __name__ == "__main__":
    from_shell(main)
