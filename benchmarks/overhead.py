"""The cost of vitrim beyond the computation itself: against a plain slice, a plain loop, and dense.

    python benchmarks/overhead.py --batch-size 1 --rounds 80 --operators
    python benchmarks/overhead.py --batch-size 8 --rounds 15
    python benchmarks/overhead.py --batch-size 32 --rounds 5 --share 0.5 --together

Four forms of each method run in turn: vitrim's; the *slice*, the same blocks on as many tokens in the same places, with
x = x[:, :n] for every decision; the *loop*, the method as one writes it for an experiment (benchmarks/plain_loops.py),
without state, hooks or a way back; and the dense model with its faster attention kernel. Ratios are medians, with
quartiles, of ratios of times within a round: above 1, vitrim is the faster one. "ratio" is the speed-up over what MACs
promise. Each method has a run of its own; with `--together` all share one, and evict each other from the cache.

Loop and vitrim must first give the same logits in float64, to 1e-4. Weights are random: what is computed does not
depend on them, except for the counts of ATM, which is set to the MACs of ToMe. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from plain_loops import LOOPS, Cut, Forward, Plain, slicing
from script import Row, at_share, exactly, from_shell, spread, table, write_json
from vitrim import Budget, MethodConfig, ReductionWarning, VitrimError, create_model, parse_method
from vitrim.app.demo import atm_at_the_macs_of
from vitrim.core import compiled
from vitrim.core.registry import host_of
from vitrim.engines import machine
from vitrim.engines.copies import dense_copies, reduced_copy
from vitrim.engines.macs import count_macs
from vitrim.measure.inputs import random_images
from vitrim.measure.latency import fastest, paired_speedup, summarise, time_interleaved

LITTLE = "mctf:r=1"
METHODS = ("tome:r=13", "atm", "topk:keep_rate=0.7", "evit:keep_rate=0.7", "dynamicvit:keep_rate=0.7", "cropr:r=8")
METHODS += ("sit:keep_rate=0.7", "l2:keep_rate=0.7", "random:keep_rate=0.7", "mctf:r=16", "pitome", "tofu")
METHODS += ("diffrate:discount_sizes=true", "gtp", LITTLE)
TOLERANCE = 1e-4
FORMS = ("slice", "loop", "operators")


@dataclass(frozen=True)
class Subject:
    """One method in its forms, on models that share their weights: ``slice`` and, if there is one, ``loop``."""

    config: MethodConfig
    reduced: nn.Module
    forms: dict[str, Forward]

    @property
    def name(self) -> str:
        """The method with its options."""
        return self.config.describe()


def subject(model: nn.Module, config: MethodConfig, images: Tensor) -> Subject:
    """The forms of a method; how many tokens each block leaves is seen on ``images``, padding included."""
    facts = host_of(model).facts(model)
    if facts.num_prefix != 1 or not facts.has_class_token:
        raise VitrimError("the plain loops are written for models with a class token and no other prefix token")
    reduced, counts = reduced_copy(model, config), list[int]()
    blocks = host_of(reduced).blocks(reduced)
    hooks = [block.register_forward_hook(lambda _, given, output: counts.append(output.shape[1])) for block in blocks]
    with torch.inference_mode():
        reduced(images)
    for hook in hooks:
        hook.remove()
    cuts = [
        Cut(block.reducer.site, count, None if block.head_rows is None else min(block.head_rows, count))
        for block, count in zip(blocks, counts, strict=True)
    ]
    forms = {"slice": slicing(model, cuts)}
    if config.name in LOOPS:
        forms["loop"] = LOOPS[config.name](model, [block.reducer for block in blocks], counts)
    return Subject(config, reduced, forms)


def by_operators(model: nn.Module, images: Tensor) -> Tensor:
    """The forward without compiled loops."""
    with patch.object(compiled, "INSTALLED", False):
        logits: Tensor = model(images)
    return logits


def check_loops(model: nn.Module, configs: Iterable[MethodConfig], images: Tensor) -> dict[str, float]:
    """The largest difference between the logits of loop and vitrim, by method, in float64, where nothing is a tie.

    Raises:
        VitrimError: they differ by more than `TOLERANCE`: the loop is not the method.
    """
    exact, images = copy.deepcopy(model).double(), images.double()
    differences: dict[str, float] = {}
    for config in configs:
        tested = subject(exact, config, images)
        if "loop" in tested.forms:
            with torch.inference_mode():
                difference = (tested.forms["loop"](images) - tested.reduced(images)).abs().max().item()
            if not difference <= TOLERANCE:
                raise VitrimError(
                    f"{tested.name}: loop and vitrim differ by {difference:.2g}: the loop is not the method"
                )
            differences[tested.name] = difference
    return differences


def compare(
    model: nn.Module, configs: Sequence[MethodConfig], images: Tensor, budget: Budget, operators: bool = False
) -> list[Row]:
    """A row per method, timed in one interleaved run; with ``operators`` also without compiled loops."""
    dense = {f"dense ({kernel})": copied for kernel, copied in dense_copies(model).items()}
    subjects = [subject(model, config, images) for config in configs]
    runs: dict[str, Forward] = dict(dense)
    for each in subjects:
        forms = {**each.forms, **({"operators": partial(by_operators, each.reduced)} if operators else {})}
        runs |= {each.name: each.reduced} | {f"{each.name} {form}": run for form, run in forms.items()}
    with torch.inference_mode():
        times = time_interleaved({name: partial(run, images) for name, run in runs.items()}, images.device, budget)
    baseline, whole = fastest(times, dense), count_macs(model, images).total
    rows = []
    for each in subjects:
        promised = whole / count_macs(each.reduced, images).total
        of_slice = whole / count_macs(Plain(model, each.forms["slice"]), images).total
        row = {"method": each.name, "p50_ms": summarise(times[each.name]).p50_ms}
        row |= {"macs_speedup": promised, "slice_promised": of_slice}
        others = {"dense": baseline, **{form: f"{each.name} {form}" for form in FORMS}}
        row |= {
            f"over_{form}": vars(paired_speedup(times[other], times[each.name]))
            for form, other in others.items()
            if other in times
        }
        rows.append({**row, "ratio": row["over_dense"]["median"] / promised})
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The rows of one setting as a table."""
    columns = [f"over_{form}" for form in ("dense", *FORMS)]

    def ratio(row: Row, column: str) -> str:
        return spread(row[column]["median"], row[column]["q1"], row[column]["q3"]) if column in row else ""

    cells = (
        (
            *(f"`{row['method']}`", f"{row['p50_ms']:.1f}", f"{row['macs_speedup']:.2f}", f"{row['ratio']:.2f}"),
            *(ratio(row, column) for column in columns),
        )
        for row in rows
    )
    return table(("method", "ms", "promised", "ratio", *(column.replace("_", " ") for column in columns)), cells)


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


