"""Finished analyses beside each other: across data sets, and all their pairs of records in one correlation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vitrim.analysis.families.counts import counts
from vitrim.analysis.families.depth import depth
from vitrim.analysis.families.features import pooled
from vitrim.analysis.record import Record, titled
from vitrim.analysis.tables import FEW, Outcome
from vitrim.errors import VitrimError

__all__ = ["compare"]

ACROSS: Mapping[str, Callable[[Sequence[Record]], Outcome]] = {"depth": depth, "counts": counts}
"""Families that compare means, and so take records of different images."""
POOLED = "features"


def compare(analyses: Sequence[Sequence[Record]], names: Sequence[str] = ()) -> dict[str, Outcome]:
    """Tables over the records of several analyses, which may be of different images.

    Maps of depth and counts are compared for all records; distances of features within each analysis, and their rank
    correlation with the difference in accuracy over the pairs of all of them.

    Args:
        analyses: records of each, see `vitrim.analysis.output.read_report`.
        names: of families; all that compare analyses for none.

    Raises:
        VitrimError: fewer than two analyses, a family that compares image by image, or one that was asked for and
            cannot be had.
    """
    valid = (*ACROSS, POOLED)
    wrong = next((name for name in names if name not in valid), None)
    if wrong is not None:
        raise VitrimError(
            f"{wrong} needs records of the same images, which --from takes; analyses are compared by {', '.join(valid)}"
        )
    if len(analyses) < 2:
        raise VitrimError(f"a comparison needs two finished analyses or more, got {len(analyses)}")
    every = titled([record for analysis in analyses for record in analysis])
    left = iter(every)
    groups = [[next(left) for _ in analysis] for analysis in analyses]
    found: dict[str, Outcome] = {}
    for name in (name for name in valid if name in names or not names):
        try:
            found[name] = pooled(groups) if name == POOLED else ACROSS[name](every)
        except VitrimError as error:
            if names:
                raise
            found[name] = Outcome(notes=[f"{name} skipped: {error}"])
        few = min(map(len, every))
        if found[name].tables and few < FEW:
            found[name].notes.append(f"{name}: estimated from {few} images, fewer than {FEW}")
    return found
