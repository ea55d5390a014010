"""The summary at the top of an analysis: accuracy, cost and time of every record, and one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from vitrim.analysis.family import FamilyResult, TableRow, Tables, grouped
from vitrim.analysis.figures import Panel, draws, line_panels
from vitrim.analysis.record import Record
from vitrim.analysis.subject import Subject
from vitrim.core.registry import methods, parse_method
from vitrim.engines.copies import reduced_copy, shared_copy
from vitrim.errors import VitrimError
from vitrim.measure.evaluation_report import at_chance, change_cell, spelled
from vitrim.measure.latency import Budget, time_interleaved
from vitrim.report import DENSE, Table
from vitrim.style import TEXT, colours, markers, method_of

SCORE = 2
"""Index of the score column; its name is the metric, or "score" for models with different metrics."""
BUDGET = Budget(min_rounds=5, min_seconds=0.3, max_rounds=50)
"""Enough for a first impression; `vitrim bench` measures."""


def milliseconds(subject: Subject) -> dict[str, float]:
    """The median latency in ms of one image, timed in turn for the dense model and every method; empty if the model is
    not a classifier, where a prediction is more than one forward."""
    if subject.task.reads is not None or not len(subject.dataset):
        return {}
    like = next(subject.model.parameters())
    image, _ = default_collate([subject.dataset[0]])
    image = image.to(like.device, like.dtype)
    models = {
        DENSE: shared_copy(subject.model),
        **{one.describe(): reduced_copy(subject.model, one) for one in subject.methods},
    }
    with torch.inference_mode():
        times = time_interleaved({name: partial(one, image) for name, one in models.items()}, like.device, BUDGET)
    return {name: float(np.median(values)) for name, values in times.items()}


def summary(records: Sequence[Record]) -> FamilyResult:
    """A table of all records, compared with their dense models, and a sentence on the best.

    Records of several models or analyses are compared with their own dense model; ``gmacs`` and ``ms`` of the headers
    are shown if present.
    """
    metrics = {str(record.header.get("metric", "top1")) for record in records}
    score = f"{metrics.pop() if len(metrics) == 1 else 'score'} %"
    rows = []
    for record in records:
        dense = next((one for one in records if one.method == DENSE and _same(one, record)), None)
        rows.append(_row(record, dense, score))
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    title = "Accuracy, cost, and time of one image (a first look: vitrim bench measures it)"
    shown = tuple(name for name in names if name not in ("images", "gmacs", "curve"))
    result = FamilyResult(notes=[*sentences(rows), *_chances(records)])
    result.add("summary", title if "ms" in names else "Accuracy and cost", rows, shown)
    result.tables += by_data(records)
    return result


def _chances(records: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence for every dense model that guesses, but for those with random weights."""
    for record in records:
        right, logits = record.correct(), record.arrays.get("logits")
        if record.method != DENSE or right is None or logits is None or record.header.get("weights") == "random":
            continue
        found = at_chance(float(right.mean()), len(right), logits.shape[1])
        if found is not None:
            yield f"{record.name}: {found}"


def _same(one: Record, other: Record) -> bool:
    return all(one.header.get(key) == other.header.get(key) for key in ("model", "report"))


