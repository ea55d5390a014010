"""The report of `compare`: rows, table, notes and words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from vitrim.engines.engine import Engine
from vitrim.measure.comparison_figure import draw
from vitrim.measure.evaluation_report import NONE_CHANGED, change_cell, doubts, matched, spelled, unseen
from vitrim.measure.records import Row
from vitrim.measure.speed_report import bounds, doubt, ms_per_image, named, shows_only_cost, unrest
from vitrim.measure.timing import WHOLE
from vitrim.report import DENSE, Report, Table
from vitrim.tasks import Task


@dataclass
class Comparison(Report):
    """The findings of `compare`: a row per method, dense first, and ``words``, a sentence per method and batch size."""

    words: list[str] = field(default_factory=list)

    def fill(
        self, model: str, task: Task, scores: Sequence[tuple[Row, Engine | None]], timed: Sequence[Sequence[Row]]
    ) -> None:
        """Fill in rows, tables, notes and words from ``scores``, without an engine in fp32, and ``timed`` batches."""
        exact, metric = {row.method: row for row, engine in scores if engine is None}, task.selects_by
        dense = exact[DENSE]
        self.rows = rows = []
        for row, engine in scores:
            label, precision = (None, "fp32") if engine is None else (engine.label, engine.precision)
            # columns that do not depend on the precision come from fp32
            # The row's own columns win; fp32 gives those that it has not measured itself.
            whole = {"precision": precision, "engine": label, **exact[row.method], **row}
            speeds = list(_speeds(whole, timed))
            if timed and not speeds:
                continue  # fp32 is the reference of the loss only, and was not timed
            rows.append(
                {
                    "model": model,
                    **whole,
                    "loss": dense[metric] - whole[metric],
                    "loss_error": whole.get("loss_error"),
                    "speeds": speeds,
                }
            )
        self.facts["doubts"] = doubts(self.facts, task, "agree still says", dense)
        self.tables = [_table(self, metric)]
        self.notes = [*_notes(self.facts, rows, task), *self.facts["seen_in_training"]]
        self.words = list(in_words(rows, metric))

    @property
    def figure(self) -> Any:
        """A matplotlib figure of loss over time, with a panel per batch size."""
        return draw(self.rows, self.facts["metric"], self.tables[0].title)

    @property
    def record(self) -> dict[str, Any]:
        return {"command": self.command, **self.facts, "words": self.words, "rows": [dict(row) for row in self.rows]}

    def parts(self) -> Iterator[Any]:
        yield from super().parts()
        yield from self.words

    def _repr_html_(self) -> str:
        return super()._repr_html_() + "".join(f"<p>{escape(line)}</p>" for line in self.words)


def _speeds(row: Mapping[str, Any], timed: Sequence[Sequence[Row]]) -> Iterator[dict[str, Any]]:
    """Yield, for every batch size, the timings of a row: on its engine, or on the fastest one."""
    for setting in timed:
        own = [
            one
            for one in setting
            # A row in fp32 has no engine of its own: any engine may run it, and the fastest counts.
            if one.method == row["method"] and one["precision"] == row["precision"]
            if row["engine"] in (None, one["engine"]) and one.get("part", WHOLE) == WHOLE
        ]
        if own:
            yield dict(max(own, key=lambda one: one["speedup"]))


def _table(report: Comparison, metric: str) -> Table:
    data = report.facts["data"]
    title = f"{report.rows[0]['model']} on {data['source']}: {data['images']} images"
    several = len({speed["engine"] for row in report.rows for speed in row["speeds"]}) > 1  # name the fastest in fp32
    cells = []
    for row in report.rows:
        error = None if row is report.rows[0] else row["loss_error"]
        texts = {
            "method": named(row),
            spelled(metric): f"{100 * row[metric]:.2f}",
            "change": change_cell(0.0 - row["loss"], error, row["images"]),
            "agree": f"{100 * row['agreement']:.1f}",
            "MACs saved": f"{100 * row['saved']:.1f}",
        }
        for speed in row["speeds"]:
            texts[f"ms at {speed['batch_size']}"] = f"{ms_per_image(speed):.2f}"
            texts[f"speed-up at {speed['batch_size']}"] = _speed_cell(speed, several and row["engine"] is None)
        cells.append(texts)
    return Table("compare", title, tuple(cells[0]), [tuple(each.values()) for each in cells])


def _speed_cell(speed: Mapping[str, Any], several: bool) -> str:
    median, q1, q3 = (f"{speed[key]:.2f}" for key in ("speedup", "speedup_q1", "speedup_q3"))
    quartiles = "" if q1 == q3 else f" ({q1}-{q3})"
    return f"{median}{quartiles}" + (f" {speed['engine']}" if several else "")


def _notes(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], task: Task) -> Iterator[str]:
    yield (
        f"{spelled(task.selects_by)}, agree ({task.agreement_means}) and MACs saved in %; change in points"
        f"{'' if rows[0]['loss_error'] is None else f' ± its standard error{NONE_CHANGED}'}; ms per "
        "image, the median; speed-up over the fastest dense model at the same batch size, with its quartiles"
    )
    speeds = rows[0]["speeds"]
    if speeds:
        kernels = ", ".join(
            f"{one['dense_kernel']} attention on {one['dense_engine']} in {one['dense_precision']} at batch "
            f"{one['batch_size']}"
            for one in speeds
        )
        yield f"dense is {kernels}, timed on {facts['timed_on']}; threads: {facts['environment']['threads']}"
    for name, schedule in facts.get("frozen", {}).items():
        yield f"{schedule} is the schedule of {name}: its mean counts, in multiples of 16 tokens where they can be"
    yield from [facts["files"]] if "files" in facts else []
    yield from facts["lacking"]
    yield from facts["doubts"]
    yield from matched(facts, task)


def in_words(rows: Sequence[Mapping[str, Any]], metric: str) -> Iterator[str]:
    """Yield a sentence per method, and a line per batch size; a method is dominated as `dominates` says.

    Example:
        >>> def row(method, loss, median):
        ...     speed = {"speedup": median, "speedup_q1": median - 0.02, "speedup_q3": median + 0.02}
        ...     own = {"method": method, "precision": "fp32", "engine": None, "loss": loss, "loss_error": 0.001}
        ...     return {**own, "images": 99, "speeds": [{"batch_size": 8, **speed}]}
        >>> found = [row("dense", 0.0, 1.0), row("tome:r=8", 0.003, 1.21), row("evit", 0.009, 1.15)]
        >>> print("\\n".join(in_words(found, "top1")))
        tome:r=8 loses 0.30 points of top-1 (standard error 0.10): at batch 8 1.21x as fast as dense, and nothing here \
