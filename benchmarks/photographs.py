"""The methods, without training, on held-out photographs with published ImageNet weights.

    WEIGHTS="--model vit_tiny_patch16_224 --checkpoint VIT_TINY.safetensors"
    PHOTOS="--chosen-on TRAINING_PHOTOS --data HELD_OUT_PHOTOS"
    python benchmarks/photographs.py cuts $WEIGHTS $PHOTOS --json cuts.json --figure cuts.png
    python benchmarks/photographs.py times $WEIGHTS $PHOTOS --json times.json
    python benchmarks/photographs.py speeds $WEIGHTS $PHOTOS --times times.json --json speeds.json
    python benchmarks/photographs.py lossless $WEIGHTS $PHOTOS --json lossless.json
    python benchmarks/photographs.py schedules $WEIGHTS $PHOTOS --json schedules.json
    python benchmarks/photographs.py published --model deit_tiny_patch16_224 --checkpoint DEIT_TINY.safetensors $PHOTOS
    python benchmarks/photographs.py atm $WEIGHTS $PHOTOS

`cuts`: every method set so that MACs fall by about 20, 35, 50 and 65 %, as in benchmarks/cifar10.py: top-1, its change
with the standard error of the paired difference, agreement with the dense model, KL divergence from it, and cosine of
the class token; with `--rounds`, images per second of one interleaved run. `times`: how many times as fast as the
fastest dense engine every method is at cuts from 10 to 70 %, on the faster of PyTorch and OpenVINO, in fp32; run it on
a machine that does nothing else. `speeds`: every method at 1.1, 1.25, 1.5 and 2 times the speed of the fastest dense
engine, with the settings that those times give, interpolated over the cut. `lossless`: the largest cut, in steps of
5 % of the MACs, at which the 95 % interval of the change excludes a loss of one point of top-1, and at which all
smaller ones do; `stress`: the same for a loss within its standard error (the stress test of the ATM paper, Table 1).
`schedules`: every method that can follow them on the same three schedules at equal MACs, so that what is compared is
the choice of tokens and not of blocks: as many tokens fewer in every block, three stages a quarter apart, and the same
share of tokens in every block, which takes most of them early. `published`: the rows of the ATM paper's Table A2 for
the model, which were not trained, settings as printed: the change that is printed, and the one here. `atm`: its sweep
over alpha, beta and theta_min (Appendix D).

Settings are chosen on images of TRAINING_PHOTOS (by their MACs, where these depend on the images), and scored once on
HELD_OUT_PHOTOS, which no weights were trained on. Both are given as for `vitrim eval`.
"""

from __future__ import annotations

import argparse
import csv
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from cifar10 import ATM_GRID, CUTS, RANDOM, SEEDS, STRESS_CUTS, candidates, settings
from cifar10_report import figure, markdown, sweep
from script import at_speed, from_shell, write_json
from vitrim.core.method import MethodConfig
from vitrim.core.registry import host_of, make_method, methods
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines.engine import engines_named
from vitrim.engines.formats.base import PRECISIONS
from vitrim.errors import ReductionWarning, VitrimError
from vitrim.loading import create_model
from vitrim.measure import machine
from vitrim.measure.bench import measure
from vitrim.measure.contestants import ModelOutput
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.latency import Budget
from vitrim.measure.macs import profile_of
from vitrim.measure.probes import Gauge, Values, divergence
from vitrim.measure.records import Batch, Row
from vitrim.measure.run import run
from vitrim.measure.task_data import task_of
from vitrim.weights import load_checkpoint

MATCHING_IMAGES = 64
TIMED_IMAGES = 8
SCHEDULE_CUT = 0.4
SPEEDS = (1.1, 1.25, 1.5, 2.0)
TIMED_CUTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
ONE_POINT = 0.01
"""The loss that a lossless cut must exclude, a share."""
NORMAL = 1.96
"""Standard errors on each side of a 95 % interval."""
TABLES_OF_ATM = Path(__file__).parents[1] / "tests" / "golden" / "tables" / "atm_tables_a2_a5.csv"
PRINTED_AS = {"deit_tiny_patch16_224": "DeiT-T", "deit_small_patch16_224": "DeiT-S", "deit_base_patch16_224": "DeiT-B"}
"""Models by timm's name as the paper writes them."""