def main(given: Sequence[str] | None = None) -> list[Row]:
    """Check the loops, time every batch size, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_small_patch16_224", help="timm's, with a class token; random weights")
    parser.add_argument("-m", "--method", action="append", help=f"may repeat; default: {' '.join(METHODS)}")
    parser.add_argument("--share", type=float, help="set every method to this share of the dense MACs, e.g. 0.5")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--operators", action="store_true", help="time vitrim without compiled loops, too")
    parser.add_argument("--together", action="store_true", help="time all methods in one run")
    parser.add_argument("--json", help="write the record to this file, after every batch size")
    options = parser.parse_args(given)
    machine.set_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks may run out of tokens
    model = create_model(options.model).eval()
    images = random_images(model, max(2, *options.batch_size), 0)
    configs = settings(model, options.method or METHODS, options.share, images[:2])
    differences = check_loops(model, configs, images[:2])
    print(f"largest difference of logits between loop and vitrim: {max(differences.values(), default=0.0):.1e}")
    rows: list[Row] = []
    record = {"command": "overhead", "environment": machine.environment(seed=0), "rows": rows}
    for size in options.batch_size:
        runs = [configs] if options.together else [[config] for config in configs]
        timed = [
            row
            for run in runs
            for row in compare(model, run, images[:size], exactly(options.rounds, 3), options.operators)
        ]
        rows += [{"batch_size": size, **row} for row in timed]
        write_json(options.json, record)
        print(f"\n{options.model}, batch {size}, {torch.get_num_threads()} threads\n\n{markdown(timed)}", flush=True)
    return rows


if __name__ == "__main__":
    from_shell(main)
