"""Latency of ViTTM against ViT, models of two streams and Token Merging: all 33 rows of ViTTM's Table 8, in one run.

    python benchmarks/vittm.py --batch-size 1 --rounds 21
    python benchmarks/vittm.py --row ViTTM-S(28,28) --row ViT-S/16 --batch-size 1

Random weights and images, at 224 px, of CrossViT at its own 240: no row's cost depends on them. Every model runs once
in each round, in an order drawn anew; plain ViT runs with both attention kernels, and the faster one counts.
"published" is the paper's latency (A100, batch 256). Below the table are the pairs of rows in another order than there.
Run it on an idle machine; at batch 32, 5 rounds take about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import torch
from torch import nn

from script import Row, exactly, from_shell, table, write_json
from vitrim import ReductionWarning, create_model
from vitrim.core.registry import input_size_of
from vitrim.engines import machine
from vitrim.engines.copies import dense_copies, reduced_copy
from vitrim.engines.macs import count_macs
from vitrim.errors import unknown
from vitrim.measure.latency import FloatArray, fastest, paired_speedup, summarise, time_interleaved


class Entry(NamedTuple):
    """A row of Table 8: its model, its published milliseconds, and its method if it is reduced."""

    model: str
    published_ms: float
    method: str | None = None


VITS = {"S": "vit_small_patch16_224", "B": "vit_base_patch16_224"}
TOME_MS = {
    "S": {2: 172.7, 4: 161.6, 8: 138.2, 10: 125.9, 12: 115.2, 14: 103.3, 16: 94.0},
    "B": {2: 551.1, 4: 515.7, 8: 440.6, 10: 402.0, 12: 367.0, 14: 330.2, 16: 296.4},
}
"""Published latencies of ToMe by size of ViT and r."""
ENTRIES = {
    "ViTTM-S(28,28)": Entry("vittm_small_28_28", 77.7),
    "ViTTM-B(28,28)": Entry("vittm_base_28_28", 234.1),
    "ViTTM-B(32,16)": Entry("vittm_base_32_16", 251.5),
    "ViT-S/16": Entry(VITS["S"], 149.5),
    "ViT-B/16": Entry(VITS["B"], 529.5),
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
        f"ViT-{size}/16 r={r}": Entry(VITS[size], published, f"tome:r={r}")
        for size, row in TOME_MS.items()
        for r, published in row.items()
    },
}


def candidates(labels: Sequence[str]) -> dict[str, nn.Module]:
    """The model of every row; an unreduced ViT once per attention kernel, as "LABEL (KERNEL)"."""
    made: dict[str, nn.Module] = {}  # rows of one ViT share its weights
    models: dict[str, nn.Module] = {}
    for label in labels:
        name, _, method = ENTRIES[label]
        model = made.setdefault(name, create_model(name).eval())
        if method is not None:
            models[label] = reduced_copy(model, method)
        elif name.startswith(("vit_", "deit_")):
            models |= {f"{label} ({kernel})": copied for kernel, copied in dense_copies(model).items()}
        else:
            models[label] = model
    return models


def run(models: Mapping[str, nn.Module], batch_size: int, rounds: int) -> tuple[list[Row], dict[str, FloatArray]]:
    """A row per model, and the times of all rounds by label."""
    given = {name: torch.randn(batch_size, *input_size_of(model)) for name, model in models.items()}
    with torch.inference_mode():
        calls = {name: partial(model, given[name]) for name, model in models.items()}
        timed = time_interleaved(calls, budget=exactly(rounds, 2))
    forms = {label: [name for name in models if name == label or name.startswith(f"{label} (")] for label in ENTRIES}
    ran = {label: fastest(timed, names) for label, names in forms.items() if names}
    times = {label: timed[name] for label, name in ran.items()}
    rows = []
    for label, name in ran.items():
        latency, macs = summarise(times[label]), count_macs(models[name], given[name][:1])
        over = {
            vit: paired_speedup(times[vit], times[label]).median for vit in ("ViT-S/16", "ViT-B/16") if vit in times
        }
        row = {"row": label, "gmacs": sum(macs.gmacs().values()), "p50_ms": latency.p50_ms, "iqr_ms": latency.iqr_ms}
        rows.append({**row, "speedup_over": over, "published_ms": ENTRIES[label].published_ms})
    return rows, times


def misordered(times: Mapping[str, FloatArray]) -> list[tuple[str, str]]:
    """Pairs of rows of which the published table has the first as the faster, and these ``times`` the second."""
    labels = sorted(times, key=lambda label: ENTRIES[label].published_ms)
    return [
        (faster, slower)
        for faster, slower in combinations(labels, 2)
        if paired_speedup(times[slower], times[faster]).median < 1
    ]


def main() -> None:
    """Time all rows, batch size by batch size; print a table and the order for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help="a row's name, e.g. ViTTM-S(28,28); may repeat; default: all")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="rounds at each batch size")
    parser.add_argument("--json", help="write the record to this file, after every batch size")
    options = parser.parse_args()
    labels = options.row or list(ENTRIES)
    for label in labels:
        if label not in ENTRIES:
            raise unknown("row", label, ENTRIES)
    machine.set_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", ReductionWarning)  # at r = 16 the last block can merge 10, as in the paper
    models, settings = candidates(labels), list[Row]()
    record = {"command": "vittm", "environment": machine.environment(seed=0), "settings": settings}
    for size in options.batch_size:
        rows, times = run(models, size, options.rounds)
        wrong = misordered(times)
        settings.append({"batch_size": size, "rows": rows, "misordered": wrong})
        write_json(options.json, record)
        cells = (
            (
                *(row["row"], f"{row['gmacs']:.2f}", f"{row['p50_ms']:.1f}", f"{row['iqr_ms']:.1f}"),
                *(", ".join(f"{over:.2f}" for over in row["speedup_over"].values()), row["published_ms"]),
            )
            for row in sorted(rows, key=lambda row: float(row["p50_ms"]))
        )
        head = ("row", "GMACs", "ms", "quartiles' range", "over ViT-S, ViT-B", "published ms")
        pairs = len(rows) * (len(rows) - 1) // 2
        print(f"\nbatch {size}, {torch.get_num_threads()} threads\n\n{table(head, cells)}\n")
        print(f"{len(wrong)} of {pairs} pairs in another order than published", *map(" < ".join, wrong), sep="\n")


if __name__ == "__main__":
    from_shell(main)