class Paired(Gauge):
    """Change of top-1 with its standard error, image by image, and divergence from the dense model."""

    def __init__(self) -> None:
        self.change, self.kl = Values(), Values()
        super().__init__({"change": self.change, "kl": self.kl})

    def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
        right, was = (one.prediction.argmax(1) == batch.targets for one in (output, dense))
        self.change.update(right.double() - was.double())
        self.kl.update(divergence(output.prediction, dense.prediction))

    def result(self) -> Mapping[str, Any]:
        change = self.change.each()
        error = change.std().item() / len(change) ** 0.5
        return {"change": change.mean().item(), "change_error": error, "kl": self.kl.compute().item()}


# ---- model and photos ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """The model, its photos, and what every table reads from the command line."""

    model: nn.Module
    name: str
    data: str
    chosen_on: str
    limit: int | None
    batch_size: int
    rounds: int
    only: Sequence[str] | None
    cuts: Sequence[float] = CUTS
    times: Path | None = None

    def photos(self, source: str) -> Any:
        """Photos as the model wants them."""
        found = load_images(source)
        found.transform = eval_transform(self.model)
        return found

    def images(self, count: int) -> Tensor:
        """``count`` photos (B, 3, H, W) of those that settings are chosen on."""
        first, _ = next(iter(batches(self.photos(self.chosen_on), count, limit=count)))
        return first

    def score(self, configs: Sequence[MethodConfig], seed: int = SEEDS[0]) -> dict[str, Row]:
        """Rows by method, dense first, in one pass over the photos."""
        dataset = self.photos(self.data)
        task = task_of(self.model, dataset)
        read = batches(dataset, self.batch_size, limit=self.limit)
        rows = run(self.model, configs, read, [*standard_probes(task), Paired()], task=task, seed=seed)
        return {row.method: row for row in rows}


