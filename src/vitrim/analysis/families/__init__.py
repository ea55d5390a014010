"""The families of an analysis. A new one is a file here, and a line in `FAMILIES` or `EXPERIMENTS`.

A family of `FAMILIES` turns records into tables; one of `EXPERIMENTS` runs the model once more. ``loss`` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vitrim.analysis.families.attention import attention
from vitrim.analysis.families.counts import counts
from vitrim.analysis.families.depth import depth
from vitrim.analysis.families.features import features
from vitrim.analysis.families.loss import class_tokens, loss
from vitrim.analysis.families.patterns import patterns
from vitrim.analysis.families.router import router
from vitrim.analysis.families.sensitivity import sensitivity
from vitrim.analysis.families.throughput import throughput
from vitrim.analysis.families.tsne import tsne
from vitrim.analysis.record import Record, titled
from vitrim.analysis.subject import Subject
from vitrim.analysis.tables import FEW, Outcome
from vitrim.errors import VitrimError, unknown

__all__ = ["EXPERIMENTS", "FAMILIES", "NAMES", "analyse", "check_stored", "chosen", "experiments", "together"]

FAMILIES: dict[str, Callable[[Sequence[Record]], Outcome]] = {
    "patterns": patterns,
    "depth": depth,
    "counts": counts,
    "features": features,
    "loss": class_tokens,
}
"""By name, in the order of a report."""

EXPERIMENTS: dict[str, Callable[[Subject], Outcome]] = {
    "loss": loss,
    "sensitivity": sensitivity,
    "attention": attention,
    "router": router,
    "tsne": tsne,
    "throughput": throughput,
}
"""By name: those that need a model and images. They run only where they are named: each is a pass of its own."""

NAMES = tuple(dict.fromkeys((*FAMILIES, *EXPERIMENTS)))
"""Of all families."""


def chosen(names: Sequence[str]) -> list[str]:
    """The families called ``names``; for none all of `FAMILIES`, for ``all`` the experiments, too.

    Raises:
        VitrimError: there is no such family.

    Example:
        >>> chosen(["depth"]), len(chosen([])), len(chosen(["all"]))
        (['depth'], 5, 10)
    """
    if list(names) == ["all"]:
        return list(NAMES)
    for name in names:
        if name not in NAMES:
            raise unknown("family", name, NAMES)
    return [name for name in NAMES if name in (names or FAMILIES)]


def check_stored(names: Sequence[str]) -> None:
    """Refuse families that records alone do not give.

    Raises:
        VitrimError: there is one among ``names``.
    """
    alone = [name for name in names if name not in FAMILIES]
    if alone:
        raise VitrimError(f"{alone[0]} runs the model, which stored records do not hold: give a model and --data")


def analyse(records: Sequence[Record], names: Sequence[str] = ()) -> dict[str, Outcome]:
    """The tables of every family of ``names`` that records give, all for none, over ``records``.

    A family that cannot be had of these records says so in a note if it was not asked for by name.

    Raises:
        VitrimError: an unknown family, one that was asked for and cannot be had, or a record twice.
    """
    found = {}
    records = titled(records)
    for name in chosen(names):
        if name not in FAMILIES:
            continue
        try:
            outcome = FAMILIES[name](records)
        except VitrimError as error:
            if names:
                raise
            outcome = Outcome(notes=[f"{name} skipped: {error}"])
        few = min(map(len, records), default=0)
        found[name] = _warned(name, outcome, few)
    return found


def experiments(subject: Subject, names: Sequence[str]) -> dict[str, Outcome]:
    """The tables of the families of ``names`` that run the model, none for none.

    Raises:
        VitrimError: an unknown family, or one that cannot be had of this model or these images.
    """
    wanted = [name for name in chosen(names) if name in EXPERIMENTS] if names else []
    found = {}
    for name in wanted:
        outcome = EXPERIMENTS[name](subject)
        found[name] = _warned(name, outcome, FEW if outcome.images is None else outcome.images)
    return found


def together(one: Mapping[str, Outcome], other: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """The outcomes of both, in the order of a report; of a family in both, one after the other."""
    found = {}
    for name in NAMES:
        parts = [outcomes[name] for outcomes in (one, other) if name in outcomes]
        if parts:
            tables = [table for part in parts for table in part.tables]
            notes = [note for part in parts for note in part.notes]
            arrays = {key: array for part in parts for key, array in part.arrays.items()}
            found[name] = Outcome(tables, notes, arrays, parts[-1].images)
    return found


def _warned(name: str, outcome: Outcome, images: int) -> Outcome:
    if outcome.tables and images < FEW:
        outcome.notes.append(f"{name}: estimated from {images} images, fewer than {FEW}")
    return outcome
