"""Speed of a training step of reduced models against the dense one, in one interleaved run.

    python benchmarks/training_speed.py --json training_speed.json
    python benchmarks/training_speed.py --batch-size 256 --device cuda --method evit:keep_rate=0.6

A step is what `vitrim train` does with a batch that lies ready: forward, loss of the task (the methods' own terms are
left out, so that MACs promise the same for all), backward, AdamW. "promised" is dense MACs over reduced MACs of a
forward; a backward takes twice that of a forward, dense or reduced. Dense is the faster of the host's two attention
kernels. The target is a ratio of 0.85. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from script import from_shell, write_json
from vitrim import reduce_
from vitrim.cli.options import parse_methods
from vitrim.core.method import MethodConfig
from vitrim.errors import ReductionWarning
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.bench import promised_speedups
from vitrim.measure.copies import dense_copies
from vitrim.measure.latency import Budget, fastest, paired_speedup, summarise, time_interleaved

METHODS = ("tome:r=16", "evit:keep_rate=0.495", "topk:keep_rate=0.525", "atm:alpha=0.3905,beta=0.0,theta_min=0.0")
METHODS += ("mctf:r=20", "sit:keep_rate=0.54", "patchmerger:keep_rate=0.54")
"""At half the MACs, as benchmarks/methods.py finds them for DeiT-S."""

TARGET = 0.85
HEADER = ("method", "ms", "speed-up", "promised", "ratio", "")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """Forward, backward and update on one batch."""
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def runner(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """A step of ``model``, to be timed."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return partial(step, model, optimizer, images, labels)


def measure(model: nn.Module, configs: list[MethodConfig], images: Tensor, budget: Budget) -> list[dict[str, Any]]:
    """A row per method, dense first."""
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    kernels = {f"dense ({kernel})": copy.deepcopy(dense) for kernel, dense in dense_copies(model).items()}
    reduced = {config.describe(): copy.deepcopy(model) for config in configs}
    for config in configs:
        reduce_(reduced[config.describe()], config)
    promised = promised_speedups(model, reduced, [images])
    runs = {name: runner(candidate, images, labels) for name, candidate in (kernels | reduced).items()}
    times = time_interleaved(runs, images.device, budget)
    dense = fastest(times, list(kernels))
    rows: list[dict[str, Any]] = [{"method": dense, "p50_ms": summarise(times[dense]).p50_ms}]
    for name in reduced:
        speedup = paired_speedup(times[dense], times[name])
        rows.append(
            {
                "method": name,
                "p50_ms": summarise(times[name]).p50_ms,
                "speedup": speedup.median,
                "speedup_q1": speedup.q1,
                "speedup_q3": speedup.q3,
                "promised_speedup": promised[name],
                "ratio": speedup.median / promised[name],
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [
        _line(HEADER),
        _line(["---"] * len(HEADER)),
        _line([rows[0]["method"], f"{rows[0]['p50_ms']:.0f}", *"    "]),
    ]
    for row in rows[1:]:
        speedup = f"{row['speedup']:.2f} [{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]"
        verdict = "met" if row["ratio"] >= TARGET else "**missed**"
        numbers = [f"{row['p50_ms']:.0f}", speedup, f"{row['promised_speedup']:.2f}", f"{row['ratio']:.2f}", verdict]
        lines.append(_line([f"`{row['method']}`", *numbers]))
    return "\n".join(lines)


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Speed of a training step, reduced against dense.")
    parser.add_argument("--model", default="deit_small_patch16_224", help="a timm model name; weights are random")
    parser.add_argument("--method", action="append", help=f"may repeat; default: {', '.join(METHODS)}")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup-rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the record to this file")
    return parser.parse_args()


def main() -> None:
    """Time all methods and print a table."""
    arguments = parse_arguments()
    machine.set_threads(arguments.threads)
    device = machine.select_device(arguments.device)
    torch.manual_seed(arguments.seed)
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks run out of tokens at half the MACs
    configs = parse_methods(arguments.method or METHODS)
    model = create_model(arguments.model).to(device)
    images = torch.randn(arguments.batch_size, 3, 224, 224).to(device)
    budget = Budget(arguments.rounds, 0.0, max_rounds=arguments.rounds, warmup_rounds=arguments.warmup_rounds)
    rows = measure(model, configs, images, budget)
    record = {
        "command": "training_speed",
        "environment": machine.environment(device=arguments.device, seed=arguments.seed),
        "model": arguments.model,
        "batch_size": arguments.batch_size,
        "rows": rows,
    }
    write_json(arguments.json, record)
    print(f"\n{arguments.model}, training, batch {arguments.batch_size}, {torch.get_num_threads()} threads\n")
    print(markdown(rows))


if __name__ == "__main__":
    from_shell(main)
