"""Speed and memory at high resolution: measured over promised, and what matching costs.

    python benchmarks/resolution.py --json resolution.jsonl --plot docs/images/resolution.svg
    python benchmarks/resolution.py --json resolution.jsonl --plot resolution.svg --draw          # draw only
    python benchmarks/resolution.py --model test_vit --size 64 96 --batch-size 1 --rounds 3 --json /tmp/try.jsonl

ViT-S and ViT-B with random weights at 224 to 1024 px, batch 1 and 8; ToMe, ATM, Top-K, EViT, Cropr and PiToMe, each at
half of the dense model's MACs at that size (one option by bisection, as in benchmarks/methods.py; for a count that
depends on the images, on two of them). A row has the speed-up over the dense model with its fastest attention kernel,
its ratio to what MACs promise, peak memory, and the share that deciding which tokens go takes, in MACs and in time (an
eager forward of its own, not the timed one). The methods of one model, size and batch size take turns with each other
and the dense model, in one run. The target is a ratio of 0.95 at 1024 px, of every method with fixed counts.

The rows of a run are written to the file of `--json` when it is done; started again with the same options, the command
goes on behind them. What would not fit into memory is skipped, and says so: `--again` tries it once more. The whole
takes hours on a CPU; run it on a machine that does nothing else, small sizes first.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cells import Cell, attempt, does_not_fit, matched, told
from lines import Lines, Row
from script import from_shell
from vitrim.core.method import MethodConfig
from vitrim.core.registry import methods
from vitrim.engines.engine import Eager
from vitrim.engines.formats.base import DTYPES
from vitrim.errors import ReductionWarning
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
SIZES = (224, 384, 448, 512, 768, 1024)
METHODS = ("tome", "atm", "topk", "evit", "cropr", "pitome")
KEYS = ("model", "size", "batch_size", "method")
SHARE = 0.5
TARGET = 0.95
HEADER = (
    "model",
    "px",
    "batch",
    "method",
    "speed-up",
    "promised",
    "ratio",
    "matching % of MACs",
    "of time",
    "MiB (dense)",
)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(lines: Lines, arguments: argparse.Namespace) -> None:
    """Every row that is not there yet, small images first."""
    for size in sorted(arguments.size):
        for name in arguments.model:
            for batch_size in sorted(arguments.batch_size):
                cell = {"model": name, "size": size, "batch_size": batch_size}
                if any(lines.find(**cell, method=method) is None for method in ("dense", *arguments.method)):
                    fill(lines, cell, arguments)


def fill(lines: Lines, key: Row, arguments: argparse.Namespace) -> None:
    """The rows of one model, size and batch size."""
    torch.manual_seed(arguments.seed)
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    model = create_model(key["model"], options={"img_size": key["size"]}).eval()
    images = random_images(model, key["batch_size"], arguments.seed).to(device, dtype)
    pair = random_images(model, 2, arguments.seed).to(device, dtype)
    model = model.to(device, dtype)
    budget = Budget(arguments.rounds, arguments.min_seconds, warmup_rounds=arguments.warmup_rounds)
    cell = Cell(model, images, Eager(), budget)
    obstacle = does_not_fit(model, images)

    def row(make: Any) -> Row:
        return {"skipped": obstacle} if obstacle is not None else attempt(make)

    dense = lines.once({**key, "method": "dense"}, partial(row, cell.dense))
    told(dense, **key, method="dense")
    missing = [method for method in arguments.method if lines.find(**key, method=method) is None]
    if "kernel" not in dense:
        rows = {method: {"skipped": "the dense model did not run"} for method in missing}
    else:
        found = {method: attempt(partial(matched, model, method, pair, SHARE)) for method in missing}
        configs = {method: one for method, one in found.items() if isinstance(one, MethodConfig)}
        rows = {method: one for method, one in found.items() if not isinstance(one, MethodConfig)}
        timed = row(partial(cell.together, configs, dense["kernel"], matching=True))
        rows |= dict.fromkeys(configs, timed) if reason(timed) else timed
    for method in missing:
        told(lines.add({**key, "method": method, **rows[method]}), **key, method=method)


# ---- table and figure ------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row]) -> str:
    """The measured rows as a table, in the order of the file."""
    dense = {tuple(row[key] for key in KEYS[:3]): row for row in rows if row["method"] == "dense"}
    lines = [_line(HEADER), _line(["---"] * len(HEADER))]
    for row in rows:
        if "speedup" not in row:
            continue
        beside = dense[tuple(row[key] for key in KEYS[:3])]
        missed = misses(row)
        cells = [row["model"], str(row["size"]), str(row["batch_size"]), f"`{row['setting']}`"]
        cells += [f"{row['speedup']:.2f} [{row['speedup_q1']:.2f}, {row['speedup_q3']:.2f}]"]
        cells += [f"{row['promised_speedup']:.2f}", f"{row['ratio']:.2f}" + (" **missed**" if missed else "")]
        cells += [f"{100 * row['matching_macs']:.1f}", f"{100 * row['matching_time']:.1f}"]
        cells += [" ".join(_mib(one, form) for one, form in ((row, "{:.1f}"), (beside, "({:.1f})")))]
        lines.append(_line(cells))
    why = [f"* {' '.join(str(row[key]) for key in KEYS)}: {reason(row)}" for row in rows if reason(row)]
    return "\n".join([*lines, *(["", "Not measured:", "", *why] if why else [])])


def misses(row: Row) -> bool:
    """Tell whether a row misses the target, which only the largest size has, for methods with fixed counts."""
    return bool(row["size"] >= max(SIZES) and not row["adaptive"] and row["ratio"] < TARGET)


def reason(row: Row) -> str | None:
    """The reason why a row has no numbers."""
    return row.get("skipped") or row.get("failed")


def _mib(row: Row, form: str) -> str:
    return "?" if row["peak_memory_mib"] is None else form.format(row["peak_memory_mib"])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Ratio to the promise, and below it the share of matching in time (lines) and MACs (dashed), over the size."""
    from vitrim.plots.charts import Line, line
    from vitrim.plots.style import SMALL, TEXT, TITLE, below, colours, panels, save

    measured = [row for row in rows if "speedup" in row]
    cells = list(dict.fromkeys((row["model"], row["batch_size"]) for row in measured))
    shades = colours(row["method"] for row in measured)
    figure, axes = panels(2 * len(cells), across=len(cells), size=(3.2, 2.6), above=0.6)
    handles = {}
    for column, (model, batch_size) in enumerate(cells):
        ratio, matching = axes[column], axes[len(cells) + column]
        for method, colour in shades.items():
            own = [
                row
                for row in measured
                if (row["model"], row["batch_size"], row["method"]) == (model, batch_size, method)
            ]
            own.sort(key=lambda row: row["size"])
            if not own:
                continue
            sizes = [row["size"] for row in own]
            spread = [[row[key] / row["promised_speedup"] for row in own] for key in ("speedup_q1", "speedup_q3")]
            handles[method] = line(
                ratio, Line(sizes, [row["ratio"] for row in own], *spread), colour=colour, label=method
            )
            shares = [[100 * row[key] for row in own] for key in ("matching_time", "matching_macs")]
            line(matching, Line(sizes, shares[0], least=shares[1]), colour=colour)
        ratio.axhline(1.0, color="black", linewidth=0.7)
        ratio.set_title(f"{model.split('_patch')[0]}, batch {batch_size}", fontsize=TITLE)
        matching.set_xlabel("image size in pixels", fontsize=TEXT)
        for axis in (ratio, matching):
            axis.tick_params(labelsize=SMALL)
    axes[0].set_ylabel("speed-up over promised", fontsize=TEXT)
    axes[len(cells)].set_ylabel("matching, % of time\n(dashed: of MACs)", fontsize=TEXT)
    below(figure, list(handles.values()), across=6)
    save(figure, path)


