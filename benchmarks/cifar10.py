"""Accuracy and speed of the methods on CIFAR-10's test images, with the reference checkpoint.

    python benchmarks/cifar10.py cuts --data CIFAR --json cuts.json
    python benchmarks/cifar10.py stress --data CIFAR
    python benchmarks/cifar10.py atm --data CIFAR
    python benchmarks/cifar10.py finetune --data CIFAR --out runs/finetune --processes 2

With `--run FOLDER` the model is that of another finished run of `vitrim train`. What `--json` wrote
benchmarks/cifar10_report.py makes into the tables and the figure of docs/results/cifar10.md.

`cuts`: every method set so that MACs fall by about 20, 35, 50 and 65 %, by bisection over one option as in
benchmarks/methods.py: top-1, agreement with the dense model, MACs, and images per second measured in one interleaved
run. Methods that draw at random run with three seeds; the spread is their range. `stress`: the largest cut at which
top-1 is not below that of the dense model (the stress test of the ATM paper, Table 1), in steps of 5 % of the MACs.
`atm`: the sweep over (alpha, beta, theta_min) of the ATM paper's Appendix D. `finetune`: what training under a method
at half the MACs recovers, by the recipe cifar10_finetune, beside the same updates without a method, with three seeds
where the choice of tokens is drawn in training; a run that is interrupted goes on where it stopped, one that is
finished is not made again.

All methods of a table are evaluated in one pass over the same images. Counts that depend on the images are matched on
64 training images, so that the test images decide nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from cifar10_report import report
from methods import at_share
from script import from_shell, write_json
from vitrim.core.method import MethodConfig
from vitrim.core.registry import make_method, methods
from vitrim.data import batches, eval_transform, load_images
from vitrim.errors import ReductionWarning, VitrimError
from vitrim.loading import load_reference, load_run
from vitrim.measure import machine
from vitrim.measure.bench import measure
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.latency import Budget
from vitrim.measure.macs import profile_of
from vitrim.measure.records import Row
from vitrim.measure.run import run
from vitrim.measure.task_data import task_of
from vitrim.training.checkpoint import latest
from vitrim.training.recipe import Resolved, load_recipe, recipe_text
from vitrim.weights import RECIPE, RESULT

CUTS = (0.2, 0.35, 0.5, 0.65)
STRESS_CUTS = tuple(step / 20 for step in range(1, 15))
SEEDS = (0, 1, 2)
RANDOM = ("random",)
"""Methods whose result is another with every seed."""
DRAWN_IN_TRAINING = ("dynamicvit",)
"""Methods that draw in training which tokens stay (Gumbel softmax)."""
MATCHING_IMAGES = 64
REACHED = 0.03
"""A cut counts as reached where the MACs are within this share of the dense model's."""
ATM_GRID = {"alpha": (0.95, 0.97, 0.985, 0.99), "beta": (0.0, 0.02, 0.045), "theta_min": (0.0, 0.8, 0.88, 0.95)}
FINETUNE_SHARE = 0.5
FINETUNED: dict[str, tuple[str, ...]] = {
    "dynamicvit": ("teacher=dense",),
    "evit": (),
    "mctf": (),
    "cropr": (),
    "atm": (),
    "sit": (),
    "patchmerger": (),
}
"""The methods that are trained, and what the recipe of each has besides."""


# ---- model and data --------------------------------------------------------------------------------------------------


def some_images(model: nn.Module, data: str) -> Tensor:
    """Images of the training part, to match amounts on."""
    dataset = load_images(data, split="train")
    dataset.transform = eval_transform(model)
    images, _ = next(iter(batches(dataset, MATCHING_IMAGES, limit=MATCHING_IMAGES)))
    return images


def score(
    model: nn.Module, configs: Sequence[MethodConfig], data: str, limit: int | None, seed: int, batch_size: int
) -> list[Row]:
    """Rows of all ``configs``, dense first, in one pass over the test part."""
    dataset = load_images(data, split="test")
    dataset.transform = eval_transform(model)
    task, read = task_of(model, dataset), batches(dataset, batch_size, limit=limit)
    return run(model, configs, read, standard_probes(task), task=task, seed=seed)


def candidates(only: Iterable[str] | None) -> list[str]:
    """The methods that need no training and have an amount, or those asked for."""
    free = [name for name, config in methods().items() if config.training_free and name != "none"]
    return chosen_from(free, only)


def chosen_from(names: Iterable[str], only: Iterable[str] | None) -> list[str]:
    """Those of ``names`` that are asked for; all, if nothing is."""
    names, only = list(names), list(only or names)
    for name in only:
        if name not in names:
            raise VitrimError(f"'{name}' is not in this table; it has: {', '.join(names)}")
    return [name for name in names if name in only]


# ---- tables ----------------------------------------------------------------------------------------------------------


