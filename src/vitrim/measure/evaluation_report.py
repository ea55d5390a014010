"""The report of an evaluation: its table, and the words on accuracy that other reports share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan, sqrt
from typing import Any

from vitrim.measure.inputs import EMBEDDING
from vitrim.measure.records import Row
from vitrim.measure.run import Findings
from vitrim.report import Report, Table
from vitrim.tasks import Task

NONE_CHANGED = ", or, where no answer turned right or wrong, the bound that it is below (at 95 %)"


def evaluation_report(
    model: str, task: Task, facts: Mapping[str, Any], findings: Findings, dataset: Any, problem: str | None
) -> Report:
    """The report of the findings so far; without rows before the first batch."""
    ended: dict[str, Any] = {"complete": True} if problem is None else {"complete": False, "error": problem}
    if not findings.rows:
        return Report("eval", {**facts, **ended})
    # scores by class are in the rows only, not in the table
    classes = findings.classes(dataset, task.num_classes)
    rows = [
        Row(row.method, {**row, **({"classes": scores} if scores else {})}, model=model)
        for row, scores in zip(findings.rows, classes, strict=True)
    ]
    seen, data = rows[0]["images"], facts["data"]
    if dataset is None:
        data = {**data, "images": seen}
        title = f"{model}: {seen} images"
    else:
        number = f"{seen} of {data['images']}" if seen < data["images"] else f"{seen}"
        title = f"{model} on {data['source']}: {number} images in batches of {data['batch_size']}"
    doubtful = [*doubts(facts, task, "agree and cosine still say", rows[0]), *facts["seen_in_training"]]
    facts = {**facts, "data": data, **ended, "doubts": doubtful}
    # notes needed to read the table
    error = f" ± its standard error on the same images{NONE_CHANGED}" if "loss_error" in rows[0] else ""
    tokens = "tokens left at the end, class token included"
    if "agreement" in rows[0]:
        agree = "" if task.name == EMBEDDING else f", agree ({task.agreement_means})"
        meaning = (
            f"metrics{agree} and MACs saved in %; change of {spelled(task.selects_by)} in "
            f"points{error}; cosine of what the head reads; {tokens}"
        )
    else:
        meaning = (
            f"metrics and MACs saved in %; {tokens}. What a file changes is not known without its dense model: give "
            "that first, by its name or as a file in fp32"
        )
    notes = [meaning, *doubtful, *matched(facts, task)]
    if "files" in facts:
        notes.append(facts["files"])
    if task.name == EMBEDDING:
        notes.append(
            f"embedding: {facts['embedding']}. Each image is a query, all others the database: recall@1 by the same "
            "model, recall@1 dense where the dense model made the database; knn: a vote of 20 neighbours; "
            "neighbours: of the nearest 10, those that the dense model finds"
        )
    return Report("eval", facts, rows, [_table(title, rows, task)], notes)


def matched(facts: Mapping[str, Any], task: Task) -> Iterator[str]:
    """Yield a note where the data's classes are some of the model's, found by name."""
    classes = facts["data"]["classes"]
    if task.places is not None and task.other_classes and classes != task.num_classes:
        yield f"the data's {classes} classes are {classes} of the model's {task.num_classes}, by their names"


def _table(title: str, rows: Sequence[Row], task: Task) -> Table:
    dense = rows[0]
    names, compared = list(dense), "agreement" in dense
    own = names[names.index("images") + 1 : names.index("agreement" if compared else "gmacs")]
    # Between the number of images and the comparison stand the task's own metrics.
    metrics = [name for name in task.shown or own if name in dense]
    full, main = sum(dense["gmacs"].values()), task.selects_by
    cells: list[dict[str, str]] = []
    for row in rows:
        total = sum(row["gmacs"].values())
        cell = {"method": row.method, **{spelled(metric): f"{100 * row[metric]:.2f}" for metric in metrics}}
        if compared:
            error = None if row is dense else row.get("loss_error")
            cell["change"] = change_cell(row[main] - dense[main], error, row["images"])
            if task.name != EMBEDDING:  # whose agreement is the cosine
                cell["agree"] = f"{100 * row['agreement']:.1f}"
            cell["cosine"] = "-" if isnan(row["cosine"]) else f"{row['cosine']:.4f}"
        cell["GMACs"] = f"{total:.2f}" if full >= 1 else f"{total:.4f}"
        cell["MACs saved"] = "-" if row["saved"] is None else f"{100 * row['saved']:.1f}"
        left = row["tokens_at_end"]
        cell["tokens"] = "-" if left is None else f"{left:.1f}".removesuffix(".0")
        cells.append(cell)
    return Table("eval", title, tuple(cells[0]), [tuple(each.values()) for each in cells])


def unseen(change: float, error: float | None, images: int) -> float | None:
    """The largest change, in points, compatible with n images of which none changed: 3/n, at 95 % (the rule of three).

    None if an image changed, or the error is unknown. ``change`` and ``error`` are shares from `PairedLoss` or
    `Neighbours`.

    Example:
        >>> unseen(0.0, 1 / 20, 20), unseen(0.0, 0.07, 20), unseen(-0.05, 1 / 20, 20)
        (15.0, None, None)
    """
    # if images change in both directions, the error exceeds one image's share
    return 300.0 / images if change == 0.0 and error == 1.0 / images else None


def change_cell(change: float, error: float | None, images: int) -> str:
    """A change of a share in points, with its standard error, or with the bound of `unseen` if no image changed.

    Example:
        >>> change_cell(-0.0123, 0.0041, 1000), change_cell(0.0, None, 20), change_cell(0.0, 1 / 20, 20)
        ('-1.23±0.41', '+0.00', '+0.00 (<15.00)')
    """
    most = unseen(change, error, images)
    if most is not None:
        return f"+0.00 (<{most:.2f})"
    return f"{100 * change:+.2f}" + ("" if error is None else f"±{100 * error:.2f}")


def doubts(facts: Mapping[str, Any], task: Task, still: str, dense: Mapping[str, Any] | None = None) -> list[str]:
    """Reasons why the accuracies may be meaningless, for a report's notes; other columns ``still`` show something."""
    found: list[str] = []
    random = facts["weights"] == "random"
    if random:
        found.append(
            "the model has random weights (neither pretrained nor of a checkpoint), so its accuracy is meaningless; "
            f"{still} how much the reduction changes"
        )
    if facts["untrained"]:
        found.append(
            f"{', '.join(facts['untrained'])}: with random parameters, as nothing was given that learned them; "
            "a checkpoint may be the folder of a run of `vitrim train`"
        )
    classes, known = facts["data"]["classes"], task.num_classes
    if classes not in (None, known) and task.places is None and task.name != EMBEDDING:
        found.append(
            f"the data has {classes} classes and the model {known}: accuracy is right only if every label is the "
            "index of the model's class"
        )
    chance = (
        None if random or dense is None or "top1" not in dense else at_chance(dense["top1"], dense["images"], known)
    )
    return found if chance is None else [*found, chance]


LEAST = 30
"""Fewest images on which a model can be seen to guess."""


def at_chance(top1: float, images: int, classes: int) -> str | None:
    """A sentence on a dense model that is right no more often than by chance; None if it is, or on too few images.

    Example:
        >>> at_chance(0.017, 1000, 1000), at_chance(0.0, 29, 10)
        (None, None)
    """
    # A guess is right with 1 / K, and with two standard errors more by luck (one time in forty).
    guess = 1.0 / classes
    if images < LEAST or top1 > guess + 2.0 * sqrt(guess * (1.0 - guess) / images):
        return None
    return (
        f"the dense model is right on {100 * top1:.1f} % of {images} images, as if by chance ({100 * guess:.1f} % of "
        f"{classes} classes): the labels may be of other classes than the model was trained on, or in another order, "
        "or the images be prepared in another way"
    )


def spelled(metric: str) -> str:
    """The display name of a metric: top-1 for top1."""
    return metric.replace("top", "top-").replace("recall", "recall@").replace("_", " ")