def percent(seen: Sequence[Row], dense: Row) -> dict[str, Any]:
    """The cells of the tables for the rows of one method, one for every seed."""
    return {
        "top1": 100 * mean(row["top1"] for row in seen),
        "change": 100 * mean(row["change"] for row in seen),
        "error": 100 * mean(row["change_error"] for row in seen),
        "agreement": 100 * mean(row["agreement"] for row in seen),
        "kl": mean(row["kl"] for row in seen),
        "cosine": mean(row["cosine"] for row in seen),
        "macs_saved": 100 * (1 - sum(seen[0]["gmacs"].values()) / sum(dense["gmacs"].values())),
        "gmacs": sum(seen[0]["gmacs"].values()),
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def cuts(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per method and cut."""
    images = setup.images(MATCHING_IMAGES)
    rows: list[dict[str, Any]] = []
    for cut in setup.cuts:
        chosen = list(settings(setup.model, candidates(setup.only), images, cut).values())
        found = rows_of(setup, chosen)
        timed = {row["method"]: row for row in _timed(setup, chosen, images[:TIMED_IMAGES])} if setup.rounds else {}
        alike = {"cut": cut, "seeds": 1, "top1_range": 0.0}
        rows += [{**row, **alike, **_speed(timed.get(row["method"]))} for row in found]
        write(rows)  # after every cut: each takes many minutes
        print(f"{cut:.0%} fewer MACs\n\n{markdown(rows[-len(found) :])}\n", flush=True)
    return rows


def rows_of(setup: Setup, configs: Sequence[MethodConfig]) -> list[dict[str, Any]]:
    """A row for the dense model and every setting; the mean over seeds where a method draws."""
    drawn = [config for config in configs if config.name in RANDOM]
    scored = [setup.score(configs), *(setup.score(drawn, seed) for seed in SEEDS[1:] if drawn)]
    dense = scored[0]["dense"]
    names = ["dense", *(config.describe() for config in configs)]
    return [{"method": name, **percent([one[name] for one in scored if name in one], dense)} for name in names]


def _timed(setup: Setup, configs: Sequence[MethodConfig], images: Tensor) -> list[dict[str, Any]]:
    budget = Budget(setup.rounds, 0.0, max_rounds=setup.rounds, warmup_rounds=1)
    return measure(setup.model, {config.describe(): config for config in configs}, images, budget=budget)


def _speed(row: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if row is None else {key: row[key] for key in ("images_per_second", "speedup")}


def times(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per method and cut: the speed over the fastest dense engine, on the faster of two engines."""
    images, few = setup.images(MATCHING_IMAGES), setup.images(TIMED_IMAGES)
    budget = Budget(setup.rounds, 0.0, max_rounds=setup.rounds, warmup_rounds=1)
    every, _ = engines_named(["eager", "onnxruntime", "openvino"], list(PRECISIONS))
    dense = measure(setup.model, {}, few, engines=every, budget=budget, calibration=images)
    rows = [_time_of(row, 0.0) for row in dense]
    best = min(dense, key=lambda row: row["latency_ms"]["p50"])
    (fastest,) = (engine for engine in every if (engine.label, engine.precision) == (best["engine"], best["precision"]))
    print(f"fastest dense: {fastest}, {best['latency_ms']['p50']:.1f} ms per batch of {len(few)}", flush=True)
    engines = [fastest] if fastest.label == "eager" else [fastest, "eager"]
    for cut in setup.cuts:
        chosen = settings(setup.model, candidates(setup.only), images, cut)
        configs = {config.describe(): config for config in chosen.values()}
        found = measure(setup.model, configs, few, engines=engines, budget=budget, calibration=images)
        for name in configs:  # without a fixed graph a method runs on PyTorch alone
            rows.append(
                _time_of(max((row for row in found if row.method == name), key=lambda row: row["speedup"]), cut)
            )
        write(rows)
        print(f"timed a cut of {cut:.0%}", flush=True)
    return rows


def _time_of(row: Row, cut: float) -> dict[str, Any]:
    own = {key: row[key] for key in ("engine", "precision", "speedup", "speedup_q1", "speedup_q3")}
    return {"method": row.method, "cut": cut, **own, "ms": row["latency_ms"]["p50"]}


def speeds(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per method and speed that it reaches."""
    if setup.times is None:
        raise VitrimError("speeds needs the record of `times`: --times FILE")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in json.loads(setup.times.read_text())["rows"]:
        if row["method"] != "dense":
            curves.setdefault(row["method"].partition(":")[0], [(0.0, 1.0)]).append((row["cut"], row["speedup"]))
    images = setup.images(MATCHING_IMAGES)
    rows: list[dict[str, Any]] = []
    for speed in SPEEDS:
        chosen: dict[str, MethodConfig] = {}
        for name in candidates(setup.only):
            cut = at_speed(curves.get(name, [(0.0, 1.0)]), speed)
            if cut is not None:
                chosen |= settings(setup.model, [name], images, cut)
        found = rows_of(setup, list(chosen.values()))
        rows += [{**row, "speed": speed} for row in found]
        write(rows)
        print(f"{speed:g} times as fast as the fastest dense\n\n{markdown(found)}\n", flush=True)
    return rows


def schedules(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per schedule and method that can follow it."""
    images = setup.images(1)
    facts = host_of(setup.model).facts(setup.model)
    patches, blocks = facts.grid_size[0] * facts.grid_size[1], len(setup.model.blocks)
    rows: list[dict[str, Any]] = []
    for cut, (name, counts) in product(setup.cuts, SCHEDULES.items()):
        wanted = counts(patches, blocks, _strength(setup.model, images, counts, patches, blocks, cut))
        configs = [config for method in candidates(setup.only) for config in _following(setup.model, method, wanted)]
        found = [{**row, "method": row["method"].partition(":")[0]} for row in rows_of(setup, configs)]
        rows += [{**row, "cut": cut, "schedule": name, "patches": wanted} for row in found]
        write(rows)
        print(f"{name}, {cut:.0%}: {wanted}\n\n{markdown(found)}\n", flush=True)
    return rows


def every_block(patches: int, blocks: int, strength: float) -> list[int]:
    """The same number of patches fewer in every block after the first, where some methods cannot decide yet."""
    return [max(1, patches - round(strength * patches * block / (blocks - 1))) for block in range(blocks)]


def three_stages(patches: int, blocks: int, strength: float) -> list[int]:
    """The same share three times, a quarter of the depth apart."""
    keep = 1 - strength
    return [max(1, round(patches * keep ** (block * 4 // blocks))) for block in range(blocks)]


def same_share(patches: int, blocks: int, strength: float) -> list[int]:
    """The same share in every block after the first: most tokens go early."""
    return [max(1, round(patches * (1 - strength) ** block)) for block in range(blocks)]


SCHEDULES: dict[str, Callable[[int, int, float], list[int]]] = {
    "as many in every block": every_block,
    "three stages": three_stages,
    "the same share in every block": same_share,
}


def _strength(
    model: nn.Module, images: Tensor, counts: Callable[..., list[int]], patches: int, blocks: int, cut: float
) -> float:
    """The strength at which random pruning on this schedule makes the cut: MACs follow from the counts."""
    low, high = 0.0, 1.0
    dense = profile_of(model, None, images).macs.total
    for _ in range(12):
        middle = (low + high) / 2
        found = _following(model, "random", counts(patches, blocks, middle))
        share = profile_of(model, found[0], images).macs.total / dense if found else 0.0
        low, high = (middle, high) if share > 1 - cut else (low, middle)
    return low


def _following(model: nn.Module, method: str, counts: Sequence[int]) -> list[MethodConfig]:
    """The setting of ``method`` that leaves these numbers of patches after the blocks; none where it cannot."""
    facts = host_of(model).facts(model)
    before = [facts.grid_size[0] * facts.grid_size[1], *counts]
    steps = [(block, old, new) for block, (old, new) in enumerate(pairwise(before)) if new < old]
    blocks = tuple(block for block, _, _ in steps)
    fields = methods()[method].model_fields
    if "keep_rate" in fields and "blocks" in fields:
        given: dict[str, Any] = {"keep_rate": tuple(new / old for _, old, new in steps), "blocks": blocks}
    elif "r" in fields and "blocks" in fields:
        given = {"r": tuple(old - new for _, old, new in steps), "blocks": blocks}
    else:
        return []
    try:
        config = make_method(method, **given)
        left = profile_of(model, config, torch.zeros(1, *facts.input_size)).tokens_per_block
    except VitrimError as error:
        print(f"{method} cannot follow it: {error}", flush=True)
        return []
    off = max(abs(found - facts.num_prefix - asked) for found, asked in zip(left, counts, strict=True))
    if off > len(steps):
        print(f"{method} cannot follow it: {off:.0f} tokens off", flush=True)
        return []
    return [config]


def lossless(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per method: the largest cut at which a loss of one point is excluded."""
    return _largest(setup, write, lambda row: row["change"] - NORMAL * row["error"] > -100 * ONE_POINT)


def stress(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per method: the largest cut up to which top-1 does not fall by more than its standard error."""
    return _largest(setup, write, lambda row: row["change"] >= -row["error"])


def _largest(
    setup: Setup, write: Callable[[list[dict[str, Any]]], None], holds: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Rows of the largest of the cuts, mildest first, up to which it holds."""
    images = setup.images(MATCHING_IMAGES)
    alive, best = candidates(setup.only), dict[str, dict[str, Any]]()
    for cut in setup.cuts:
        chosen = settings(setup.model, alive, images, cut)
        if not chosen:
            break
        found = {row["method"].partition(":")[0]: row for row in rows_of(setup, list(chosen.values()))}
        alive = [name for name in chosen if holds(found[name])]
        best.update({name: found[name] for name in alive})
        write(list(best.values()))
        print(f"cut of {cut:.0%}: {', '.join(alive) or 'none'}", flush=True)
    return sorted(best.values(), key=lambda row: -float(row["macs_saved"]))


def published(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per printed setting of ATM: the change of top-1 that the paper prints, and the one on these photos."""
    if setup.name not in PRINTED_AS:
        raise VitrimError(f"Table A2 has {', '.join(PRINTED_AS)}, not {setup.name}")
    with TABLES_OF_ATM.open(newline="") as file:
        table = [row for row in csv.DictReader(file) if (row["table"], row["model"]) == ("A2", PRINTED_AS[setup.name])]
    plain, *printed = table
    configs = [
        make_method("atm", alpha=float(row["alpha"]), beta=float(row["beta"]), theta_min=float(row["theta_min"]))
        for row in printed
    ]
    dense, *found = rows_of(setup, configs)
    rows = [{**dense, "printed": 0.0, "printed_gmacs": float(plain["gflops"])}]
    for own, row in zip(found, printed, strict=True):
        change = float(row["top1"]) - float(plain["top1"])
        rows.append({**own, "printed": change, "printed_gmacs": float(row["gflops"])})
    return rows


def atm(setup: Setup, write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per setting of ATM, most MACs first."""
    values = product(*ATM_GRID.values())
    configs = [make_method("atm", **dict(zip(ATM_GRID, value, strict=True))) for value in values]
    return sorted(rows_of(setup, configs), key=lambda row: float(row["macs_saved"]))


TABLES = {
    "cuts": cuts,
    "times": times,
    "speeds": speeds,
    "lossless": lossless,
    "stress": stress,
    "schedules": schedules,
    "published": published,
    "atm": atm,
}


# ---- command line ----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="The methods on photographs, with published weights.")
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="of timm")
    parser.add_argument("--checkpoint", required=True, type=Path, help="weights of the model")
    parser.add_argument("--chosen-on", required=True, help="photographs to choose settings on, as for vitrim eval")
    parser.add_argument("--data", required=True, help="photographs to score them on once, likewise")
    parser.add_argument("--method", action="append", help="only these; may repeat")
    parser.add_argument(
        "--cut",
        type=float,
        action="append",
        help="e.g. 0.5; may repeat; default: 0.2 0.35 0.5 0.65, `schedules`: 0.4, `times`: steps of 0.1, `lossless`, "
        "`stress`: of 0.05",
    )
    parser.add_argument("--limit", type=int, help="so many images only, for a quick try")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds of `cuts` (0: no times) and `times`")
    parser.add_argument("--times", type=Path, help="of `speeds`: what `times` wrote")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--figure", type=Path, help="of `cuts`: the file to draw top-1 over MACs into")
    return parser.parse_args()


def main() -> None:
    """Make one of the tables."""
    arguments = parse_arguments()
    machine.set_threads(arguments.threads)
    warnings.simplefilter("ignore", ReductionWarning)  # late blocks run out of tokens at large cuts
    model = create_model(arguments.model, pretrained=False)
    load_checkpoint(model, arguments.checkpoint)
    others = {"schedules": (SCHEDULE_CUT,), "times": TIMED_CUTS, "lossless": STRESS_CUTS, "stress": STRESS_CUTS}
    usual = others.get(arguments.table, CUTS)
    setup = Setup(
        model.eval(),
        arguments.model,
        arguments.data,
        arguments.chosen_on,
        arguments.limit,
        arguments.batch_size,
        arguments.rounds,
        arguments.method,
        arguments.cut or usual,
        arguments.times,
    )

    def write(rows: Iterable[dict[str, Any]]) -> None:
        record = {"command": f"photographs {arguments.table}", "environment": machine.environment()}
        own = {"model": arguments.model, "limit": arguments.limit, "rows": list(rows)}
        write_json(arguments.json, {**record, **own})

    rows = TABLES[arguments.table](setup, write)
    write(rows)
    if arguments.table in ("lossless", "stress", "published", "times"):  # the others print every part when it is done
        print(markdown(rows))
    if arguments.table == "atm":
        print(sweep(rows))
    if arguments.figure is not None and arguments.table == "cuts":
        count = setup.limit or len(setup.photos(setup.data))
        title = f"{arguments.model}, without retraining: {count:,} held-out photographs (dashed: pruning)"
        figure(rows, arguments.figure, title)


if __name__ == "__main__":
    from_shell(main)
