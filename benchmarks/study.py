"""The study of "Which Tokens to Use?" on models at hand: one command per part, each of which goes on where it stopped.

    python benchmarks/study.py methods --data CIFAR --split test --out study/cifar10
    python benchmarks/study.py methods --data PHOTOS --model vit_tiny_patch16_224 --checkpoint WEIGHTS \\
        --out study/photos
    python benchmarks/study.py data --model vit_tiny_patch16_224 --checkpoint WEIGHTS --data photos=PHOTOS \\
        --data cifar10=CIFAR --split cifar10=test --data camvid=CAMVID --task camvid=segmentation --out study/data
    python benchmarks/study.py capacity --model run:runs/small --model vitrim:cifar10_vit --data CIFAR --split test \\
        --out study/capacity
    python benchmarks/study.py proxies --data CIFAR --json study/proxies.json --figure study/proxies.png

`methods`: every method that needs no training and can keep a share of the patches at three blocks, at four keep rates:
accuracy, patterns across rates, rank correlations of likeness to an anchor with accuracy, and for each rate the report
of `vitrim analyze` over all methods. `data`: averaged maps of depth of one model on several data sets; labels are not
read. `capacity`: patterns of the same setting in several models of one grid and depth. `proxies`: likeness to the dense
model against accuracy at equal MACs, see study_proxies.py.

The first three keep a record per method and rate in `--out`, and read those that are there instead of running the model
again. Tables are in `tables/`, figures in `figures/`, and `study.md` has the tables as Markdown.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

import study_proxies
from script import from_shell
from study_records import RATES, Shelf, images_of, names_of
from study_tables import (
    accuracy,
    across_data,
    across_models,
    across_rates,
    anchored,
    draw_accuracy,
    draw_maps,
    means,
    write_parts,
    write_reports,
)
from vitrim.analysis.record import Record
from vitrim.errors import ReductionWarning, VitrimError
from vitrim.loading import create_model
from vitrim.measure import machine

REFERENCE = "vitrim:cifar10_vit"


def methods(given: argparse.Namespace) -> None:
    """All methods on one data set."""
    model, records = gathered(given, given.models[0], given.data[0], given.out / "records")
    tables = [accuracy(records), *across_rates(records), anchored(records)]
    write_parts(given.out, tables, {"accuracy": draw_accuracy(tables[0])})
    found = {
        "environment": machine.environment(seed=0),
        "models": [{"model": model, "weights": str(given.checkpoint or "its own"), "model_options": {}}],
        "data": {"source": given.data[0], "split": given.split.get(""), "images": len(records[0])}
        | {"batch_size": given.batch_size},
    }
    write_reports(given.out, records, given.report or given.rate, found)


def data(given: argparse.Namespace) -> None:
    """One model on several data sets, told apart by the names in front of their paths."""
    groups: dict[str, Sequence[Record]] = {}
    for text in given.data:
        name, equals, source = text.partition("=")
        if not equals:
            raise VitrimError(f"a data set of this part has a name, as in photos=PATH; got '{text}'")
        _, groups[name] = gathered(given, given.models[0], source, given.out / "records" / name, name)
    if len(groups) < 2:
        raise VitrimError("give two data sets or more")
    table = across_data(groups)
    short = [means(table, ("compared", "rate", "method_a")), means(table, ("compared", "rate"))]
    pairs = means(table, ("compared", "rate", "data_a", "data_b"))
    figures = {f"maps_{rate}": draw_maps(groups, rate) for rate in given.rate}
    write_parts(given.out, [*short, pairs, table], figures)


def capacity(given: argparse.Namespace) -> None:
    """Several models on one data set."""
    groups = {}
    for name in given.models:
        _, groups[name] = gathered(
            given, name, given.data[0], given.out / "records" / Path(name).name.replace(":", "_")
        )
    if len(groups) < 2:
        raise VitrimError("give two models or more")
    write_parts(given.out, [*across_models(groups), *map(accuracy, groups.values())], {})


def gathered(
    given: argparse.Namespace, name: str, source: str, folder: Path, key: str = ""
) -> tuple[str, list[Record]]:
    """The records of one model on one data set, whose ``key`` tells its options apart."""
    model = create_model(name, checkpoint=given.checkpoint)
    task, split = given.task.get(key), given.split.get(key)
    header = {"model": name, "data": key or source}
    shelf = Shelf(folder, header, images_of(source, task, split), given.limit, given.batch_size, labelled=not key)
    return name, shelf.gather(model, names_of(given.method), given.rate)


def named(texts: Sequence[str] | None) -> dict[str, str]:
    """Values by the name of their data set; one without a name is under the empty one.

    Example:
        >>> named(["test", "camvid=val"])
        {'': 'test', 'camvid': 'val'}
    """
    pairs = (text.rpartition("=") for text in texts or ())
    return {name: value for name, _, value in pairs}


PARTS = {"methods": methods, "data": data, "capacity": capacity}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one part."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["proxies"]:
        study_proxies.main(words[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "proxies"])
    parser.add_argument(
        "--data", action="append", required=True, help="as for vitrim eval; of `data` NAME=PATH, repeated"
    )
    parser.add_argument("--split", action="append", help="of the data; of `data` NAME=SPLIT; may repeat")
    parser.add_argument("--task", action="append", help="of `data`: NAME=segmentation or NAME=detection; may repeat")
    parser.add_argument("--model", dest="models", action="append", help=f"default: {REFERENCE}; `capacity`: repeated")
    parser.add_argument("--checkpoint", type=Path, help="weights of the model")
    parser.add_argument("--method", action="append", help="only these; may repeat")
    parser.add_argument("--rate", type=float, action="append", help="keep rate; may repeat; default: all four")
    parser.add_argument("--report", type=float, action="append", help="`methods`: reports of these rates; default: all")
    parser.add_argument("--limit", type=int, help="so many images, spread evenly; default: all")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="folder of records, tables and figures")
    given = parser.parse_args(words)
    given.models, given.rate = given.models or [REFERENCE], given.rate or list(RATES)
    given.split, given.task = named(given.split), named(given.task)
    machine.set_threads(given.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", ReductionWarning)  # merging cannot halve more than once in a block
    PARTS[given.part](given)


if __name__ == "__main__":
    from_shell(main)
