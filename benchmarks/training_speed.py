"""Speed of a training step of reduced models against the dense one, in one interleaved run.

    python benchmarks/training_speed.py --rounds 4
    python benchmarks/training_speed.py --batch-size 256 --device cuda --method evit:keep_rate=0.6

A step is what `vitrim train` does with a batch that is ready: forward, cross entropy, backward, AdamW. A method's own
loss terms are left out, so that MACs promise the same for all. "promised" is dense MACs over reduced MACs of a forward;
a backward takes twice that of a forward, dense or reduced. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from script import Row, exactly, from_shell, spread, table, write_json
from vitrim import Budget, MethodConfig, ReductionWarning, create_model, parse_method, reduce_
from vitrim.engines import machine
from vitrim.engines.copies import dense_copies
from vitrim.measure.latency import fastest, paired_speedup, summarise, time_interleaved
from vitrim.measure.timing import macs_speedups

METHODS = ("tome:r=16", "evit:keep_rate=0.495", "topk:keep_rate=0.525", "atm:alpha=0.3905,beta=0.0,theta_min=0.0")
METHODS += ("mctf:r=20", "sit:keep_rate=0.54", "patchmerger:keep_rate=0.54")
"""At half the MACs of DeiT-S."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """Forward, backward and update on one batch."""
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def runner(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """A step of ``model``, to be timed."""
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    model.train()
    return partial(step, model, torch.optim.AdamW(model.parameters(), lr=1e-5), images, labels)


def measure(model: nn.Module, configs: Sequence[MethodConfig], images: Tensor, budget: Budget) -> list[Row]:
    """A row per method, dense first."""
    kernels = {f"dense ({kernel})": copy.deepcopy(dense) for kernel, dense in dense_copies(model).items()}
    reduced = {config.describe(): copy.deepcopy(model) for config in configs}
    for config in configs:
        reduce_(reduced[config.describe()], config)
    promised = macs_speedups(model, reduced, [images])
    times = time_interleaved(
        {name: runner(each, images) for name, each in (kernels | reduced).items()}, images.device, budget
    )
    dense = fastest(times, list(kernels))
    rows: list[Row] = [{"method": dense, "p50_ms": summarise(times[dense]).p50_ms}]
    for name in reduced:
        speedup = paired_speedup(times[dense], times[name])
        row = {"method": name, "p50_ms": summarise(times[name]).p50_ms, "speedup": speedup.median}
        row |= {"speedup_q1": speedup.q1, "speedup_q3": speedup.q3, "macs_speedup": promised[name]}
        rows.append({**row, "ratio": speedup.median / promised[name]})
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    cells: list[Sequence[object]] = [(rows[0]["method"], f"{rows[0]['p50_ms']:.0f}", "", "", "")]
    for row in rows[1:]:
        faster = spread(row["speedup"], row["speedup_q1"], row["speedup_q3"])
        promise = f"{row['macs_speedup']:.2f}", f"{row['ratio']:.2f}"
        cells.append((f"`{row['method']}`", f"{row['p50_ms']:.0f}", faster, *promise))
    return table(("method", "ms", "speed-up", "promised", "ratio"), cells)


def main() -> None:
    """Time all methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224", help="a timm model name; weights are random")
    parser.add_argument("--method", action="append", help=f"may repeat; default: {', '.join(METHODS)}")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the record to this file")
    options = parser.parse_args()
    machine.set_threads(options.threads)
    device = machine.select_device(options.device)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks run out of tokens at half the MACs
    model = create_model(options.model).to(device)
    images = torch.randn(options.batch_size, 3, 224, 224).to(device)
    rows = measure(model, [parse_method(text) for text in options.method or METHODS], images, exactly(options.rounds))
    environment = machine.environment(device=options.device, seed=0)
    write_json(options.json, {"command": "training_speed", "environment": environment, "rows": rows})
    print(f"{options.model}, training, batch {options.batch_size}, {torch.get_num_threads()} threads\n")
    print(markdown(rows))


if __name__ == "__main__":
    from_shell(main)
