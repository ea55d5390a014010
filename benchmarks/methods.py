"""Measured against promised speed-up of every registered method at half the MACs, in one interleaved run.

    python benchmarks/methods.py --json methods.json
    python benchmarks/methods.py --batch-size 1 --dtype float32 --rounds 3 --method tome --method mctf

DeiT-S geometry with random weights and images. "50 %" means the same for all: one option of each method is chosen by
bisection (`vitrim.tuning.match_macs`) so that its MACs come as near as possible to half of the dense model's, whatever
it calls its amount and at whatever blocks it acts; all other options are its defaults. Which option is searched, the
method says itself (`tunable`). Counts that depend on the images are matched on two of them, and what they come to on
the timed batch is in the columns "MACs" and "tokens".

"speed-up" is the median, with quartiles, of time ratios within a round, over the dense model with its faster attention
kernel; "promised" is dense MACs over reduced MACs; "ratio" is the one over the other. Targets: a ratio of 0.9 for
pruning and bipartite merging, 0.85 for MCTF; methods that cluster or mix must be faster than dense; MCTF at r = 1 must
not be slower than dense by more than 3 %. Met or missed goes by the median. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from script import from_shell, write_json
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of, make_method, methods, parse_method
from vitrim.errors import ReductionWarning, one_line_errors
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.bench import measure
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget
from vitrim.measure.macs import profile_of
from vitrim.tuning import match_macs

Row = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LITTLE = "mctf:r=1"
HEADER = ("method", "MACs %", "tokens", "dense ms", "ms", "speed-up", "promised", "ratio", "target", "")


# ---- what is measured ------------------------------------------------------------------------------------------------


def at_share(model: nn.Module, method: str, images: Tensor, share: float) -> MethodConfig:
    """The setting of ``method`` whose MACs on ``images`` come nearest to ``share`` of the dense model's."""
    tunable = methods()[method].tunable
    if tunable is None:
        return make_method(method)
    if not make_method(method).is_adaptive():
        images = images[:1]  # counts are the same for all
    rows, columns = host_of(model).facts(model).grid_size
    values = partial(tunable.value, patches=rows * columns)

    def setting(strength: float) -> MethodConfig:
        return make_method(method, **{**tunable.fixed, tunable.option: values(strength)})

    dense = profile_of(model, None, images).macs.total
    ends = [profile_of(model, setting(strength), images).macs.total / dense for strength in (0.0, 1.0)]
    within = min(max(share, min(ends)), max(ends))  # a method that cannot reach the share is measured at its nearest
    return match_macs(model, images, setting, within, low=0.0, high=1.0, max_steps=12)


# ---- what is asked for -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A lower bound on the speed-up, or on its ratio to the promised one."""

    quantity: str
    at_least: float

    def __str__(self) -> str:
        return f"{self.quantity} >= {self.at_least}"


FASTER_THAN_DENSE = Target("speedup", 1.0)
OWN_TARGETS: dict[str, Target] = {
    "mctf": Target("ratio", 0.85),
    LITTLE: Target("speedup", 0.97),
    "kmedoids": FASTER_THAN_DENSE,
    "dpc_knn": FASTER_THAN_DENSE,
}
KIND_TARGETS: dict[str, Target | None] = {
    "prune": Target("ratio", 0.9),
    "merge": Target("ratio", 0.9),
    "mixed": Target("ratio", 0.9),
    "soft": FASTER_THAN_DENSE,
    "none": None,
}


def target_of(config: MethodConfig) -> Target | None:
    """The target of a method."""
    for name in (config.describe(), config.name):
        if name in OWN_TARGETS:
            return OWN_TARGETS[name]
    return KIND_TARGETS[config.kind]


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(
    model: nn.Module, configs: Iterable[MethodConfig], images: Tensor, setting: Mapping[str, Any], budget: Budget
) -> list[Row]:
    """Rows of `vitrim.measure.bench.measure`, dense first, each with tokens kept, share of MACs, and target."""
    by_name = {config.describe(): config for config in configs}
    with one_line_errors(f"batch size {setting['batch_size']}, {setting['dtype']}"):
        rows = measure(model, by_name, images, budget=budget)
        return [{**setting, **row, **_facts(model, by_name.get(row["method"]), images, row)} for row in rows]