# ---- command line ----------------------------------------------------------------------------------------------------


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="timm's; weights are random")
    parser.add_argument("--size", nargs="+", type=int, default=list(SIZES), help="pixels")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--method", nargs="+", choices=list(methods()), default=list(METHODS))
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="at least")
    parser.add_argument("--min-seconds", type=float, default=2.0, help="per model at least: small ones get more rounds")
    parser.add_argument("--warmup-rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file of rows, one JSON text per line; it is continued")
    parser.add_argument("--again", action="store_true", help="try what was skipped or failed once more")
    parser.add_argument("--plot", type=Path, help="the SVG or PNG to draw")
    parser.add_argument("--draw", action="store_true", help="measure nothing: table and plot of what is in --json")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Measure what is missing, print the table, draw the plot."""
    arguments = parse_arguments(given)
    machine.set_threads(arguments.threads)
    machine.select_device(arguments.device)
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks may run out of tokens at half the MACs
    environment = machine.environment(device=arguments.device, dtype=arguments.dtype, seed=arguments.seed)
    budget = {"rounds": arguments.rounds, "min_seconds": arguments.min_seconds}
    settings = {"command": "resolution", **budget, "environment": environment}
    lines = Lines(arguments.json, settings, KEYS, again=arguments.again)
    if not arguments.draw:
        measure(lines, arguments)
    print(f"\n{markdown(lines.rows)}")
    if arguments.plot is not None:
        draw(lines.rows, arguments.plot)
    return lines.rows


if __name__ == "__main__":
    from_shell(main)
