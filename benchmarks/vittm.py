"""Latency of ViTTM against ViT, models of two streams and Token Merging: all 33 rows of ViTTM's Table 8, in one run.

    python benchmarks/vittm.py --json vittm.json
    python benchmarks/vittm.py --batch-size 256 --device cuda --dtype fp32
    python benchmarks/vittm.py --row ViTTM-S(28,28) --row ViT-S/16 --batch-size 1

Random weights and images, at 224 px, of CrossViT at its own 240: no row's cost depends on them. Every model runs once
in each round, in an order drawn anew, so that ratios within a round compare; plain ViT runs with both attention
kernels and its faster one stands for it. "published" is the latency of the paper (A100, batch 256). Last come the pairs
of rows that are in another order here than there, with those apart whose published latencies are within 5 %. Run it on
a machine that does nothing else; at batch 32, 5 rounds take about half an hour on two cores.

`--depth 1` makes all models but CrossViT one block deep, to try the script quickly.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from script import from_shell, write_json
from vitrim.core.registry import input_size_of
from vitrim.engines.formats.base import DTYPES
from vitrim.errors import ReductionWarning, one_line_errors, unknown
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.copies import dense_copies, reduced_copy
from vitrim.measure.latency import (
    Budget,
    FloatArray,
    fastest,
    images_per_second,
    paired_speedup,
    summarise,
    time_interleaved,
)
from vitrim.measure.macs import count_macs

Row = dict[str, Any]

CLOSE = 1.05
"""Published latencies whose ratio is below this have no order that another machine must keep."""


@dataclass(frozen=True)
class Entry:
    """A row of Table 8: its model, its method if it is reduced, and its published latency."""

    model: str
    published_ms: float
    method: str | None = None


VIT_S, VIT_B = "vit_small_patch16_224", "vit_base_patch16_224"
DENSE = (VIT_S, VIT_B, "deit_small_patch16_224", "deit_base_patch16_224", "vit_base_patch32_224")
TOME_MS = {
    "S": {2: 172.7, 4: 161.6, 8: 138.2, 10: 125.9, 12: 115.2, 14: 103.3, 16: 94.0},
    "B": {2: 551.1, 4: 515.7, 8: 440.6, 10: 402.0, 12: 367.0, 14: 330.2, 16: 296.4},
}
"""Published latencies of ToMe by size of ViT and r."""
ENTRIES = {
    "ViTTM-S(28,28)": Entry("vittm_small_28_28", 77.7),
    "ViTTM-B(28,28)": Entry("vittm_base_28_28", 234.1),
    "ViTTM-B(32,16)": Entry("vittm_base_32_16", 251.5),
    "ViT-S/16": Entry(VIT_S, 149.5),
    "ViT-B/16": Entry(VIT_B, 529.5),
    "DeiT-S/16": Entry("deit_small_patch16_224", 152.0),
    "DeiT-B/16": Entry("deit_base_patch16_224", 529.7),
    "ViT-B/32": Entry("vit_base_patch32_224", 138.3),
    "CrossViT-S": Entry("crossvit_small_240", 235.7),
    "CrossViT-15": Entry("crossvit_15_240", 249.1),
    "CrossViT-15 dagger": Entry("crossvit_15_dagger_240", 252.3),
    "CrossViT-B": Entry("crossvit_base_240", 728.1),
    "CrossViT-18": Entry("crossvit_18_240", 374.1),
    "CrossViT-18 dagger": Entry("crossvit_18_dagger_240", 378.2),
    "Rev-ViT-B": Entry("rev_vit_base", 556.5),
    "LookupViT 3x3": Entry("lookupvit_shared_base_3", 230.5),
    "LookupViT 5x5": Entry("lookupvit_shared_base_5", 297.2),
    "LookupViT 7x7": Entry("lookupvit_shared_base_7", 379.5),
    "LookupViT 10x10": Entry("lookupvit_shared_base_10", 563.4),
    **{
        f"ViT-{size}/16 r={r}": Entry(VIT_S if size == "S" else VIT_B, published, f"tome:r={r}")
        for size, row in TOME_MS.items()
        for r, published in row.items()
    },
}
HEADER = (
    "row",
    "params M",
    "GMACs",
    "ms",
    "quartiles' range",
    "images/s",
    "speed-up over ViT-S/16, B/16",
    "published ms",
)


# ---- the run ---------------------------------------------------------------------------------------------------------


def candidates(labels: Iterable[str], options: Mapping[str, Any], device: torch.device) -> dict[str, nn.Module]:
    """The model of every row; an unreduced ViT once per attention kernel, as "LABEL (KERNEL)". Rows of one ViT share
    its weights."""
    wanted = {ENTRIES[label].model for label in labels}
    vits = {name: create_model(name, options=dict(options)).to(device) for name in DENSE if name in wanted}
    models: dict[str, nn.Module] = {}
    for label in labels:
        entry = ENTRIES[label]
        if entry.method is not None:
            models[label] = reduced_copy(vits[entry.model], entry.method)
        elif entry.model in vits:
            models |= {_variant(label, kernel): copy for kernel, copy in dense_copies(vits[entry.model]).items()}
        else:
            models[label] = create_model(entry.model, options=_of(entry.model, options)).to(device)
    return models


def _of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a model: timm's CrossViT takes no other depth."""
    return {key: value for key, value in options.items() if key != "depth" or not name.startswith("crossvit")}