def settings(model: nn.Module, names: Iterable[str], images: Tensor, cut: float) -> dict[str, MethodConfig]:
    """By method, the setting that makes the cut; methods that cannot make it are left out."""
    dense = profile_of(model, None, images).macs.total
    found = {}
    for name in names:
        config = at_share(model, name, images, 1 - cut)
        share = profile_of(model, config, images).macs.total / dense
        if abs(share - (1 - cut)) <= REACHED:
            found[name] = config
    return found


def cuts(model: nn.Module, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per method and cut: accuracy over the seeds, MACs, speed. The dense model is in every cut's timing."""
    images = some_images(model, arguments.data)
    rows: list[dict[str, Any]] = []
    for cut in arguments.cut or CUTS:
        rows += _rows_of_cut(model, cut, images, arguments)
        write(rows, arguments)  # after every cut: each takes many minutes
        print(report("cuts", [row for row in rows if row["cut"] == cut]), flush=True)
    return rows


def _rows_of_cut(model: nn.Module, cut: float, images: Tensor, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = list(settings(model, candidates(arguments.method), images, cut).values())
    drawn = [config for config in chosen if config.name in RANDOM]
    scored = [_by_method(model, chosen, arguments, SEEDS[0])]
    scored += [_by_method(model, drawn, arguments, seed) for seed in SEEDS[1:] if drawn]
    timed = {row["method"]: row for row in _timed(model, chosen, images, arguments)}
    dense = scored[0]["dense"]
    rows = [_row("dense", cut, [dense], dense, timed["dense"])]
    for config in chosen:
        name = config.describe()
        rows.append(_row(name, cut, [found[name] for found in scored if name in found], dense, timed[name]))
    return rows


def _by_method(
    model: nn.Module, configs: Sequence[MethodConfig], arguments: argparse.Namespace, seed: int
) -> dict[str, Row]:
    found = score(model, configs, arguments.data, arguments.limit, seed, arguments.batch_size)
    return {row.method: row for row in found}


def _timed(
    model: nn.Module, configs: Sequence[MethodConfig], images: Tensor, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    budget = Budget(arguments.rounds, 0.0, max_rounds=arguments.rounds, warmup_rounds=1)
    return measure(model, {config.describe(): config for config in configs}, images, budget=budget)


def _row(name: str, cut: float, seen: list[Row], dense: Row, timed: dict[str, Any]) -> dict[str, Any]:
    tops = [100 * row["top1"] for row in seen]
    return {
        "method": name,
        "cut": cut,
        "top1": mean(tops),
        "top1_range": max(tops) - min(tops),
        "seeds": len(seen),
        "agreement": 100 * mean(row["agreement"] for row in seen),
        "macs_saved": 100 * (1 - sum(seen[0]["gmacs"].values()) / sum(dense["gmacs"].values())),
        "images_per_second": timed["images_per_second"],
        "speedup": timed["speedup"],
    }


def stress(model: nn.Module, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per method: the largest cut up to which no cut lowers top-1."""
    images = some_images(model, arguments.data)
    alive, best = candidates(arguments.method), dict[str, dict[str, Any]]()
    for cut in STRESS_CUTS:
        chosen = settings(model, alive, images, cut)
        if not chosen:
            break
        found = _by_method(model, list(chosen.values()), arguments, SEEDS[0])
        dense = found["dense"]
        alive = [name for name, config in chosen.items() if found[config.describe()]["top1"] >= dense["top1"]]
        for name in alive:
            text = chosen[name].describe()
            best[name] = _untimed(text, found[text], dense)
        print(f"cut of {cut:.0%}: {', '.join(alive) or 'none'} without a drop", flush=True)
        if not alive:
            break
    rows = [best.get(name, {"method": name, "macs_saved": 0.0}) for name in candidates(arguments.method)]
    return sorted(rows, key=lambda row: -float(row["macs_saved"]))


def sweep(model: nn.Module, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per setting of ATM, most MACs first."""
    values = product(*ATM_GRID.values())
    configs = [make_method("atm", **dict(zip(ATM_GRID, value, strict=True))) for value in values]
    found = score(model, configs, arguments.data, arguments.limit, SEEDS[0], arguments.batch_size)
    rows = [_untimed(row.method, row, found[0]) for row in found]
    return sorted(rows, key=lambda row: float(row["macs_saved"]))


def _untimed(name: str, row: Row, dense: Row) -> dict[str, Any]:
    return {
        "method": name,
        "top1": 100 * row["top1"],
        "change": 100 * (row["top1"] - dense["top1"]),
        "agreement": 100 * row["agreement"],
        "macs_saved": 100 * (1 - sum(row["gmacs"].values()) / sum(dense["gmacs"].values())),
    }


def finetune(model: nn.Module, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per method: top-1 before training, if it needs none, and after it; the first row is the control."""
    images = some_images(model, arguments.data)
    names = chosen_from(FINETUNED, arguments.method)
    configs = {name: at_share(model, name, images, FINETUNE_SHARE) for name in names}
    free = [config for config in configs.values() if config.training_free]
    before = {row.method: row for row in score(model, free, arguments.data, None, SEEDS[0], arguments.batch_size)}
    dense = profile_of(model, None, images).macs.total
    control = _finetuned("none", (), arguments)
    rows = [{"method": "dense", "before": 100 * before["dense"]["top1"], **control, "macs_saved": 0.0}]
    for name, config in configs.items():
        text = config.describe()
        top1 = 100 * before[text]["top1"] if text in before else None
        share = profile_of(model, config, images).macs.total / dense
        trained = _finetuned(text, FINETUNED[name], arguments)
        rows.append({"method": text, "before": top1, **trained, "macs_saved": 100 * (1 - share)})
        print(rows[-1], flush=True)
    return rows


def _finetuned(method: str, changes: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Results of cifar10_finetune under the method: one, or one for every seed."""
    name = method.partition(":")[0]
    seeds = SEEDS if name in DRAWN_IN_TRAINING else SEEDS[:1]
    found = [_run(method, [*changes, f"seed={seed}"], _folder(name, seed, arguments), arguments) for seed in seeds]
    tops = [result["last"]["top1"] for result in found]
    return {
        "after": mean(tops),
        "after_range": max(tops) - min(tops),
        "seeds": len(seeds),
        "minutes": mean(result["seconds"] / 60 for result in found),
    }


def _folder(name: str, seed: int, arguments: argparse.Namespace) -> Path:
    return Path(arguments.out) / (name if seed == SEEDS[0] else f"{name}-seed{seed}")


def _run(method: str, changes: Sequence[str], out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of a run, made now unless it is there already."""
    changes = [f"method={method}", *changes, *(arguments.change or ())]
    resolved = load_recipe(arguments.recipe, changes)
    if (out / RESULT).is_file():
        _check_same(out, resolved, arguments.run)
    else:
        _train(out, changes, arguments)
    result: dict[str, Any] = json.loads((out / RESULT).read_text())
    return result


def _train(out: Path, changes: Sequence[str], arguments: argparse.Namespace) -> None:
    """`vitrim train` as its user runs it, in processes of its own: they share the threads."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={arguments.processes}"]
    command = [sys.executable, *(launch if arguments.processes > 1 else []), "-m", "vitrim", "train"]
    command += [arguments.recipe, *changes, "--data", arguments.data, "--out", str(out), "--eval-batch", "100"]
    if arguments.run is not None:
        command += ["--checkpoint", str(arguments.run)]
    if latest(out / "checkpoints") is not None:
        command.append("--resume")
    if not torch.cuda.is_available():
        command += ["--device", "cpu"]
    threads = str(max(arguments.threads // arguments.processes, 1))
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": threads})


TABLES: dict[str, Callable[[nn.Module, argparse.Namespace], list[dict[str, Any]]]] = {
    "cuts": cuts,
    "stress": stress,
    "atm": sweep,
    "finetune": finetune,
}


# ---- output ----------------------------------------------------------------------------------------------------------


def write(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """The record, if one is asked for."""
    run = None if arguments.run is None else str(arguments.run)
    record = {"command": f"cifar10 {arguments.table}", "environment": machine.environment(), "rows": rows}
    write_json(arguments.json, {**record, "run": run, "limit": arguments.limit})


def _check_same(out: Path, resolved: Resolved, start: Path | None) -> None:
    """A finished run is taken for the one that is asked for only if it has its recipe and its starting weights."""
    started = json.loads((out / RESULT).read_text())["start"]
    same = (out / RECIPE).read_text() == recipe_text(resolved.recipe)
    if not same or started != (None if start is None else str(start)):
        raise VitrimError(f"{out} holds another run: remove it, or name another --out")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="The methods on CIFAR-10's test images.")
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--run", type=Path, help="folder of a finished run of vitrim train")
    parser.add_argument("--data", required=True, help="as for vitrim eval; splits train and test")
    parser.add_argument("--method", action="append", help="only these; may repeat")
    parser.add_argument("--limit", type=int, help="so many test images only, for a quick try; not of `finetune`")
    parser.add_argument("--batch-size", type=int, default=32, help="of the evaluations; speeds are of batches of 64")
    parser.add_argument("--cut", type=float, action="append", help="of `cuts`, e.g. 0.5; may repeat; default: all four")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of `cuts`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="runs/finetune", help="folder of the runs of `finetune`")
    parser.add_argument("--recipe", default="cifar10_finetune", help="of `finetune`")
    parser.add_argument("--change", action="append", help="key=value for that recipe; may repeat")
    parser.add_argument("--processes", type=int, default=1, help="of `finetune`; on a CPU one for each core is fastest")
    parser.add_argument("--json", help="write the record to this file")
    return parser.parse_args()


def main() -> None:
    """Make one of the tables."""
    arguments = parse_arguments()
    machine.set_threads(arguments.threads)
    torch.manual_seed(SEEDS[0])
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks run out of tokens at large cuts
    model = load_reference("cifar10_vit") if arguments.run is None else load_run(arguments.run)
    rows = TABLES[arguments.table](model, arguments)
    write(rows, arguments)
    print(report(arguments.table, rows))


if __name__ == "__main__":
    from_shell(main)
