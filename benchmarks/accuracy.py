"""Every method at equal MACs, and at equal time.

    python benchmarks/accuracy.py cuts vit_tiny_patch16_224 --checkpoint WEIGHTS \\
        --chosen-on PHOTOS --data HELD_OUT --cut 0.2 0.35 0.5
    python benchmarks/accuracy.py cuts vitrim:cifar10_vit --chosen-on CIFAR:train --data CIFAR:test
    python benchmarks/accuracy.py at-speed compare.json --batch-size 8

`cuts` sets one option of every method that needs no training so that the MACs fall by each cut. It chooses on 64 images
of ``--chosen-on`` and scores on ``--data``, as `vitrim eval` does. A method that misses a cut by more than 3 % of the
MACs is left out of it. The largest cut without a loss is read from the table: give finer cuts.

`at-speed` reads the record of `vitrim compare --json` over several settings of each method, and interpolates each
method's loss at equal speed-ups over the fastest dense model.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import vitrim
from script import Row, at_share, from_shell, table, write_json
from vitrim.core.registry import methods
from vitrim.data import batches, eval_transform, load_images
from vitrim.engines.macs import profile_of

CUTS = (0.2, 0.35, 0.5, 0.65)
SPEEDS = (1.1, 1.25, 1.5, 2.0)
CHOSEN_ON = 64
REACHED = 0.03
"""A cut is reached if the MACs are within this share of the dense model's."""


def cuts(given: argparse.Namespace) -> None:
    """Print and keep the table of `vitrim eval` for each cut."""
    model = vitrim.ModelSpec(given.model, checkpoint=given.checkpoint).load().model.eval()
    source, _, split = given.chosen_on.partition(":")
    photos = load_images(source, split=split or None)
    photos.transform = eval_transform(model)
    images, _ = next(iter(batches(photos, CHOSEN_ON, limit=CHOSEN_ON)))
    dense = profile_of(model, None, images).macs.total
    free = [name for name, kind in methods().items() if kind.traits.training_free and name != "none"]
    source, _, split = given.data.partition(":")
    data = vitrim.ScoredData(source, split=split or None, limit=given.limit, batch_size=given.batch_size)
    reports = {}
    for cut in given.cut:
        chosen = [at_share(model, name, images, 1 - cut) for name in given.method or free]
        saved = [1 - profile_of(model, config, images).macs.total / dense for config in chosen]
        reached = [config for config, share in zip(chosen, saved, strict=True) if abs(share - cut) <= REACHED]
        report = vitrim.evaluate(model, reached, data, seed=given.seed)
        reports[f"{cut:g}"] = report.record
        write_json(given.json, {"command": "cuts", "cuts": reports})  # after every cut: each takes many minutes
        print(f"{cut:.0%} fewer MACs\n{report}\n", flush=True)


def at_speed(given: argparse.Namespace) -> None:
    """Print the loss of every method at each speed-up."""
    rows = json.loads(given.record.read_text())["rows"]
    settings: dict[str, list[Row]] = {}
    for row in rows:
        timed = next((speed for speed in row["speeds"] if speed["batch_size"] == given.batch_size), None)
        if timed is not None and row["method"] != "dense":
            setting = {"loss": row["loss"], "error": row["loss_error"], "speedup": timed["speedup"]}
            settings.setdefault(row["method"].partition(":")[0], []).append(setting)
    cells = ((f"`{name}`", *(loss_at(timed, speed) for speed in SPEEDS)) for name, timed in settings.items())
    print(table(["method", *(f"{speed:g} times" for speed in SPEEDS)], cells))


def loss_at(settings: Sequence[Mapping[str, Any]], speed: float) -> str:
    """The change of top-1 in points at a speed-up, with its standard error, on the line between two timed settings.

    A star marks the loss of the mildest setting, if that is already faster; a dash, that no setting is as fast.

    Example:
        >>> mild, strong = ({"loss": loss, "error": 0.01, "speedup": fast} for loss, fast in ((0.01, 1.2), (0.03, 1.4)))
        >>> [loss_at([strong, mild], speed) for speed in (1.1, 1.3, 1.5)]
        ['-1.0 ± 1.0 *', '-2.0 ± 1.0', '-']
    """
    order = sorted(settings, key=lambda setting: setting["loss"])
    if order[0]["speedup"] >= speed:
        return f"{-100 * order[0]['loss']:+.1f} ± {100 * order[0]['error']:.1f} *"
    for mild, strong in pairwise(order):
        if mild["speedup"] <= speed <= strong["speedup"]:
            part = (speed - mild["speedup"]) / (strong["speedup"] - mild["speedup"])
            loss, error = (mild[key] + part * (strong[key] - mild[key]) for key in ("loss", "error"))
            return f"{-100 * loss:+.1f} ± {100 * error:.1f}"
    return "-"


def main(given: Sequence[str] | None = None) -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    cut = parts.add_parser("cuts")
    cut.set_defaults(run=cuts)
    cut.add_argument("model")
    cut.add_argument("--checkpoint")
    cut.add_argument("--chosen-on", required=True, metavar="SOURCE[:SPLIT]")
    cut.add_argument("--data", required=True, metavar="SOURCE[:SPLIT]")
    cut.add_argument("--cut", nargs="+", type=float, default=CUTS)
    cut.add_argument("--method", nargs="+", help="default: all that need no training")
    cut.add_argument("--limit", type=int)
    cut.add_argument("--batch-size", type=int, default=20)
    cut.add_argument("--seed", type=int, default=0, help="of methods that draw")
    cut.add_argument("--json", type=Path)
    speed = parts.add_parser("at-speed")
    speed.set_defaults(run=at_speed)
    speed.add_argument("record", type=Path)
    speed.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args(given)
    warnings.simplefilter("ignore", vitrim.ReductionWarning)  # late blocks run out of tokens at large cuts
    options.run(options)


if __name__ == "__main__":
    from_shell(main)
