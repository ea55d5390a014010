"""The information that blocks lose: reduced one at a time, by their class tokens, and by errors of merging."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrim.analysis.loss import cosine_distance, merging_error, spread_in_groups
from vitrim.analysis.record import Record
from vitrim.analysis.subject import Subject
from vitrim.analysis.tables import Outcome, Table, named, summary
from vitrim.analysis.watch import Decision, Watch
from vitrim.core.method import MethodConfig
from vitrim.core.plan import plan
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.probes import are_logits, divergence
from vitrim.measure.records import Batch

__all__ = ["class_tokens", "loss"]

IMAGES = 256
THRESHOLDS = (0.80, 0.85, 0.90, 0.95)
SHARES = (0.125, 0.25, 0.375, 0.5)

TOKENS = ("method", "block", "images", *named("cosine"))


def class_tokens(records: Sequence[Record]) -> Outcome:
    """Cosine of the class token to the dense model's after every block (MCTF, Table B), from records."""
    rows = []
    for record in records:
        if record.header["kind"] == "none" or "cosine" not in record.arrays:
            continue
        for block, numbers in enumerate(summary(record.arrays["cosine"])):
            rows.append((record.name, block, len(record), *numbers))
    if not rows:
        return Outcome(notes=["cosines of class tokens skipped: they need a method, and a model with a class token"])
    return Outcome([Table("class_tokens", "Cosine of the class token to the dense model's", TOKENS, rows)])


def loss(subject: Subject) -> Outcome:
    """The cost of merging or pruning in one block alone (ATM, Figure 2), and the error of merging in every block."""
    outcome = Outcome(images=subject.count(IMAGES))
    _alone(subject, outcome)
    _merging(subject, outcome)
    return outcome


# ---- one block at a time ---------------------------------------------------------------------------------------------

ALONE = ("method", "setting", "value", "block", "images", *named("cosine_distance"), *named("kl_nats"))
ALONE_SHOWN = (*ALONE[:4], "cosine_distance", "kl_nats", "kl_nats_low", "kl_nats_high")
OVERALL = ("method", "setting", "block", "cosine_distance", "kl_nats")


def _alone(subject: Subject, outcome: Outcome) -> None:
    """Add the tables of one block at a time, one row per method, amount and block, and their means over amounts."""
    rows: list[tuple[object, ...]] = []
    for method in subject.methods:
        rows += _alone_under(subject, method, outcome.notes)
    if not rows:
        return
    title = "One block reduced alone: distance of what the head reads, and of the predictions"
    outcome.tables.append(Table("loss_alone", title, ALONE, rows, ALONE_SHOWN))
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    distance, kl = ALONE.index("cosine_distance"), ALONE.index("kl_nats")
    for row in rows:
        groups[row[0], row[1], row[3]].append((float(str(row[distance])), float(str(row[kl]))))
    means = [(*key, *np.mean(numbers, axis=0).tolist()) for key, numbers in groups.items()]
    outcome.tables.append(Table("loss_alone_mean", "The same, mean of all values", OVERALL, means))


def _alone_under(subject: Subject, method: MethodConfig, notes: list[str]) -> list[tuple[object, ...]]:
    name, tunable = method.describe(), method.tunable
    if not method.training_free:
        notes.append(f"{name} is left out of one block at a time: what it learned belongs to its own blocks")
        return []
    if tunable is None or tunable.per_layer is None:
        notes.append(f"{name} is left out of one block at a time: it takes no amount for each block")
        return []
    patches, num_layers = int(np.prod(subject.facts.grid_size)), subject.num_layers
    settings: list[tuple[float, int, MethodConfig]] = []
    for amount in THRESHOLDS if tunable.similarity else SHARES:
        value = amount if tunable.similarity else tunable.removing(amount, patches)
        for depth in range(num_layers):
            config = tunable.alone(method, depth, value, num_layers)
            problem = "it does not act there" if config is None else _problem(config, subject)
            if config is not None and problem is None:
                settings.append((amount, depth, config))
            elif amount in (THRESHOLDS[0], SHARES[0]):
                notes.append(f"{name} alone in block {depth} is left out: {problem}")
    models = subject.contestants([config for *_, config in settings])
    damages = {place: _Damage() for place in range(1, len(models))}
    subject.follow(models, {place: damage.see for place, damage in damages.items()}, subject.batches(IMAGES))
    kind = "threshold" if tunable.similarity else "share removed"
    return [
        (name, kind, amount, depth, damage.images, *(number for numbers in damage.summary() for number in numbers))
        for (amount, depth, _), damage in zip(settings, damages.values(), strict=True)
    ]


