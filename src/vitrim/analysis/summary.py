"""The summary that an analysis begins with: accuracy, cost and time of every record, and one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.data import default_collate

from vitrim.analysis.family import FamilyResult
from vitrim.analysis.record import Record
from vitrim.analysis.subject import Subject
from vitrim.core.method import MethodConfig
from vitrim.measure.copies import reduced_copy, shared_copy
from vitrim.measure.latency import Budget, time_interleaved
from vitrim.measure.records import DENSE
from vitrim.report import Table

COLUMNS = (
    *("method", "images", "top1 %", "change", "error", "agree %", "gmacs", "MACs_saved %", "ms", "speed-up"),
    "tokens_at_end",
)
BUDGET = Budget(min_rounds=5, min_seconds=0.3, max_rounds=50)
"""Of a time that only shows the direction; `vitrim bench` measures."""


def milliseconds(subject: Subject, methods: Sequence[MethodConfig]) -> dict[str, float]:
    """The median time of a forward of one image, in turn for the dense model and every method; empty where the model
    is no classifier, whose forward is more than one call."""
    if subject.task.reads is not None or not len(subject.dataset):
        return {}
    like = next(subject.model.parameters())
    image, _ = default_collate([subject.dataset[0]])
    image = image.to(like.device, like.dtype)
    models = {
        DENSE: shared_copy(subject.model),
        **{one.describe(): reduced_copy(subject.model, one) for one in methods},
    }
    with torch.inference_mode():
        times = time_interleaved({name: partial(one, image) for name, one in models.items()}, like.device, BUDGET)
    return {name: float(np.median(values)) for name, values in times.items()}


def summary(records: Sequence[Record]) -> FamilyResult:
    """A table of all records, the dense model of each before its methods, and the sentence that it comes to.

    Args:
        records: ``gmacs`` and ``ms`` of their headers are shown where they are there.
    """
    rows = []
    for record in records:
        dense = next((one for one in records if one.method == DENSE and _same(one, record)), None)
        rows.append(_row(record, dense))
    names = [name for place, name in enumerate(COLUMNS) if any(row[place] is not None for row in rows)]
    title = "Accuracy, cost, and time of one image (a first look: vitrim bench measures it)"
    shown = tuple(name for name in names if name not in ("images", "gmacs"))
    table = Table("summary", title if "ms" in names else "Accuracy and cost", COLUMNS, rows, shown)
    return FamilyResult([table], sentences(table))


def _same(one: Record, other: Record) -> bool:
    return all(one.header.get(key) == other.header.get(key) for key in ("model", "report"))


def _row(record: Record, dense: Record | None) -> tuple[object, ...]:
    """The numbers of a record, against those of its dense model."""
    right, first = record.correct(), record.first()
    change = error = agree = None
    if dense is not None and len(dense) == len(record):
        before, chosen = dense.correct(), dense.first()
        if right is not None and before is not None:
            each = right.astype(float) - before
            change = 100 * float(each.mean())
            error = None if record is dense else 100 * max(float(each.std()) / math.sqrt(len(each)), 1 / len(each))
        if first is not None and chosen is not None:
            agree = 100 * float((first == chosen).mean())
    macs, full = record.header.get("gmacs"), None if dense is None else dense.header.get("gmacs")
    time, slow = record.header.get("ms"), None if dense is None else dense.header.get("ms")
    return (
        *(record.name, len(record), None if right is None else 100 * float(right.mean()), change, error, agree),
        *(macs, None if not macs or not full else 100 * (1 - macs / full)),
        *(time, None if not time or not slow else slow / time),
        float(record.arrays["num_tokens"][:, -1].mean()) if "num_tokens" in record.arrays else None,
    )


def sentences(table: Table) -> list[str]:
    """The method that loses least, in one sentence; none where there is no method, or no accuracy.

    Example:
        >>> one = ("tome:r=8", 100, 80.0, -0.5, 0.7, 97.0, 1.0, 20.0, 8.0, 1.2, 101.0)
        >>> sentences(Table("summary", "", COLUMNS, [one]))
        ['tome:r=8: top-1 -0.50±0.70 points, 20.0 % of the MACs saved, 1.20 times as fast as dense here']
    """
    methods = [row for row in table.records() if row["error"] is not None]
    if not methods:
        return []
    best = max(methods, key=lambda row: (row["change"], row["MACs_saved %"] or 0.0))
    lead = " loses least" if len(methods) > 1 else ""
    parts = [f"top-1 {best['change']:+.2f}±{best['error']:.2f} points"]
    if best["MACs_saved %"] is not None:
        parts.append(f"{best['MACs_saved %']:.1f} % of the MACs saved")
    if best["speed-up"] is not None:
        parts.append(f"{best['speed-up']:.2f} times as fast as dense here")
    return [f"{best['method']}{lead}: {', '.join(parts)}"]
