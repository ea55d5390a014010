"""Sensitivity to the other images in a batch, to their order, and to the splitting layer; all should be small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vitrim.analysis.family import FamilyResult, Tables, draws, line_panels
from vitrim.analysis.subject import Subject
from vitrim.core.method import MethodConfig
from vitrim.measure.probes import Agreement, MacsProbe, TaskMetrics
from vitrim.measure.records import Batch
from vitrim.report import Table
from vitrim.style import TEXT

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
        result.tables += _over_batches(subject)
    else:
        result.notes.append("batch sizes and orders skipped: they need a method whose decisions depend on the batch")
    if any(SPLITTING in type(method).model_fields for method in subject.methods):
        result.tables.append(_over_splitting_layers(subject))
    else:
        result.notes.append("splitting layers skipped: they need a method with one, such as atm")
    return result


def _over_batches(subject: Subject) -> list[Table]:
    """The numbers of batch-dependent methods over batch sizes and over orders, and their spread over the orders."""
    images, scores = len(subject.places(IMAGES)), _scores(subject)
    methods = [method for method in subject.methods if method.traits.batch_dependent]
    by_size = [
        (2**power, subject.batches(IMAGES, batch_size=2**power)) for power in range(min(images, LARGEST).bit_length())
    ]
    generators = (np.random.default_rng((subject.seed, shuffle)) for shuffle in range(SHUFFLES))
    shuffled = [subject.batches(IMAGES, order=generator.permutation(images)) for generator in generators]
    tables = []
    for name, title, column, runs in (
        ("batch_sizes", "Sensitivity to the batch size", "batch_size", by_size),
        ("orders", "Sensitivity to the order of the images", "shuffle", list(enumerate(shuffled))),
    ):
        rows: list[tuple[Any, ...]] = []
        for value, batches in runs:
            for method, numbers in zip(methods, _measured(subject, methods, batches), strict=True):
                rows.append((method.describe(), value, images, *numbers))
        rows.sort(key=lambda row: row[0])
        tables.append(Table(name, title, ("method", column, "images", *scores), rows))

    spread = []
    for method in methods:
        own = np.array([row[3:] for row in rows if row[0] == method.describe()])
        moments = np.stack([own.mean(0), own.std(0)], 1).ravel().tolist()
        spread.append((method.describe(), len(own), images, *moments))
    columns = ("method", "shuffles", "images", *(f"{name}{end}" for name in scores for end in ("", "_std")))
    return [*tables, Table("orders_spread", "Spread over the orders", columns, spread)]


def _over_splitting_layers(subject: Subject) -> Table:
    """The numbers of methods that change their matching after a block, for every block."""
    changing = [method for method in subject.methods if SPLITTING in type(method).model_fields]
    settings = [(method, depth) for method in changing for depth in range(subject.num_layers + 1)]
    configs = [method.changed(**{SPLITTING: depth}) for method, depth in settings]
    images, found = len(subject.places(IMAGES)), _measured(subject, configs, subject.batches(IMAGES))
    rows = [
        (method.describe(), SPLITTING, depth, images, *numbers)
        for (method, depth), numbers in zip(settings, found, strict=True)
    ]
    title = "Sensitivity to the block after which the matching changes"
    return Table("splitting_layers", title, ("method", "option", "blocks", "images", *_scores(subject)), rows)


def _scores(subject: Subject) -> tuple[str, str, str]:
    """The columns of the numbers by `_measured`."""
    return (subject.task.selects_by, "agreement", "gmacs")


def _measured(
    subject: Subject, methods: Sequence[MethodConfig], batches: Iterator[Batch]
) -> list[tuple[float, float, float]]:
    """Score, agreement and GMACs of each method."""
    task = subject.task
    measurement = subject.measurement(methods, [TaskMetrics(task), Agreement(task), MacsProbe()])
    measurement.follow(batches)
    return [
        (float(row[task.selects_by]), float(row["agreement"]), float(sum(row["gmacs"].values())))
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
    figure, axes = line_panels(tables, table, [(measure,) for measure in measures], over=over, label=label)
    for axis, measure in zip(axes, measures, strict=True):
        axis.set_title("GMACs" if measure == "gmacs" else measure, fontsize=TEXT)
    return figure, axes
