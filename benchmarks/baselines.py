"""Measure the cost of vitrim beyond the computation itself: against a plain slice, a straightforward loop, and dense.

    python benchmarks/baselines.py --batch-size 1 --rounds 60 --operators --json baselines_1.json
    python benchmarks/baselines.py --batch-size 8 --rounds 15 --json baselines_8.json
    python benchmarks/baselines.py --batch-size 32 --rounds 5 --share 0.5 --json baselines_32.json
    python benchmarks/baselines.py --model test_vit --size 96 --rounds 3 --warmup-rounds 1 -m tome:r=3 -m topk   # a try

Four forms of each method run in turn, A B C A B C, in a run of its own: vitrim's; the *slice*, the same blocks on as
many tokens in the same places, where x = x[:, :n] takes the place of every decision; the *loop*, the method as one
writes it for an experiment (benchmarks/plain_loops.py: ToMe, Top-K, EViT, DynamicViT, Cropr, SiT, ATC, PPT, SAINT,
vid-TLDR, CubistMerge), without state, hooks or a way back; and the dense model with its faster attention kernel. Ratios
are medians, with quartiles, of ratios of times within a round; above 1, vitrim is the faster one. "ratio" is the
speed-up over what MACs promise. With `--together` all methods share one run: some sixty models, which push each other
out of the cache.

Before anything is timed, loop and vitrim must give the same logits in float64, to 1e-4. Weights are random, learned
parts untrained: what is computed does not depend on them, but for ATM's counts. ATM is set to the MACs of ToMe.
Targets are printed as met or missed; they go by the median. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from methods import at_share
from plain_loops import LOOPS, Cut, Forward, Plain, slicing
from script import from_shell, write_json
from vitrim.app.demo import atm_at_the_macs_of
from vitrim.core import compiled
from vitrim.core.block import ReducedBlock
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of, parse_method
from vitrim.engines.formats.base import DTYPES
from vitrim.errors import ReductionWarning, VitrimError, one_line_errors
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.bench import promised_speedups
from vitrim.measure.copies import dense_copies, reduced_copy
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import Budget, FloatArray, fastest, paired_speedup, summarise, time_interleaved
from vitrim.measure.macs import count_macs

Row = dict[str, Any]

LITTLE = "mctf:r=1"
METHODS = ("tome:r=13", "atm", "topk:keep_rate=0.7", "evit:keep_rate=0.7", "dynamicvit:keep_rate=0.7", "cropr:r=8")
METHODS += ("sit:keep_rate=0.7", "l2:keep_rate=0.7", "random:keep_rate=0.7", "mctf:r=16", "pitome", "tofu", "diffrate")
METHODS += ("atc", "ppt", "saint:threshold=0.3", "vid_tldr", "cubist_merge", "gtp", LITTLE)
TOLERANCE = 1e-4
HEADER = (
    "method",
    "ms",
    "slice ms",
    "loop ms",
    "over slice",
    "over loop",
    "over operators",
    "over dense",
    "promised",
    "ratio",
    "targets",
)

OVER_SLICE = dict.fromkeys(("topk", "evit", "dynamicvit", "cropr", "sit", "l1", "l2", "linf", "random"), 0.97)
OVER_SLICE |= dict.fromkeys(("tome", "atm"), 0.94)
OVER_SLICE |= dict.fromkeys(("mctf", "pitome", "tofu", "diffrate", "gtp"), 0.88)
OVER_LOOP = {1: 1.0, 8: 1.03}
NOT_SLOWER = 0.97
KEPT_PROMISE = 0.95


# ---- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """One method in all its forms, on models that share their weights."""

    config: MethodConfig
    reduced: nn.Module
    slice: Forward
    loop: Forward | None
    counts: tuple[int, ...]
    operators: bool = False

    @property
    def name(self) -> str:
        """The method with its options."""
        return self.config.describe()

    def runs(self) -> dict[str, Forward]:
        """The timed models, by name."""
        forms: dict[str, Forward | None] = {"": self.reduced, " slice": self.slice, " loop": self.loop}
        if self.operators:
            forms[" operators"] = partial(by_operators, self.reduced)
        return {self.name + form: run for form, run in forms.items() if run is not None}


def by_operators(model: nn.Module, images: Tensor) -> Tensor:
    """The forward without compiled loops."""
    with patch.object(compiled, "INSTALLED", False):
        found: Tensor = model(images)
    return found


def subject(model: nn.Module, config: MethodConfig, images: Tensor) -> Subject:
    """The forms of a method; how many tokens each block leaves is seen on ``images``, padding included."""
    facts = host_of(model).facts(model)
    if facts.num_prefix != 1 or not facts.has_class_token:
        raise VitrimError("the plain loops are written for models with a class token and no other prefix token")
    reduced = reduced_copy(model, config)
    blocks: Sequence[Any] = host_of(reduced).blocks(reduced)
    counts = tokens_leaving(blocks, reduced, images)
    cuts = [
        Cut(block.reducer.site, count, None if block.head_rows is None else min(block.head_rows, count))
        for block, count in zip(blocks, counts, strict=True)
    ]
    loop = LOOPS.get(config.name)
    return Subject(
        config,
        reduced,
        slicing(model, cuts),
        None if loop is None else loop(model, [block.reducer for block in blocks], counts),
        counts,
    )


def tokens_leaving(blocks: Sequence[ReducedBlock], model: nn.Module, images: Tensor) -> tuple[int, ...]:
    """Tokens that every block hands on, prefix and padding included."""
    seen: list[int] = []

    def note(block: nn.Module, given: Any, output: Tensor) -> None:
        seen.append(output.shape[1])

    hooks = [block.register_forward_hook(note) for block in blocks]
    with torch.inference_mode():
        model(images)
    for hook in hooks:
        hook.remove()
    return tuple(seen)


def check_loops(model: nn.Module, configs: Iterable[MethodConfig], images: Tensor) -> dict[str, float]:
    """The largest difference between the logits of loop and vitrim, by method, in float64, where nothing is a tie.

    Raises:
        VitrimError: they differ by more than `TOLERANCE`: the loop is not the method.
    """
    exact, images = copy.deepcopy(model).double(), images.double()
    found: dict[str, float] = {}
    for config in configs:
        one = subject(exact, config, images)
        if one.loop is None:
            continue
        with torch.inference_mode():
            found[one.name] = (one.loop(images) - one.reduced(images)).abs().max().item()
        if not found[one.name] <= TOLERANCE:
            raise VitrimError(
                f"{one.name}: loop and vitrim differ by {found[one.name]:.2g}: the loop is not the method"
            )
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


def compare(
    model: nn.Module, configs: Sequence[MethodConfig], images: Tensor, budget: Budget, operators: bool = False
) -> list[Row]:
    """A row per method, timed in one interleaved run; with ``operators`` also without compiled loops."""
    dense = {f"dense ({kernel})": copy_ for kernel, copy_ in dense_copies(model).items()}
    subjects = [replace(subject(model, config, images), operators=operators) for config in configs]
    promised = promised_speedups(model, {one.name: one.reduced for one in subjects}, [images])
    whole = count_macs(model, images[:1]).total
    runs: dict[str, Forward] = dict(dense)
    for one in subjects:
        runs |= one.runs()
    with torch.inference_mode():
        times = time_interleaved({name: partial(run, images) for name, run in runs.items()}, images.device, budget)
    baseline = fastest(times, dense)
    rows = []
    for one in subjects:
        of_slice = whole / count_macs(Plain(model, one.slice), images[:1]).total
        facts = {"tokens_per_block": one.counts, "promised_speedup": promised[one.name], "slice_promised": of_slice}
        rows.append({"method": one.name, "dense": baseline, **facts, **_ratios(times, one, baseline)})
        rows[-1]["ratio"] = rows[-1]["over_dense"]["median"] / promised[one.name]
    return rows


def _ratios(times: Mapping[str, FloatArray], one: Subject, baseline: str) -> Row:
    """Times of all forms, and vitrim's speed over that of the others; None where there is no loop."""

    def over(other: str) -> Row | None:
        return vars(paired_speedup(times[other], times[one.name])) if other in times else None

    def middle(name: str) -> float | None:
        return summarise(times[name]).p50_ms if name in times else None

    return {
        "rounds": len(times[one.name]),
        "p50_ms": middle(one.name),
        "slice_p50_ms": middle(f"{one.name} slice"),
        "loop_p50_ms": middle(f"{one.name} loop"),
        "dense_p50_ms": middle(baseline),
        "over_slice": over(f"{one.name} slice"),
        "over_loop": over(f"{one.name} loop"),
        "over_operators": over(f"{one.name} operators"),
        "over_dense": over(baseline),
        "slice_over_dense": vars(paired_speedup(times[baseline], times[f"{one.name} slice"])),
    }


