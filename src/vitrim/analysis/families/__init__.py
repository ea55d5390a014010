"""The families of an analysis: each turns records into tables. A new one is a file here, and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vitrim.analysis.families.counts import counts
from vitrim.analysis.families.depth import depth
from vitrim.analysis.families.features import features
from vitrim.analysis.families.patterns import patterns
from vitrim.analysis.record import Record, titled
from vitrim.analysis.tables import FEW, Outcome
from vitrim.errors import VitrimError, unknown

__all__ = ["FAMILIES", "analyse", "chosen"]

FAMILIES: dict[str, Callable[[Sequence[Record]], Outcome]] = {
    "patterns": patterns,
    "depth": depth,
    "counts": counts,
    "features": features,
}
"""By name, in the order of a report."""


def chosen(names: Sequence[str]) -> list[str]:
    """The families called ``names``, all for none.

    Raises:
        VitrimError: there is no such family.

    Example:
        >>> chosen(["depth"]), len(chosen([]))
        (['depth'], 4)
    """
    for name in names:
        if name not in FAMILIES:
            raise unknown("family", name, FAMILIES)
    return [name for name in FAMILIES if name in names or not names]


def analyse(records: Sequence[Record], names: Sequence[str] = ()) -> dict[str, Outcome]:
    """The tables of every family of ``names``, all for none, over ``records``.

    A family that cannot be had of these records says so in a note if it was not asked for by name.

    Raises:
        VitrimError: an unknown family, one that was asked for and cannot be had, or a record twice.
    """
    found = {}
    records = titled(records)
    for name in chosen(names):
        try:
            outcome = FAMILIES[name](records)
        except VitrimError as error:
            if names:
                raise
            outcome = Outcome(notes=[f"{name} skipped: {error}"])
        few = min(map(len, records), default=0)
        if outcome.tables and few < FEW:
            outcome.notes.append(f"{name}: estimated from {few} images, fewer than {FEW}")
        found[name] = outcome
    return found
