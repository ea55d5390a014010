"""Compare the latency model of `vitrim tune --target speedup=...` with measurements.

    python benchmarks/latency_model.py --json latency_model.json
    python benchmarks/latency_model.py --model test_vit --batch-size 2 --repeats 2 --draws 1 -m tome    # a try

For each method the model is fitted as a search fits it: to 24 settings timed in turn, and 12 more where its mean error,
each setting predicted from the others, is above 5 %. Then four settings of nearly equal MACs, which reduce in few
blocks or in many by amounts drawn at random, are predicted and timed, in three draws. A target speed-up is of use only
if the setting predicted to be the fastest is a fast one: the table says which place it takes among the four measured.
Weights are random; counts do not depend on them. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from script import from_shell, write_json
from vitrim.core.method import MethodConfig
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget
from vitrim.tuning.cost import LatencyCost, MacsCost, eager, latency_fit, within
from vitrim.tuning.space import Space, quiet

METHODS = ("tome", "topk:blocks=[3,6,9]")
FOUR = 4
SHARE = 0.6


def drawn(space: Space, cost: MacsCost, seed: int) -> list[MethodConfig]:
    """Four different settings of at most `SHARE` of the MACs, their blocks and amounts drawn at random."""
    random = np.random.default_rng(seed)
    found: dict[str, MethodConfig] = {}
    while len(found) < FOUR:
        point = random.random(space.size) * (random.random(space.size) < random.random())
        config = within(space, tuple(point.tolist()), cost, SHARE) if point.any() else None
        if config is not None:
            found[space.key(config)] = config
    return list(found.values())


def judge(model: nn.Module, method: str, images: Tensor, budget: Budget, draws: int) -> list[dict[str, Any]]:
    """A row per draw: the error of the fit, and the place that the setting predicted to be the fastest takes."""
    space = Space.of(model, method)
    macs = MacsCost(model, space)
    fit, _ = latency_fit(space, lambda configs: eager(model, configs, [images], budget))
    latency = LatencyCost(space, fit)
    rows = []
    for seed in range(draws):
        configs = drawn(space, macs, seed)
        predicted = np.array([latency.share(config) for config in configs])
        measured, dense_ms = eager(model, configs, [images], budget)
        rows.append(
            {
                "method": method,
                "left_out_mean": latency.error,
                "left_out_worst": fit.worst,
                "draw": seed,
                "settings": [config.describe() for config in configs],
                "predicted": predicted.tolist(),
                "measured": measured.tolist(),
                "dense_ms": dense_ms,
                "error": float(np.mean(np.abs(predicted - measured) / measured)),
                "place": int((measured < measured[predicted.argmin()]).sum()) + 1,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table: shares of the dense latency, percent, and places from 1."""
    names = ("method", "error, left out", "worst", "draw", "predicted", "measured", "error", "place of 4")
    lines = [
        _line(
            (
                f"`{row['method']}`",
                f"{row['left_out_mean']:.1%}",
                f"{row['left_out_worst']:.1%}",
                row["draw"],
                " ".join(f"{one:.3f}" for one in row["predicted"]),
                " ".join(f"{one:.3f}" for one in row["measured"]),
                f"{row['error']:.1%}",
                row["place"],
            )
        )
        for row in rows
    ]
    return "\n".join([_line(names), _line("---" for _ in names), *lines])


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main(given: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Fit, predict and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224", help="timm's; random weights")
    parser.add_argument("-m", "--method", action="append", help=f"may repeat; default: {' '.join(METHODS)}")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds of every set")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the record to this file")
    arguments = parser.parse_args(given)
    machine.set_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = create_model(arguments.model).eval()
    images = random_images(model, arguments.batch_size, arguments.seed)
    budget = Budget(arguments.repeats, 0.0, max_rounds=arguments.repeats)
    with quiet():
        methods = arguments.method or METHODS
        rows = [row for name in methods for row in judge(model, name, images, budget, arguments.draws)]
    write_json(arguments.json, {"environment": machine.environment(seed=arguments.seed), "rows": rows})
    print(table(rows))
    return rows


if __name__ == "__main__":
    from_shell(main)