def _variant(label: str, kernel: str) -> str:
    return f"{label} ({kernel})"


def run(
    models: Mapping[str, nn.Module], images: Mapping[int, Tensor], budget: Budget
) -> tuple[list[Row], dict[str, FloatArray]]:
    """A row per model at one batch size, on ``images`` by their side, and the times of all rounds by label."""
    given = {name: images[input_size_of(model)[-1]] for name, model in models.items()}
    device = next(iter(given.values())).device
    with torch.inference_mode():
        timed = time_interleaved({name: partial(model, given[name]) for name, model in models.items()}, device, budget)
    times: dict[str, FloatArray] = {}
    ran: dict[str, str] = {}
    for label in ENTRIES:
        names = [name for name in models if name == label or name.startswith(f"{label} (")]
        if names:
            ran[label] = fastest(timed, names)
            times[label] = timed[ran[label]]
    rows = []
    for label, name in ran.items():
        latency, macs = summarise(times[label]), count_macs(models[name], given[name][:1])
        dense = {vit: times[vit] for vit in ("ViT-S/16", "ViT-B/16") if vit in times}
        rows.append(
            {
                "row": label,
                "ran_as": name,
                "params": sum(parameter.numel() for parameter in models[name].parameters()),
                "gmacs": macs.gmacs(),
                "exchange_gmacs": macs.exchange / 1e9,
                "latency_ms": {
                    "p50": latency.p50_ms,
                    "p95": latency.p95_ms,
                    "min": latency.min_ms,
                    "iqr": latency.iqr_ms,
                },
                "rounds": len(times[label]),
                "images_per_second": images_per_second(len(given[name]), latency.p50_ms),
                "speedup_over": {vit: paired_speedup(baseline, times[label]).median for vit, baseline in dense.items()},
                "published_ms": ENTRIES[label].published_ms,
            }
        )
    return rows, times


def misordered(times: Mapping[str, FloatArray]) -> Iterator[dict[str, Any]]:
    """Pairs of rows of which the published table has the first as the faster and these ``times`` the second."""
    labels = sorted(times, key=lambda label: ENTRIES[label].published_ms)
    for faster, slower in combinations(labels, 2):
        published = ENTRIES[slower].published_ms / ENTRIES[faster].published_ms
        measured = paired_speedup(times[slower], times[faster]).median
        if measured < 1:
            yield {
                "faster": faster,
                "slower": slower,
                "published_speedup": published,
                "measured_speedup": measured,
                "close": published < CLOSE,
            }


