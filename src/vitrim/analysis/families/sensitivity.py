"""Dependence of results on what should not matter: batch mates, their order, where the matching changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.subject import Subject
from vitrim.analysis.tables import Outcome, Table
from vitrim.core.method import MethodConfig
from vitrim.measure.probes import Agreement, MacsProbe, Probe, TaskMetrics
from vitrim.measure.records import Row

__all__ = ["sensitivity"]

IMAGES = 1024
SHUFFLES = 3
SPLITTING = "splitting_layer"
"""The option of a method that is a number of blocks, after which it matches in another way."""


def sensitivity(subject: Subject) -> Outcome:
    """Scores and MACs over batch sizes (ATM, Table A1) and orders of the images, for methods whose decisions depend on
    the batch, and over the blocks after which a method changes its matching (ATM, Table 3)."""
    outcome = Outcome(images=subject.count(IMAGES))
    dependent = [method for method in subject.methods if method.batch_dependent]
    if dependent:
        outcome.tables.append(_batch_sizes(subject, dependent))
        outcome.tables += _orders(subject, dependent)
    else:
        outcome.notes.append("batch sizes and orders skipped: they need a method whose decisions depend on the batch")
    changing = [method for method in subject.methods if SPLITTING in type(method).model_fields]
    if changing:
        outcome.tables.append(_depths(subject, changing))
    else:
        outcome.notes.append("splitting layers skipped: they need a method with one, such as atm")
    return outcome


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
    return [_numbers(row, subject.task.selects_by) for row in subject.rows(methods, probes, batches)[1:]]


def _numbers(row: Row, score: str) -> tuple[int, float, float, float]:
    return row["images"], float(row[score]), float(row["agreement"]), float(sum(row["gmacs"].values()))


def _batch_sizes(subject: Subject, methods: Sequence[MethodConfig]) -> Table:
    images = subject.count(IMAGES)
    rows = []
    for batch_size in sizes(images):
        for method, numbers in zip(methods, _measured(subject, methods, batch_size), strict=True):
            rows.append((method.describe(), batch_size, *numbers))
    columns = ("method", "batch_size", "images", *_scores(subject))
    return Table("batch_sizes", "Sensitivity to the batch size", columns, sorted(rows, key=lambda row: row[0]))


def sizes(images: int) -> list[int]:
    """The powers of two up to a number of images.

    Example:
        >>> sizes(12)
        [1, 2, 4, 8]
    """
    return [2**power for power in range(images.bit_length())]


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