def verdicts(row: Row, batch_size: int) -> dict[str, bool]:
    """The targets that hold at this batch size, and whether they are met.

    Example:
        >>> one = {"method": "tome:r=13", "over_slice": {"median": 0.95}, "over_loop": {"median": 0.98}}
        >>> verdicts({**one, "over_dense": {"median": 1.4}, "ratio": 0.8}, batch_size=1)
        {'over slice >= 0.94': True, 'over loop >= 1.0': False}
    """
    name = row["method"].partition(":")[0]
    found = {}
    if batch_size == 1:
        if name in OVER_SLICE and row["method"] != LITTLE:
            found[f"over slice >= {OVER_SLICE[name]}"] = row["over_slice"]["median"] >= OVER_SLICE[name]
        if name == "gtp" or row["method"] == LITTLE:
            found[f"over dense >= {NOT_SLOWER}"] = row["over_dense"]["median"] >= NOT_SLOWER
    if batch_size in OVER_LOOP and row["over_loop"] is not None:
        found[f"over loop >= {OVER_LOOP[batch_size]}"] = row["over_loop"]["median"] >= OVER_LOOP[batch_size]
    if batch_size >= 8:
        found[f"ratio >= {KEPT_PROMISE}"] = row["ratio"] >= KEPT_PROMISE
    return {target: bool(met) for target, met in found.items()}