# ---- output ----------------------------------------------------------------------------------------------------------


def markdown(rows: Iterable[Row]) -> str:
    """The rows as a table, fastest first."""
    lines = [_line(HEADER), _line("---" for _ in HEADER)]
    for row in sorted(rows, key=lambda row: float(row["latency_ms"]["p50"])):
        lines.append(
            _line(
                (
                    row["ran_as"],
                    f"{row['params'] / 1e6:.2f}",
                    f"{sum(row['gmacs'].values()):.2f}",
                    f"{row['latency_ms']['p50']:.1f}",
                    f"{row['latency_ms']['iqr']:.1f}",
                    f"{row['images_per_second']:.1f}",
                    ", ".join(f"{speedup:.2f}" for speedup in row["speedup_over"].values()),
                    f"{row['published_ms']:.1f}",
                )
            )
        )
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def order_text(found: Iterable[Mapping[str, Any]], rows: int) -> str:
    """The findings of `misordered`, as lines."""
    pairs = list(found)
    lines = [f"{len(pairs)} of {rows * (rows - 1) // 2} pairs in another order than published"]
    for pair in pairs:
        close = " (close in the paper)" if pair["close"] else ""
        lines.append(
            f"- {pair['faster']} is {pair['measured_speedup']:.2f} times as fast as {pair['slower']}, "
            f"published {pair['published_speedup']:.2f}{close}"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Latency of the rows of ViTTM's Table 8, in one interleaved run.")
    parser.add_argument("--row", action="append", help="a row's name, e.g. ViTTM-S(28,28); may repeat; default: all")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="rounds at each batch size")
    parser.add_argument("--warmup-rounds", type=int, default=2, help="rounds before, not counted")
    parser.add_argument("--depth", type=int, help="blocks of every model, for a quick try; default: as published")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the record to this file, after every batch size")
    return parser.parse_args()


def main() -> None:
    """Time all rows, batch size by batch size; print a table and the order for each."""
    arguments = parse_arguments()
    labels = arguments.row or list(ENTRIES)
    for label in labels:
        if label not in ENTRIES:
            raise unknown("row", label, ENTRIES)
    machine.set_threads(arguments.threads)
    device = machine.select_device(arguments.device)
    torch.manual_seed(arguments.seed)
    warnings.simplefilter("ignore", ReductionWarning)  # at r = 16 the last block can merge 10, as in the paper
    budget = Budget(arguments.rounds, 0.0, max_rounds=arguments.rounds, warmup_rounds=arguments.warmup_rounds)
    options = {} if arguments.depth is None else {"depth": arguments.depth}
    models = candidates(labels, options, device)
    for model in models.values():
        model.to(DTYPES[arguments.dtype])
    settings: list[dict[str, Any]] = []
    record = {
        "command": "vittm",
        "environment": machine.environment(device=arguments.device, dtype=arguments.dtype, seed=arguments.seed),
        "model_options": options,
        "settings": settings,
    }
    generator = torch.Generator().manual_seed(arguments.seed)
    for batch_size in sorted(arguments.batch_size):
        sides = sorted({input_size_of(model)[-1] for model in models.values()})
        images = {
            side: torch.randn(batch_size, 3, side, side, generator=generator).to(device, DTYPES[arguments.dtype])
            for side in sides
        }
        with one_line_errors(f"batch size {batch_size}, {arguments.dtype}"):
            rows, times = run(models, images, budget)
        wrong = list(misordered(times))
        settings.append({"batch_size": batch_size, "rows": rows, "misordered": wrong})
        write_json(arguments.json, record)
        print(f"\nbatch {batch_size}, {arguments.dtype}, {arguments.device}, {torch.get_num_threads()} threads\n")
        print(markdown(rows), "", order_text(wrong, len(rows)), sep="\n", flush=True)


if __name__ == "__main__":
    from_shell(main)
