"""The families of an analysis. A new family is a file in this folder and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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
from vitrim.analysis.family import NAMES, FamilyResult
from vitrim.analysis.record import Record, titled
from vitrim.analysis.subject import Subject
from vitrim.errors import VitrimError, check_known
from vitrim.report import Table

FEW = 30
"""Fewest images without a warning."""


class Family(NamedTuple):
    """One family: its title in a report, and the functions that make its tables.

    Attributes:
        of_records: makes tables from the records of one pass; None if the family needs more than records hold.
        of_model: makes tables from the model and images in a pass of its own; runs only if the family is named.
    """

    title: str
    of_records: Callable[[Sequence[Record]], FamilyResult] | None = None
    of_model: Callable[[Subject], FamilyResult] | None = None


FAMILIES: dict[str, Family] = {
    "patterns": Family("Patterns: which patches stay, which are merged", patterns),
    "depth": Family("Depth: how far patches get", depth),
    "counts": Family("Counts: tokens per block", counts),
    "features": Family("Features: how far they move, and what that tells", features),
    "loss": Family("Loss: what each block costs", class_tokens, loss),
    "sensitivity": Family("Sensitivity: batches, order, splitting layer", of_model=sensitivity),
    "attention": Family("Attention: one step ahead against precise", of_model=attention),
    "router": Family("Router: what patches are ranked by", of_model=router),
    "tsne": Family("t-SNE: pruned tokens before the head", of_model=tsne),
    "throughput": Family("Throughput: images per second", of_model=throughput),
}
"""All families by name, in the order of a report."""

DEFAULT = tuple(name for name, family in FAMILIES.items() if family.of_records is not None)
"""Families that one pass over the images provides."""


def chosen(only: str | Sequence[str] | None, sizes: Sequence[int] = (), blocks: Sequence[int] = ()) -> list[str]:
    """The requested families, in the order of a report; an empty list for None.

    ``only``: names, as a sequence or comma-separated text; "all" for all. `VitrimError` for an unknown family, or sizes
    or blocks without a family that uses them.

    Example:
        >>> chosen("counts,depth"), chosen(None), len(chosen("all"))
        (['depth', 'counts'], [], 10)
    """
    names = only.split(",") if isinstance(only, str) else [] if only is None else list(only)
    if names == ["all"]:
        names = list(FAMILIES)
    for name in names:
        check_known("family", name, FAMILIES)
    if sizes and "throughput" not in names:
        raise VitrimError("sizes are those of the family throughput, which runs only if it is named")
    if blocks and not {"attention", "router"} & set(names):
        raise VitrimError("blocks are those of the families attention and router, which run only if they are named")
    return [name for name in FAMILIES if name in names]


def results_of(
    records: Sequence[Record] | None, names: Sequence[str] = (), subjects: Mapping[str, Subject] | None = None
) -> dict[str, FamilyResult]:
    """The results of the named families, or of `DEFAULT` if no names are passed, in the order of a report.

    Parts that need ``records``, or ``subjects`` by model name, are left out without them. A family of `DEFAULT` that
    fails without being named gives a note; a named one raises.
    """
    named = chosen(names)
    stored = None if records is None else titled(records)
    found = {}
    for name in named or DEFAULT:
        family, parts = FAMILIES[name], []
        if family.of_records is not None and stored is not None:
            few = min(map(len, stored), default=0)
            parts.append(_tried(name, partial(family.of_records, stored), few, asked=bool(named)))
        if family.of_model is not None and subjects is not None and named:
            make = family.of_model
            own = {model: _tried(name, partial(make, one), FEW, asked=True) for model, one in subjects.items()}
            parts += own.values() if len(own) == 1 else [beside(own)]
        if parts:
            found[name] = FamilyResult.joined(parts)
    return found


def beside(results: Mapping[str, FamilyResult]) -> FamilyResult:
    """Join the results of one family over several models; methods are renamed to METHOD on MODEL."""
    rows: dict[str, Table] = {}
    every = FamilyResult(arrays={})
    for model, result in results.items():
        for table in result.tables:
            places = [place for place, column in enumerate(table.columns) if column in NAMES]
            own = [
                tuple(f"{cell} on {model}" if place in places else cell for place, cell in enumerate(row))
                for row in table.rows
            ]
            rows[table.name] = replace(table, rows=[*rows[table.name].rows, *own] if table.name in rows else own)
        every.notes += [f"{model}: {note}" for note in result.notes]
        for key, array in result.arrays.items():
            method, slash, rest = key.partition("/")
            every.arrays[f"{method} on {model}{slash}{rest}" if slash else key] = array
    every.tables = list(rows.values())
    return every


def across(analyses: Sequence[Sequence[Record]], names: Sequence[str] = ()) -> dict[str, FamilyResult]:
    """The tables of several analyses, possibly of different images, by the named families or all that can
    compare them.
    """
    valid = ("depth", "counts", "features")
    wrong = next((name for name in names if name not in valid), None)
    if wrong is not None:
        raise VitrimError(f"{wrong} needs records of the same images; analyses are compared by {', '.join(valid)}")
    if len(analyses) < 2:
        raise VitrimError(f"a comparison needs two finished analyses or more, got {len(analyses)}")
    every = titled([record for analysis in analyses for record in analysis])
    left = iter(every)
    groups = [[next(left) for _ in analysis] for analysis in analyses]
    makers = {"depth": partial(depth, every), "counts": partial(counts, every), "features": partial(features, *groups)}
    few = min(map(len, every))
    return {name: _tried(name, makers[name], few, asked=bool(names)) for name in valid if name in names or not names}


def _tried(name: str, make: Callable[[], FamilyResult], images: int, *, asked: bool) -> FamilyResult:
    """The result of a family; if it fails and was not named, a note with the reason."""
    try:
        result = make()
    except VitrimError as error:
        if asked:
            raise
        return FamilyResult(notes=[f"{name} skipped: {error}"])
    images = images if result.images is None else result.images
    if result.tables and images < FEW:
        result.notes.append(f"{name}: estimated from {images} images, fewer than {FEW}")
    return result