def markdown(rows: Iterable[Row]) -> str:
    """The rows of one setting as a table."""

    def ratio(found: Row | None) -> str:
        return "" if found is None else f"{found['median']:.2f} [{found['q1']:.2f}, {found['q3']:.2f}]"

    lines = [_line(HEADER), _line("---" for _ in HEADER)]
    for row in rows:
        targets = [target if met else f"**{target} missed**" for target, met in row["targets"].items()]
        cells = [f"`{row['method']}`"]
        cells += ["" if row[key] is None else f"{row[key]:.1f}" for key in ("p50_ms", "slice_p50_ms", "loop_p50_ms")]
        cells += [ratio(row[key]) for key in ("over_slice", "over_loop", "over_operators", "over_dense")]
        cells += [f"{row['promised_speedup']:.2f}", f"{row['ratio']:.2f}", "; ".join(targets)]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ---- command line ----------------------------------------------------------------------------------------------------


def settings(model: nn.Module, texts: Sequence[str], share: float | None, images: Tensor) -> list[MethodConfig]:
    """The methods; each at ``share`` of the dense MACs if that is given, ATM by itself at those of the first ToMe."""
    if share is not None:
        names = dict.fromkeys(text.partition(":")[0] for text in texts)
        little = [parse_method(LITTLE)] if LITTLE in texts else []
        return [*(at_share(model, name, images, share) for name in names), *little]
    tome = next((text for text in texts if text.startswith("tome")), None)
    return [
        atm_at_the_macs_of(parse_method(tome), model, images) if text == "atm" and tome else parse_method(text)
        for text in texts
    ]


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224", help="timm's, with a class token; random weights")
    parser.add_argument("--size", type=int, help="image size in pixels; default: the model's")
    parser.add_argument("-m", "--method", action="append", help=f"may repeat; default: {' '.join(METHODS)}")
    parser.add_argument("--share", type=float, help="set every method to this share of the dense MACs, e.g. 0.5")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["fp32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="at each setting; every form runs once in each")
    parser.add_argument("--warmup-rounds", type=int, default=3, help="rounds before, not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operators", action="store_true", help="time vitrim without compiled loops, too")
    parser.add_argument("--together", action="store_true", help="time all methods in one run")
    parser.add_argument("--json", help="write the record to this file, after every setting")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Check the loops, time setting by setting, and print a table for each."""
    arguments = parse_arguments(given)
    machine.set_threads(arguments.threads)
    device = machine.select_device(arguments.device)
    torch.manual_seed(arguments.seed)
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks may run out of tokens
    options = {} if arguments.size is None else {"img_size": arguments.size}
    model = create_model(arguments.model, options=options).eval()
    images = random_images(model, max(2, *arguments.batch_size), arguments.seed)
    configs = settings(model, arguments.method or METHODS, arguments.share, images[:2])
    differences = check_loops(model, configs, images[:2])
    print(f"largest difference of logits between loop and vitrim: {max(differences.values(), default=0.0):.1e}")
    budget = Budget(arguments.rounds, 0.0, max_rounds=arguments.rounds, warmup_rounds=arguments.warmup_rounds)
    rows: list[Row] = []
    record = {
        "command": "baselines",
        "environment": machine.environment(device=arguments.device, seed=arguments.seed),
        "differences": differences,
        "rows": rows,
    }
    for dtype in arguments.dtype:
        cast = copy.deepcopy(model).to(device, DTYPES[dtype])
        for size in sorted(arguments.batch_size):
            setting = {"model": arguments.model, "batch_size": size, "dtype": dtype}
            with one_line_errors(f"batch size {size}, {dtype}"):
                batch = images[:size].to(device, DTYPES[dtype])
                runs = [configs] if arguments.together else [[config] for config in configs]
                found = [row for run in runs for row in compare(cast, run, batch, budget, arguments.operators)]
            found = [{**setting, **row, "targets": verdicts(row, size)} for row in found]
            rows += found
            write_json(arguments.json, record)
            print(f"\n{arguments.model}, batch {size}, {dtype}, {torch.get_num_threads()} threads\n", flush=True)
            print(markdown(found), flush=True)
    return rows


if __name__ == "__main__":
    from_shell(main)