def _problem(config: MethodConfig, subject: Subject) -> str | None:
    """The reason why the model cannot carry a config, None if there is none."""
    try:
        plan(config, subject.facts, subject.num_layers)
    except VitrimError as error:
        return str(error)
    return None


class _Damage:
    """Distances to the dense model of every image."""

    def __init__(self) -> None:
        self.found: list[NDArray[Any]] = []

    @property
    def images(self) -> int:
        return sum(map(len, self.found))

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        distance = kl = np.full(len(batch), np.nan)
        if output.feature is not None and dense.feature is not None and output.feature.shape == dense.feature.shape:
            pair = (feature.detach().double().cpu().flatten(1).numpy() for feature in (output.feature, dense.feature))
            distance = cosine_distance(*pair)
        if are_logits(output.prediction):
            kl = divergence(output.prediction, dense.prediction).cpu().numpy()
        self.found.append(np.stack([distance, kl], 1))

    def summary(self) -> list[tuple[float, float, float, float]]:
        return summary(np.concatenate(self.found))


# ---- errors of merging -----------------------------------------------------------------------------------------------

ERRORS = ("method", "block", "images", "merged", *named("error"), "error_least", "error_most", "squared_distance")
ERRORS_SHOWN = (*ERRORS[:5], "error_least", "error_most", "squared_distance")


def _merging(subject: Subject, outcome: Outcome) -> None:
    """Add the table of ATM's merging errors, for methods that merge."""
    merging = [method for method in subject.methods if method.kind in ("merge", "mixed")]
    if not merging:
        outcome.notes.append("errors of merging skipped: they need a method that merges tokens into means")
        return
    models = subject.contestants(merging)
    errors = {place: _Errors(models[place]) for place in range(1, len(models))}
    subject.follow(models, {place: error.see for place, error in errors.items()}, subject.batches(IMAGES))
    rows = [row for error in errors.values() for row in error.rows()]
    if rows:
        title = "Errors of merging, summed over the groups of an image, and the range of Theorem 1"
        outcome.tables.append(Table("merging_error", title, ERRORS, rows, ERRORS_SHOWN))


class _Errors:
    """The merging errors of one model, image by image."""

    def __init__(self, contestant: Contestant) -> None:
        assert contestant.reduction is not None
        self.name, self.watch = contestant.name, Watch(contestant.reduction)
        self.found: dict[int, list[NDArray[np.float64]]] = defaultdict(list)

    def see(self, batch: Batch, output: Output, dense: Output) -> None:
        for decision in self.watch.take():
            if decision.assignment is None or (decision.assignment.moved is not None and decision.assignment.normalise):
                self.found[decision.depth].append(_of_decision(decision))

    def rows(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        for depth, parts in sorted(self.found.items()):
            numbers = np.concatenate(parts)
            merged, _, least, most, squared = numbers.mean(0).tolist()
            rows.append((self.name, depth, len(numbers), merged, *summary(numbers[:, 1:2])[0], least, most, squared))
        return rows


def _of_decision(decision: Decision) -> NDArray[np.float64]:
    """(B, 5): tokens that joined another, error, its least and most value, squared distance."""
    p, target = decision.state.num_prefix, decision.target()
    real = torch.ones_like(target, dtype=torch.bool) if decision.state.mask is None else decision.state.mask
    groups = torch.where(real, target, -1)[:, p:].cpu().numpy()
    tokens = decision.x[:, p:].detach().double().cpu().numpy()
    sizes = decision.state.size[:, p:].double().cpu().numpy()
    merged = decision.x if decision.assignment is None else decision.assignment.pool(decision.x, decision.state.size)
    joined = [int((row >= 0).sum()) - len(np.unique(row[row >= 0])) for row in groups]
    squared = spread_in_groups(tokens, sizes, groups, merged.detach().double().cpu().numpy())
    return np.stack([np.array(joined, np.float64), *merging_error(tokens, sizes, groups), squared], 1)
