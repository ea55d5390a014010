"""Does the likeness of features tell how accurate a method is? Every training-free method at four cuts of its MACs.

    python benchmarks/study.py proxies --data CIFAR --json study.json --figure docs/images/study_proxies.png

"Which Tokens to Use?" finds that the class token's distance from the dense model's predicts accuracy, while
the patterns of which tokens stay do not. Here its distances are taken between what the classifier of the reference
checkpoint reads with and without each method, over the same test images, and ranked against top-1: over all settings,
and within each cut, where the MACs no longer tell settings apart. Amounts are matched on 64 training images, as in
benchmarks/cifar10.py. The bootstrap resamples settings; settings of one method are not independent, so intervals are
too narrow.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cifar10 import CUTS, candidates, settings, some_images
from script import write_json
from vitrim.analysis.collect import Collect, collect
from vitrim.analysis.families.features import cca, cka, procrustes
from vitrim.analysis.record import Record
from vitrim.analysis.statistics import spearman_ci, spearman_kendall
from vitrim.data import batches, eval_transform, load_images
from vitrim.errors import ReductionWarning
from vitrim.loading import load_reference
from vitrim.measure import machine

Row = dict[str, Any]

MEASURES = {
    "procrustes": "Procrustes",
    "cka": "CKA distance",
    "pwcca": "PWCCA distance",
    "cosine": "cosine distance",
    "kl": "KL of the predictions",
}
"""Distances from the dense model; higher is further."""


def rows_of_cut(model: nn.Module, cut: float, given: argparse.Namespace) -> list[Row]:
    """A row for every method that makes the cut: its top-1 and how far its features are from the dense model's."""
    chosen = settings(model, candidates(given.method), some_images(model, given.data), cut)
    dataset = load_images(given.data, split="test")
    dataset.transform = eval_transform(model)
    read = batches(dataset, given.batch_size, limit=given.limit)
    kept = Collect(blocks=[], patterns=False)
    found = collect(model, [config.describe() for config in chosen.values()], read, kept)
    dense = found.pop("dense")
    return [_row(record, dense, cut) for record in found.values()]


def _row(record: Record, dense: Record, cut: float) -> Row:
    own, other = record.feature(None), dense.feature(None)
    correct = record.correct()
    assert correct is not None
    return {
        "method": record.method,
        "cut": cut,
        "images": len(record),
        "feature_images": len(own),
        "top1": 100 * float(correct.mean()),
        "procrustes": procrustes(other, own),
        "cka": cka(other, own),
        "pwcca": cca(other, own).pwcca_ab,
        "cosine": 1 - float(record.arrays["head_cosine"].mean()),
        "kl": float(record.arrays["kl"].mean()),
    }


def correlations(rows: Sequence[Row]) -> list[Row]:
    """Rank correlations of every distance with top-1: over all rows, and over those of each cut."""
    groups = {"all": list(rows)} | {
        f"{cut:.0%}": [row for row in rows if row["cut"] == cut] for cut in dict.fromkeys(row["cut"] for row in rows)
    }
    found = []
    for name, group in groups.items():
        top1 = [row["top1"] for row in group]
        for measure in MEASURES:
            values = [row[measure] for row in group]
            ranks = spearman_kendall(values, top1)
            low, high = spearman_ci(np.stack([values, top1], axis=1))
            found.append(
                {
                    "cut": name,
                    "measure": measure,
                    "settings": len(group),
                    "spearman": ranks.spearman,
                    "low": float(low),
                    "high": float(high),
                    "kendall": ranks.kendall,
                }
            )
    return found


def markdown(found: Sequence[Row]) -> str:
    """A table with a row per distance and a column per group of settings: Spearman's rho, interval, Kendall's tau."""
    groups = list(dict.fromkeys((row["cut"], row["settings"]) for row in found))
    lines = [
        f"| distance | {' | '.join(f'{name} ({number} settings)' for name, number in groups)} |",
        "|" + "---|" * (len(groups) + 1),
    ]
    for measure, title in MEASURES.items():
        cells = [
            f"{row['spearman']:.2f} [{row['low']:.2f}, {row['high']:.2f}], {row['kendall']:.2f}"
            for row in found
            if row["measure"] == measure
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(rows: Sequence[Row], path: Path) -> None:
    """Top-1 over the Procrustes distance, one colour per method and one marker per cut."""
    from vitrim.plots.style import MARKERS, colours, sheet

    names = list(dict.fromkeys(row["method"].partition(":")[0] for row in rows))
    colour, marker = colours(names), dict(zip(sorted({row["cut"] for row in rows}), MARKERS, strict=False))
    drawn = sheet(8.4, 5.0)
    axis = drawn.subplots()
    for row in rows:
        own = colour[row["method"].partition(":")[0]]
        axis.scatter(row["procrustes"], row["top1"], color=own, marker=marker[row["cut"]], s=42)
    for name in names:
        axis.scatter([], [], color=colour[name], marker="o", label=name)
    for cut, shape in marker.items():
        axis.scatter([], [], color="black", marker=shape, label=f"{cut:.0%} fewer MACs")
    axis.set_xlabel("Procrustes distance from the dense model's class token, in front of the classifier")
    axis.set_ylabel("top-1 accuracy, %")
    axis.set_title("CIFAR-10 ViT, without retraining", fontsize=10)
    axis.grid(alpha=0.3)
    drawn.legend(fontsize=8, loc="outside right upper")
    drawn.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect, correlate, and write the record after every cut; `--from` draws and prints a record again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-10 with its splits, as for vitrim eval")
    parser.add_argument("--from", dest="record", type=Path, help="a record of this program; nothing is run")
    parser.add_argument("--method", action="append", help="only these; may repeat")
    parser.add_argument("--cut", type=float, action="append", help="e.g. 0.5; may repeat; default: all four")
    parser.add_argument("--limit", type=int, help="so many test images; default: all")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json")
    given = parser.parse_args(arguments)
    if (given.data is None) == (given.record is None):
        parser.error("give --data to run the study, or --from to show a record")
    rows: list[Row] = json.loads(given.record.read_text())["rows"] if given.record else []
    if given.data:
        machine.set_threads(given.threads)
        torch.manual_seed(0)
        warnings.simplefilter("ignore", ReductionWarning)  # late blocks run out of tokens at large cuts
        model = load_reference("cifar10_vit")
        for cut in given.cut or CUTS:
            rows += rows_of_cut(model, cut, given)
            write_json(given.json, {"environment": machine.environment(seed=0), "rows": rows})
            print(f"{cut:.0%} fewer MACs: {sum(row['cut'] == cut for row in rows)} methods", flush=True)
    print(markdown(correlations(rows)))
    if given.figure is not None:
        figure(rows, given.figure)
