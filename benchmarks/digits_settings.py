"""ATM's and ToMe's settings on the digits, chosen on the training scans and then scored on the held-out ones.

    python benchmarks/digits_settings.py

Of every grid the settings whose cut of the MACs on the 1,347 training scans lies within two points of 30 or 50 % are
kept. The one whose logits on the training scans agree best with the dense model's (first class, then the cosine of what
the classifier reads) is chosen; the held-out scans decide nothing. Beside it: the range of all settings that were kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product

from torch import Tensor

from script import from_shell
from vitrim.app.digits import load_digits_vit, load_split
from vitrim.core.method import MethodConfig
from vitrim.core.registry import make_method
from vitrim.errors import ReductionWarning
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.records import Row
from vitrim.measure.run import run
from vitrim.measure.task_data import task_of

CUTS = (0.3, 0.5)
NEAR = 0.02
BATCH = 150
ATM_GRID = {"alpha": (0.9, 0.93, 0.95, 0.97, 0.985, 1.0), "beta": (0.0, 0.014, 0.03, 0.05), "theta_min": (0.0, 0.8)}
TOME_FIRST = range(2, 10)
TOME_STEPS = (0, 1)
"""Tokens fewer in each block than in the one before."""


def settings() -> dict[str, list[MethodConfig]]:
    """The grids by method: ATM over its three options, ToMe with a constant and a falling number of pairs."""
    lists = [[max(first - step * block, 0) for block in range(7)] for first in TOME_FIRST for step in TOME_STEPS]
    return {
        "atm": [
            make_method("atm", **dict(zip(ATM_GRID, values, strict=True))) for values in product(*ATM_GRID.values())
        ],
        "tome": [make_method("tome", r=[*amounts, 0], last_block="class_token") for amounts in lists],
    }


def score(configs: Sequence[MethodConfig], images: Tensor, labels: Tensor) -> list[Row]:
    """Rows of all settings on (B, 1, 8, 8) scans, dense first."""
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))
    model = load_digits_vit()
    task = task_of(model, None)
    return run(model, configs, batches, standard_probes(task), task=task)


def saved(row: Row, dense: Row) -> float:
    """Share of the dense model's MACs that are not spent."""
    return 1 - sum(row["gmacs"].values()) / sum(dense["gmacs"].values())


def main() -> None:
    split = load_split()
    warnings.simplefilter("ignore", ReductionWarning)  # the largest amounts ask for more than there is
    for method, configs in settings().items():
        dense, *rows = score(configs, split.train_images, split.train_labels)
        for cut in CUTS:
            near = [pair for pair in zip(configs, rows, strict=True) if abs(saved(pair[1], dense) - cut) <= NEAR]
            if not near:
                print(f"{method} at {100 * cut:.0f} %: no setting of the grid")
                continue
            near.sort(key=lambda pair: (-pair[1]["agreement"], -pair[1]["cosine"]))
            dense_held_out, *held_out = score([config for config, _ in near], split.test_images, split.test_labels)
            chosen, top1 = held_out[0], sorted(100 * row["top1"] for row in held_out)
            cut_there = 100 * saved(chosen, dense_held_out)
            print(
                f"{method} at {100 * cut:.0f} %: {chosen.method}, held-out top-1 {100 * chosen['top1']:.1f} at "
                f"{cut_there:.0f} % fewer MACs; {len(near)} settings: {top1[0]:.1f} to {top1[-1]:.1f}"
            )


if __name__ == "__main__":
    from_shell(main)
