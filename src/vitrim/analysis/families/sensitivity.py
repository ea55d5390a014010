"""Sensitivity to the other images in a batch, to their order, and to the splitting layer; all should be small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np

from vitrim.analysis.family import FamilyResult, TableRow, Tables, grouped
from vitrim.analysis.figures import Panel, draws, line_panels, styles
from vitrim.analysis.subject import Subject
from vitrim.core.method import MethodConfig
from vitrim.measure.probes import Agreement, MacsProbe, TaskMetrics
from vitrim.measure.records import Batch

IMAGES = 8192
LARGEST = 1024
"""The largest batch of the paper's table; smaller data sets stop at one batch of all images."""
SHUFFLES = 3
SPLITTING = "splitting_layer"
"""The option, a number of blocks, after which a method changes its matching."""


def sensitivity(subject: Subject) -> FamilyResult:
    """Scores and MACs over batch sizes (ATM, Table A1) and orders of the images for batch-dependent methods, and over
    the splitting layer for methods that have one (ATM, Table 3)."""
    result = FamilyResult(images=len(subject.places(IMAGES)))
    if any(method.traits.batch_dependent for method in subject.methods):
        _over_batches(subject, result)
    else:
        result.notes.append("batch sizes and orders skipped: they need a method whose decisions depend on the batch")
    if any(SPLITTING in type(method).model_fields for method in subject.methods):
        _over_splitting_layers(subject, result)
    else:
        result.notes.append("splitting layers skipped: they need a method with one, such as atm")
    return result


def _over_batches(subject: Subject, result: FamilyResult) -> None:
    """Add the numbers of batch-dependent methods over batch sizes and over orders, and their spread over the orders."""
    images = len(subject.places(IMAGES))
    methods = [method for method in subject.methods if method.traits.batch_dependent]
    sizes = [2**power for power in range(min(images, LARGEST).bit_length())]
    # Each shuffle has its own stream, so that more of them leave the first ones as they are.
    generators = [np.random.default_rng((subject.seed, shuffle)) for shuffle in range(SHUFFLES)]
    by_size = ((size, subject.batches(IMAGES, batch_size=size)) for size in sizes)
    shuffled = (subject.batches(IMAGES, order=generator.permutation(images)) for generator in generators)
    for name, title, column, runs in (
        ("batch_sizes", "Sensitivity to the batch size", "batch_size", by_size),
        ("orders", "Sensitivity to the order of the images", "shuffle", enumerate(shuffled)),
    ):
        rows = [
            {"method": method.describe(), column: value, "images": images, **numbers}
            for value, batches in runs
            for method, numbers in zip(methods, _measured(subject, methods, batches), strict=True)
        ]
        rows.sort(key=itemgetter("method"))
        result.add(name, title, rows)

    spread = list[TableRow]()
    for method, own in grouped(rows, "method").items():
        row: TableRow = {"method": method, "shuffles": len(own), "images": images}
        for score in list(own[0])[len(row) :]:
            values = [one[score] for one in own]
            row |= {score: float(np.mean(values)), f"{score}_std": float(np.std(values))}
        spread.append(row)
    result.add("orders_spread", "Spread over the orders", spread)


def _over_splitting_layers(subject: Subject, result: FamilyResult) -> None:
    """Add the numbers of methods that change their matching after a block, for every block."""
    changing = [method for method in subject.methods if SPLITTING in type(method).model_fields]
    settings = list(product(changing, range(subject.num_layers + 1)))
    configs = [method.changed(**{SPLITTING: depth}) for method, depth in settings]
    every = zip(settings, _measured(subject, configs, subject.batches(IMAGES)), strict=True)
    images = len(subject.places(IMAGES))
    rows = [
        {"method": method.describe(), "option": SPLITTING, "blocks": depth, "images": images, **numbers}
        for (method, depth), numbers in every
    ]
    result.add("splitting_layers", "Sensitivity to the block after which the matching changes", rows)


def _measured(subject: Subject, methods: Sequence[MethodConfig], batches: Iterator[Batch]) -> list[dict[str, float]]:
    """Score, agreement and GMACs of each method."""
    task = subject.task
    measurement = subject.measurement(methods, [TaskMetrics(task), Agreement(task), MacsProbe()])
    measurement.follow(batches)
    scores = (task.selects_by, "agreement")
    return [
        {**{name: float(row[name]) for name in scores}, "gmacs": float(sum(row["gmacs"].values()))}
        for row in measurement.rows()[1:]
    ]


# ---- figures ---------------------------------------------------------------------------------------------------------


@draws("sensitivity", "batch_sizes", "Sensitivity to the batch size")
def draw_batch_sizes(tables: Tables) -> Any:
    """Lines over the batch size: score, agreement with the dense model, and 10^9 multiply-accumulates per image, of
    methods whose decisions depend on the batch."""
    figure, axes = _over(tables, "batch_sizes", "batch_size", "images per batch")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    return figure


@draws("sensitivity", "splitting_layers", "Sensitivity to the splitting layer")
def draw_splitting_layers(tables: Tables) -> Any:
    """Lines over the block after which the method changes its matching: score, agreement with the dense model, and 10^9
    multiply-accumulates per image."""
    return _over(tables, "splitting_layers", "blocks", "splitting layer")[0]


def _over(tables: Tables, table: str, over: str, label: str) -> tuple[Any, list[Any]]:
    """A panel per measure; measures are the columns after the number of images."""
    columns = tables[table].columns
    measures = columns[columns.index("images") + 1 :]
    rows, titles = grouped(tables[table].records(), "method"), {"gmacs": "GMACs"}
    given = [Panel(measure, rows, titles.get(measure, measure), over, label) for measure in measures]
    return line_panels(given, styles(tables))
