"""Sensitivity: how results depend on what should not matter: batch mates, their order, where the matching changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.family import FamilyResult, Tables, draws, line_panels
from vitrim.analysis.subject import Subject
from vitrim.core.method import MethodConfig
from vitrim.measure.probes import Agreement, MacsProbe, TaskMetrics
from vitrim.plots.style import TEXT
from vitrim.report import Table

IMAGES = 1024
SHUFFLES = 3
SPLITTING = "splitting_layer"
"""The option of a method that is a number of blocks, after which it matches in another way."""


def sensitivity(subject: Subject) -> FamilyResult:
    """Scores and MACs over batch sizes (ATM, Table A1) and orders of the images, for methods whose decisions depend on
    the batch, and over the blocks after which a method changes its matching (ATM, Table 3)."""
    images = len(subject.places(IMAGES))
    result = FamilyResult(images=images)
    scores = (subject.task.selects_by, "agreement", "gmacs")
    dependent = [method for method in subject.methods if method.batch_dependent]
    if dependent:
        rows: list[tuple[Any, ...]] = []
        for batch_size in (2**power for power in range(images.bit_length())):
            for method, numbers in zip(dependent, _measured(subject, dependent, batch_size), strict=True):
                rows.append((method.describe(), batch_size, images, *numbers))
        rows.sort(key=lambda row: row[0])
        sizes = ("method", "batch_size", "images", *scores)
        result.tables.append(Table("batch_sizes", "Sensitivity to the batch size", sizes, rows))

        rows = []
        for shuffle in range(SHUFFLES):
            order = np.random.default_rng((subject.seed, shuffle)).permutation(images)
            for method, numbers in zip(dependent, _measured(subject, dependent, order=order), strict=True):
                rows.append((method.describe(), shuffle, images, *numbers))
        rows.sort(key=lambda row: row[0])
        orders = ("method", "shuffle", "images", *scores)
        result.tables.append(Table("orders", "Sensitivity to the order of the images", orders, rows))

        spread: list[tuple[Any, ...]] = []
        for method in dependent:
            own = np.array([row[3:] for row in rows if row[0] == method.describe()])
            moments = np.stack([own.mean(0), own.std(0)], 1).ravel().tolist()
            spread.append((method.describe(), len(own), images, *moments))
        both = ("method", "shuffles", "images", *(f"{name}{end}" for name in scores for end in ("", "_std")))
        result.tables.append(Table("orders_spread", "Spread over the orders", both, spread))
    else:
        result.notes.append("batch sizes and orders skipped: they need a method whose decisions depend on the batch")

    changing = [method for method in subject.methods if SPLITTING in type(method).model_fields]
    if changing:
        settings = [(method, depth) for method in changing for depth in range(subject.num_layers + 1)]
        found = _measured(subject, [method.changed(**{SPLITTING: depth}) for method, depth in settings])
        rows = [
            (method.describe(), SPLITTING, depth, images, *numbers)
            for (method, depth), numbers in zip(settings, found, strict=True)
        ]
        title = "Sensitivity to the block after which the matching changes"
        result.tables.append(Table("splitting_layers", title, ("method", "option", "blocks", "images", *scores), rows))
    else:
        result.notes.append("splitting layers skipped: they need a method with one, such as atm")
    return result


def _measured(
    subject: Subject,
    methods: Sequence[MethodConfig],
    batch_size: int | None = None,
    order: NDArray[np.int64] | None = None,
) -> list[tuple[float, float, float]]:
    """Score, agreement and 10^9 MACs of each method."""
    task = subject.task
    measurement = subject.measurement(methods, [TaskMetrics(task), Agreement(task), MacsProbe()])
    measurement.follow(subject.batches(IMAGES, batch_size=batch_size, order=order))
    return [
        (float(row[task.selects_by]), float(row["agreement"]), float(sum(row["gmacs"].values())))
        for row in measurement.rows()[1:]
    ]


# ---- figures ---------------------------------------------------------------------------------------------------------


@draws("sensitivity", "batch_sizes", "Sensitivity to the batch size")
def draw_batch_sizes(tables: Tables) -> Any:
    """Lines over the batch size: score, agreement with the dense model, and 10^9 multiply-accumulates per image, of
    methods that decide by the whole batch."""
    figure, axes = _over(tables, "batch_sizes", "batch_size", "images per batch")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
    return figure


@draws("sensitivity", "splitting_layers", "Sensitivity to the splitting layer")
def draw_splitting_layers(tables: Tables) -> Any:
    """Lines over the block after which the method decides in another way: score, agreement with the dense model,
    and 10^9 multiply-accumulates per image."""
    return _over(tables, "splitting_layers", "blocks", "splitting layer")[0]


def _over(tables: Tables, table: str, over: str, label: str) -> tuple[Any, list[Any]]:
    """A panel per measure, which are the columns behind the number of images."""
    columns = tables[table].columns
    measures = columns[columns.index("images") + 1 :]
    figure, axes = line_panels(tables, table, [(measure,) for measure in measures], over=over, label=label)
    for axis, measure in zip(axes, measures, strict=True):
        axis.set_title("GMACs" if measure == "gmacs" else measure, fontsize=TEXT)
    return figure, axes