def _facts(model: nn.Module, config: MethodConfig | None, images: Tensor, row: Row) -> Row:
    tokens = profile_of(model, config, images).tokens_per_block
    target = None if config is None else target_of(config)
    return {
        "macs_share": 1.0 / row["promised_speedup"],
        "tokens_per_block": tokens,
        "mean_tokens": sum(tokens) / len(tokens),
        "target": None if target is None else str(target),
        "met": None if target is None else bool(row[target.quantity] >= target.at_least),
    }


def markdown(rows: Iterable[Row]) -> str:
    """The reduced models among the ``rows`` of one setting as a table."""
    dense, *reduced = rows
    lines = [_line(HEADER), _line("---" for _ in HEADER)]
    for row in reduced:
        verdict = {None: "", True: "met", False: "**missed**"}[row["met"]]
        lines.append(
            _line(
                (
                    f"`{row['method']}`",
                    f"{100 * row['macs_share']:.1f}",
                    f"{row['mean_tokens']:.1f}, last {row['tokens_per_block'][-1]:g}",
                    f"{dense['latency_ms']['p50']:.1f} ({dense['dense_kernel']})",
                    f"{row['latency_ms']['p50']:.1f}",
                    f"{row['speedup']:.2f} [{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]",
                    f"{row['promised_speedup']:.2f}",
                    f"{row['ratio']:.2f}",
                    row["target"] or "",
                    verdict,
                )
            )
        )
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Speed of every method at half the MACs against what MACs promise.")
    parser.add_argument("--model", default="deit_small_patch16_224", help="a timm model name; weights are random")
    parser.add_argument("--method", action="append", choices=list(methods()), help="may repeat; default: all")
    parser.add_argument("--share", type=float, default=0.5, help="wanted share of the dense MACs")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="rounds at each setting; every model runs once in each")
    parser.add_argument("--warmup-rounds", type=int, default=2, help="rounds before, not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the record to this file, after every setting")
    return parser.parse_args()


def main() -> None:
    """Choose the settings, time them setting by setting, and print a table for each."""
    arguments = parse_arguments()
    machine.set_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    # late blocks run out of tokens at half the MACs: the column "tokens" says what is left
    warnings.simplefilter("ignore", ReductionWarning)
    budget = Budget(arguments.rounds, 0.0, max_rounds=arguments.rounds, warmup_rounds=arguments.warmup_rounds)
    model = create_model(arguments.model)
    pair = random_images(model, 2, arguments.seed)
    configs = [at_share(model, method, pair, arguments.share) for method in arguments.method or methods()]
    if any(config.name == "mctf" for config in configs):
        configs.append(parse_method(LITTLE))
    rows: list[Row] = []
    record = {
        "command": "methods",
        "environment": machine.environment(dtype=",".join(arguments.dtype), seed=arguments.seed),
        "share": arguments.share,
        "rows": rows,
    }
    for dtype in arguments.dtype:
        for batch_size in sorted(arguments.batch_size):
            setting = {"model": arguments.model, "batch_size": batch_size, "dtype": dtype, "compiled": False}
            # a copy, because a model that has been in bfloat16 does not come back
            cast = copy.deepcopy(model).to(DTYPES[dtype])
            images = random_images(model, batch_size, arguments.seed).to(DTYPES[dtype])
            found = run(cast, configs, images, setting, budget)
            rows += found
            write_json(arguments.json, record)
            print(f"\n{arguments.model}, batch {batch_size}, {dtype}, {torch.get_num_threads()} threads\n", flush=True)
            print(markdown(found), flush=True)


if __name__ == "__main__":
    from_shell(main)
