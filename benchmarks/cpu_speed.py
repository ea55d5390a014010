"""Measure the CPU speed table of docs/results/speed.md, and what vitrim costs where it reduces nothing.

    python benchmarks/cpu_speed.py --out cpu_speed.json

DeiT-S with random weights: what ToMe computes does not depend on the images. What ATM computes does, so by default each
ToMe row is followed by ATM with the one threshold that comes to the same MACs on two of the images; "promised" says
what it came to on all. Other methods are given by ``--method``.

The second table is method ``none``, timed in turn with the plain timm model and with nothing else: its speed-up is what
passing through vitrim's data flow leaves of the host's speed. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from script import from_shell, write_json
from vitrim.app.demo import atm_at_the_macs_of
from vitrim.cli.options import parse_methods
from vitrim.core.method import MethodConfig
from vitrim.engines.formats.base import DTYPES
from vitrim.errors import one_line_errors
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.bench import measure
from vitrim.measure.copies import reduced_copy
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget
from vitrim.measure.speed_report import setting_text

Row = dict[str, Any]

METHODS = tuple(f"tome:r={r},last_block=class_token" for r in (8, 13, 16))
HEADER = ("dtype", "batch", "method", "dense ms", "ms", "images/s", "speed-up", "promised", "ratio", "MiB (dense)")


def settings(dtypes: Iterable[str], batch_sizes: Iterable[int]) -> list[tuple[str, int]]:
    """All pairs, small batches first, so that a machine that is too small for the last still yields the others."""
    sizes = sorted(batch_sizes)
    return [(dtype, size) for dtype in dtypes for size in sizes]


def run(
    model: nn.Module, name: str, methods: Mapping[str, MethodConfig], dtype: str, batch_size: int, budget: Budget
) -> list[Row]:
    """Rows of `vitrim.measure.bench.measure` at one setting, with the setting."""
    setting = {"model": name, "batch_size": batch_size, "dtype": dtype, "compiled": False}
    with one_line_errors(setting_text(setting)):
        images = random_images(model, batch_size).to(DTYPES[dtype])
        rows = measure(model.to(DTYPES[dtype]), methods, images, budget=budget)
    return [{**setting, **row} for row in rows]


def with_matched_atm(model: nn.Module, methods: Iterable[MethodConfig], seed: int) -> list[MethodConfig]:
    """Each of ``methods`` followed by ATM at its MACs."""
    images = random_images(model, 2, seed)
    return [config for method in methods for config in (method, atm_at_the_macs_of(method, model, images))]


def markdown(rows: Iterable[Row]) -> str:
    """The reduced models among ``rows`` as a table, each against the dense model of its setting."""
    lines = [_line(HEADER), _line("---" for _ in HEADER)]
    dense: Row = {}
    for row in rows:
        if row["method"] == "dense":
            dense = row
            continue
        lines.append(
            _line(
                (
                    row["dtype"],
                    str(row["batch_size"]),
                    f"`{row['method']}`",
                    f"{dense['latency_ms']['p50']:.1f} ({dense['dense_kernel']})",
                    f"{row['latency_ms']['p50']:.1f}",
                    f"{row['images_per_second']:.1f}",
                    f"{row['speedup']:.2f} [{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]",
                    f"{row['promised_speedup']:.2f}",
                    f"{row['ratio']:.2f}",
                    f"{row['peak_memory_mib']:.1f} ({dense['peak_memory_mib']:.1f})",
                )
            )
        )
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="CPU speed of dense and reduced models against what MACs promise.")
    parser.add_argument("--model", default="deit_small_patch16_224", help="a timm model name; weights are random")
    parser.add_argument("--method", action="append", help="may repeat; default: ToMe at r = 8, 13, 16, ATM at its MACs")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="may repeat; default: fp32 bf16")
    parser.add_argument("--batch-size", action="append", type=int, help="may repeat; default: 1 8 32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20, help="rounds at least")
    parser.add_argument("--min-seconds", type=float, default=10.0, help="seconds per model and setting at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-overhead", action="store_true", help="skip the second table")
    parser.add_argument("--out", default="cpu_speed.json", help="record to write")
    return parser.parse_args()


def main() -> None:
    """Measure every setting, writing the record after each, and print the tables."""
    arguments = parse_arguments()
    machine.set_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    dtypes = arguments.dtype or ["fp32", "bf16"]
    unchanged = {config.describe(): config for config in parse_methods(["none"])}
    budget = Budget(arguments.repeats, arguments.min_seconds, max_rounds=max(arguments.repeats, Budget.max_rounds))
    model = create_model(arguments.model)
    configs = parse_methods(arguments.method or METHODS)
    if arguments.method is None:
        configs = with_matched_atm(model, configs, arguments.seed)
    methods = {config.describe(): config for config in configs}
    for config in methods.values():
        reduced_copy(model, config)  # what does not fit must say so before the first minute of timing
    rows: list[Row] = []
    overhead: list[Row] = []
    record = {
        "command": "cpu_speed",
        "environment": machine.environment(dtype=",".join(dtypes), seed=arguments.seed),
        "rows": rows,
        "overhead": overhead,
    }
    for dtype, batch_size in settings(dtypes, arguments.batch_size or [1, 8, 32]):
        print(f"timing batch {batch_size}, {dtype}", flush=True)
        rows += run(model, arguments.model, methods, dtype, batch_size, budget)
        if not arguments.no_overhead:
            overhead += run(model, arguments.model, unchanged, dtype, batch_size, budget)
        write_json(arguments.out, record)
    print("", markdown(rows), sep="\n")
    if overhead:
        print("", markdown(overhead), sep="\n")


if __name__ == "__main__":
    from_shell(main)