is clearly better
        evit loses 0.90 points of top-1 (standard error 0.10): at batch 8 1.15x as fast as dense, dominated by \
tome:r=8 (1.21x, loses 0.30)
        least loss for the time at batch 8: tome:r=8 (1.21x, loses 0.30)
    """
    # Rows that show vitrim's own cost are no methods to choose.
    own = [row for row in rows if not shows_only_cost(row["method"])]
    sizes = [speed["batch_size"] for speed in rows[0]["speeds"]]
    if not sizes:
        return
    best: dict[int, list[Mapping[str, Any]]] = {size: [] for size in sizes}
    # Dense itself in several precisions: then each of its rows is judged like a method.
    every = [row for row in own if row["method"] == DENSE]
    for row in own if len(every) > 1 else own[1:]:
        texts = []
        for place, size in enumerate(sizes):
            speed, better = row["speeds"][place], [other for other in own if dominates(other, row, place)]
            text = f"at batch {size} {speed['speedup']:.2f}x as fast as dense"
            if "new_speedup" in speed and row["method"] not in (DENSE,):
                text += f" ({speed['new_speedup']:.2f}x on new images)"
            if row in every:
                texts.append(f"at batch {size} {speed['speedup']:.2f}x the speed of the fastest dense")
                best[size] += [] if better else [row]
            # No gain at all goes before everything else: what does not pay is not to be weighed against others.
            elif any(dense in better for dense in every):
                texts.append(f"at batch {size} it does not pay: {speed['speedup']:.2f}x the speed of dense")
            elif better:
                winner = min(better, key=lambda other: (other["loss"], -other["speeds"][place]["speedup"]))
                texts.append(f"{text}, dominated by {named(winner)} ({_in_short(winner, place)})")
            # The lower quartile is not above dense: a faster median may be chance.
            elif bounds(speed)[0] <= 1.0 and len(every) == 1:
                texts.append(f"{text}, no clear gain: {doubt(speed)}")
            else:
                best[size].append(row)
                texts.append(f"{text}, and nothing here is clearly better")
        error = "" if row["loss_error"] is None else f" (standard error {100 * row['loss_error']:.2f})"
        if (most := unseen(row["loss"], row["loss_error"], row["images"])) is not None:
            error = f" (none of {row['images']} images changed: below {most:.2f}, at 95 %)"
        yield f"{named(row)} {_change(row)} points of {spelled(metric)}{error}: {'; '.join(texts)}"
    for place, size in enumerate(sizes):
        timed = [{"method": row["method"], **row["speeds"][place]} for row in own]
        yield from (f"at batch {size} {line}" for line in unrest(timed))
        order = sorted((row for row in best[size] if row not in every), key=lambda row: row["loss"])
        texts = [f"{named(row)} ({_in_short(row, place)})" for row in order]
        yield f"least loss for the time at batch {size}: {', '.join(texts) or 'dense; no method here pays'}"


def dominates(other: Mapping[str, Any], row: Mapping[str, Any], place: int) -> bool:
    """True if ``other`` is at least as good in time and loss at one batch size, and clearly better in one."""
    if other is row:
        return False
    speed, own = other["speeds"][place], row["speeds"][place]
    if speed["speedup"] < own["speedup"] or other["loss"] > row["loss"]:
        return False
    # Clearly: quartiles of the speed do not overlap, or the losses differ by more than both errors together.
    noise = math.hypot(other["loss_error"] or 0.0, row["loss_error"] or 0.0)
    return bool(speed["speedup_q1"] > own["speedup_q3"] or row["loss"] - other["loss"] > noise)


def _change(row: Mapping[str, Any]) -> str:
    points = f"{100 * abs(row['loss']):.2f}"
    return f"{'gains' if row['loss'] < 0 and float(points) else 'loses'} {points}"


def _in_short(row: Mapping[str, Any], place: int) -> str:
    return f"{row['speeds'][place]['speedup']:.2f}x, {_change(row)}"