def scores(row: Mapping[str, Any], dense: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """The scores of an evaluation that a record's header stores, for tasks whose scores do not follow from its arrays.

    In percent, and in points against the dense model; for embeddings, ``agree`` is the share of common neighbours.
    ``row`` and ``dense`` are rows by `standard_probes`.
    """
    found = {
        "score": 100 * row[metric],
        "change": 100 * (row[metric] - dense[metric]),
        "agree": 100 * row.get("neighbours", row["agreement"]),
        "cosine": row["cosine"],
        "error": math.nan if row is dense else 100 * row.get("loss_error", math.nan),
    }
    return {"metric": metric, **{name: float(value) for name, value in found.items() if math.isfinite(value)}}


def _row(record: Record, dense: Record | None, score: str) -> TableRow:
    """The summary row of a record, compared with its dense model; ``score`` is the name of the column."""
    header = record.header
    row: TableRow = {"method": record.name, "images": len(record), score: score_of(record)}
    row |= {"change": header.get("change"), "error": header.get("error")}
    row |= {"agree %": header.get("agree"), "cosine": header.get("cosine")}
    if "metric" not in header and dense is not None and len(dense) == len(record):
        right, before, first, chosen = record.correct(), dense.correct(), record.first(), dense.first()
        if right is not None and before is not None:
            # Paired: the error of a difference on the same images, not of two accuracies.
            each = right.astype(float) - before
            row["change"] = 100 * float(each.mean())
            # Never 0: a change that no image shows is known to one image.
            error = max(float(each.std()) / math.sqrt(len(each)), 1 / len(each))
            row["error"] = None if record is dense else 100 * error
        if first is not None and chosen is not None:
            row["agree %"] = 100 * float((first == chosen).mean())
    macs, full = (one and one.header.get("gmacs") for one in (record, dense))
    time, slow = (one and one.header.get("ms") for one in (record, dense))
    row |= {"gmacs": macs, "MACs saved %": 100 * (1 - macs / full) if macs and full else None}
    row |= {"ms": time, "speed-up": slow / time if time and slow else None}
    tokens = record.arrays.get("num_tokens")
    row["tokens at end"] = None if tokens is None else float(tokens[:, -1].mean())
    return {**row, "curve": curve_of(record.method)}


def curve_of(method: str) -> str:
    """The name of the line that joins settings: a method, with the direction of its lists and the options that are 0.

    Example:
        >>> [curve_of(text) for text in ("tome:r=8", "tome:r=[8,7,6]", "tome:r=[6,7]", "atm:alpha=0.9,beta=0", "dense")]
        ['tome', 'tome, falling r', 'tome, rising r', 'atm, beta=0', 'dense']
    """
    if method == DENSE or method.partition(":")[0] not in methods():
        return method_of(method)
    config = parse_method(method)
    words = []
    for name in sorted(config.model_fields_set):
        value = getattr(config, name)
        if isinstance(value, tuple) and all(isinstance(one, int | float) for one in value):
            # The signs of the steps of a list: schedules of one direction make one curve.
            steps = {(b > a) - (b < a) for a, b in pairwise(value)} - {0}
            words.append({(): "even", (1,): "rising", (-1,): "falling"}.get(tuple(steps), "uneven") + f" {name}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and value == 0:
            words.append(f"{name}=0")
    return ", ".join([config.name, *words])


def rate_of(method: str) -> float | None:
    """The ``keep_rate`` in the text of a method; None without such an option."""
    if method.partition(":")[0] not in methods():
        return None
    rate = getattr(parse_method(method), "keep_rate", None)
    return rate if isinstance(rate, float) else None


PLACES = 3
"""Best, and worst, scores that a table by data marks."""


def by_data(records: Sequence[Record]) -> list[Table]:
    """A table of the scores of every method on every data set, with the three best and worst of each keep rate ("Which
    Tokens to Use?", Tables 2 and 6); empty for a single data set.

    A score is top-1 or, with several labels per image, the mean average precision, in percent. ``above_dense`` counts
    the data sets on which it exceeds the best dense model.
    """
    sources = list(dict.fromkeys(str(one.header.get("data")) for one in records))
    if len(sources) < 2:
        return []
    names = {source: Path(source.partition(":")[2] or source).stem or source for source in sources}
    names = names if len(set(names.values())) == len(names) else {source: source for source in sources}
    scores: dict[tuple[str, str], float] = {}
    for one in records:
        score = score_of(one)
        if score is not None:  # the baseline is the best of several dense models
            key = (one.method, str(one.header.get("data")))
            if key in scores and one.method != DENSE:
                raise VitrimError(f"two records of {one.method} on {key[1]}: a table of several data sets takes one")
            scores[key] = max(score, scores.get(key, score))
    methods_of = [one for one in dict.fromkeys(record.method for record in records) if one != DENSE]
    marks: dict[tuple[str, str], str] = {}
    for source, rate in product(sources, dict.fromkeys(map(rate_of, methods_of))):
        own = [one for one in methods_of if rate_of(one) == rate and (one, source) in scores]
        order = sorted(own, key=lambda one: -scores[one, source])
        # Best and worst never overlap.
        few = min(PLACES, len(order) // 2)
        marks |= {(one, source): f"best {place}" for place, one in enumerate(order[:few], 1)}
        marks |= {(one, source): f"worst {place}" for place, one in enumerate(order[::-1][:few], 1)}
    rows = []
    for method in (*((DENSE,) if any(one == DENSE for one, _ in scores) else ()), *methods_of):
        row: TableRow = {"method": method, "rate": rate_of(method)}
        for source in sources:
            row |= {names[source]: scores.get((method, source)), f"{names[source]}_place": marks.get((method, source))}
        above = sum(scores.get((method, one), 0) > scores.get((DENSE, one), math.inf) for one in sources)
        rows.append({**row, "above_dense": above})
    result = FamilyResult()
    result.add("by_data", "Scores by data, % (best and worst of each keep rate)", rows)
    return result.tables


def score_of(record: Record) -> float | None:
    """The score of a record in percent: that of its header, else top-1."""
    found, right = record.header.get("score"), record.correct()
    if found is not None:
        return float(found)
    return None if right is None else 100 * float(right.mean())


@draws("summary", "summary", "Accuracy over cost")
def draw_frontier(tables: Tables) -> Any:
    """The score over multiply-accumulates and, if time was measured, over images per second, one image at a time.
    Lines join the settings of one method over all models; schedules of different directions have separate lines."""
    score = tables["summary"].columns[SCORE]
    rows = [row for row in tables["summary"].records() if row[score] is not None]
    costs = {"gmacs": "GMACs", "ms": "images per second, one at a time"}
    shown = [name for name in costs if any(row[name] is not None for row in rows)]
    if len(rows) < 2 or not shown:
        return None
    rows = [{**row, "speed": 1000 / row["ms"] if row["ms"] else None} for row in rows]
    given = []
    for cost in shown:
        over = "speed" if cost == "ms" else cost
        given.append(Panel(score, grouped((row for row in rows if row[cost]), "curve"), "", over, costs[cost]))
    curves = list(grouped(rows, "curve"))
    figure, axes = line_panels(given, (colours(curves), markers(curves)), across=2)
    axes[0].set_ylabel(f"{spelled(score.removesuffix(' %'))}, %", fontsize=TEXT)
    return figure


def sentences(rows: Sequence[TableRow]) -> list[str]:
    """A sentence on the method that loses least; empty without methods or accuracy."""
    methods = [row for row in rows if row["error"] is not None]
    if not methods:
        return []
    best = max(methods, key=lambda row: (row["change"], row["MACs saved %"] or 0.0))
    lead, metric = " loses least" if len(methods) > 1 else "", spelled(list(best)[SCORE].removesuffix(" %"))
    parts = [f"{metric} {change_cell(best['change'] / 100, best['error'] / 100, best['images'])} points"]
    if best["MACs saved %"] is not None:
        parts.append(f"{best['MACs saved %']:.1f} % of the MACs saved")
    if best["speed-up"] is not None:
        parts.append(f"{best['speed-up']:.2f} times as fast as dense here")
    return [f"{best['method']}{lead}: {', '.join(parts)}"]
