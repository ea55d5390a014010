"""Sensitivity: how results depend on what should not matter: batch mates, their order, where the matching changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.family import FamilyResult, Tables, draws, lines, names_of
from vitrim.analysis.subject import Subject
from vitrim.core.method import MethodConfig
from vitrim.measure.probes import Agreement, MacsProbe, Probe, TaskMetrics
from vitrim.plots.style import TEXT, below, panels
from vitrim.report import Table

IMAGES = 1024
SHUFFLES = 3
SPLITTING = "splitting_layer"
"""The option of a method that is a number of blocks, after which it matches in another way."""


def sensitivity(subject: Subject) -> FamilyResult:
    """Scores and MACs over batch sizes (ATM, Table A1) and orders of the images, for methods whose decisions depend on
    the batch, and over the blocks after which a method changes its matching (ATM, Table 3)."""
    result = FamilyResult(images=subject.count(IMAGES))
    dependent = [method for method in subject.methods if method.batch_dependent]
    if dependent:
        result.tables.append(_batch_sizes(subject, dependent))
        result.tables += _orders(subject, dependent)
    else:
        result.notes.append("batch sizes and orders skipped: they need a method whose decisions depend on the batch")
    changing = [method for method in subject.methods if SPLITTING in type(method).model_fields]
    if changing:
        result.tables.append(_depths(subject, changing))
    else:
        result.notes.append("splitting layers skipped: they need a method with one, such as atm")
    return result


def _scores(subject: Subject) -> tuple[str, ...]:
    return (subject.task.selects_by, "agreement", "gmacs")


def _measured(
    subject: Subject,
    methods: Sequence[MethodConfig],
    batch_size: int | None = None,
    order: NDArray[np.int64] | None = None,
) -> list[tuple[int, float, float, float]]:
    """Images, score, agreement and 10^9 MACs of each method."""
    probes: list[Probe] = [TaskMetrics(subject.task), Agreement(subject.task), MacsProbe()]
    batches = subject.batches(IMAGES, batch_size=batch_size, order=order)
    return [
        (row["images"], float(row[subject.task.selects_by]), float(row["agreement"]), float(sum(row["gmacs"].values())))
        for row in subject.rows(methods, probes, batches)[1:]
    ]


def _batch_sizes(subject: Subject, methods: Sequence[MethodConfig]) -> Table:
    images = subject.count(IMAGES)
    rows = []
    for batch_size in (2**power for power in range(images.bit_length())):
        for method, numbers in zip(methods, _measured(subject, methods, batch_size), strict=True):
            rows.append((method.describe(), batch_size, *numbers))
    columns = ("method", "batch_size", "images", *_scores(subject))
    return Table("batch_sizes", "Sensitivity to the batch size", columns, sorted(rows, key=lambda row: row[0]))


def _orders(subject: Subject, methods: Sequence[MethodConfig]) -> list[Table]:
    """Each shuffle, and the spread over them."""
    images = subject.count(IMAGES)
    rows = []
    for shuffle in range(SHUFFLES):
        order = np.random.default_rng((subject.seed, shuffle)).permutation(images)
        for method, numbers in zip(methods, _measured(subject, methods, order=order), strict=True):
            rows.append((method.describe(), shuffle, *numbers))
    columns = ("method", "shuffle", "images", *_scores(subject))
    rows.sort(key=lambda row: row[0])
    spread = []
    for method in methods:
        own = np.array([row[3:] for row in rows if row[0] == method.describe()])
        moments = zip(own.mean(0).tolist(), own.std(0).tolist(), strict=True)
        spread.append((method.describe(), len(own), images, *(number for pair in moments for number in pair)))
    both = tuple(f"{name}{end}" for name in _scores(subject) for end in ("", "_std"))
    return [
        Table("orders", "Sensitivity to the order of the images", columns, rows),
        Table("orders_spread", "Spread over the orders", ("method", "shuffles", "images", *both), spread),
    ]


def _depths(subject: Subject, methods: Sequence[MethodConfig]) -> Table:
    """Every value from 0 to the number of blocks."""
    settings = [
        (method, depth, method.changed(**{SPLITTING: depth}))
        for method in methods
        for depth in range(subject.num_layers + 1)
    ]
    found = _measured(subject, [config for *_, config in settings])
    rows = [
        (method.describe(), SPLITTING, depth, *numbers)
        for (method, depth, _), numbers in zip(settings, found, strict=True)
    ]
    columns = ("method", "option", "blocks", "images", *_scores(subject))
    return Table("splitting_layers", "Sensitivity to the block after which the matching changes", columns, rows)


# ---- figures ---------------------------------------------------------------------------------------------------------


@draws(
    "sensitivity",
    "batch_sizes",
    title="Sensitivity to the batch size",
    alt="Lines over the batch size: score, agreement with the dense model, and 10^9 multiply-accumulates per image, of "
    "methods that decide by the whole batch.",
)
def draw_batch_sizes(tables: Tables) -> Any:
    """Score, agreement and MACs over the batch size."""
    figure, axes = _over(tables, "batch_sizes", "batch_size", "images per batch")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    return figure


@draws(
    "sensitivity",
    "splitting_layers",
    title="Sensitivity to the splitting layer",
    alt="Lines over the block after which the method decides in another way: score, agreement with the dense model, "
    "and 10^9 multiply-accumulates per image.",
)
def draw_splitting_layers(tables: Tables) -> Any:
    """Score, agreement and MACs over the splitting layer."""
    return _over(tables, "splitting_layers", "blocks", "splitting layer")[0]


def _over(tables: Tables, table: str, over: str, label: str) -> tuple[Any, list[Any]]:
    """A panel per measure, which are the columns behind the number of images."""
    columns = tables[table].columns
    measures = columns[columns.index("images") + 1 :]
    names = names_of({table: tables[table]})
    figure, axes = panels(len(measures), across=3, size=(2.9, 2.3), above=0.2 + 0.2 * -(-len(names) // 3))
    handles: list[Any] = []
    for axis, measure in zip(axes, measures, strict=True):
        handles = lines(axis, tables, table, (over, measure), label)
        axis.set_title("GMACs" if measure == "gmacs" else measure, fontsize=TEXT)
    below(figure, handles)
    return figure, axes
