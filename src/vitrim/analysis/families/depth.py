"""The depth that patches reach: the mean map of every record, and the likeness of two such maps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from vitrim.analysis.maps import Pattern, depth_map, emd, js_bits, kl_bits, mean_pattern, pcc, scc, sim
from vitrim.analysis.record import Record
from vitrim.analysis.tables import Outcome, Table

__all__ = ["depth"]

OVERALL = ("method", "images", "depth", "depth_std", "shallowest_patch", "deepest_patch")
PLACES = ("method", "row", "column", "depth", "depth_std")
PAIRS = ("method_a", "method_b", "kl_bits_ab", "kl_bits_ba", "js_bits", "pcc", "scc", "sim", "emd_patches")


def depth(records: Sequence[Record]) -> Outcome:
    """Mean depth of every patch over the images, and the similarity of these maps for every pair of records.

    The records may be of different images, such as different data sets: only the means are compared, where grid and
    depth of the model are the same.
    """
    standing = [record for record in records if record.blocks and "kept" in record.arrays]
    if not standing:
        return Outcome(notes=["depth skipped: it needs a record of a method that keeps patches"])
    found: list[tuple[Record, Pattern]] = []
    for record in standing:
        depths = depth_map(record.kept(), record.blocks, record.header["num_layers"])
        found.append((record, mean_pattern(depths)))
    overall = [
        (
            *(record.name, len(record), pattern.overall_mean, pattern.overall_std),
            *(float(pattern.mean.min()), float(pattern.mean.max())),
        )
        for record, pattern in found
    ]
    tables = [
        Table("depth", "Depth at which patches are dropped; blocks of the model where they never are", OVERALL, overall)
    ]
    places = [row for record, pattern in found for row in _places(record, pattern)]
    tables.append(Table("depth_maps", "Depth of every patch", PLACES, places, ()))
    alike = [_pair(one, other) for one, other in combinations(found, 2) if _same_model(one[0], other[0])]
    if not alike:
        return Outcome(tables)
    tables.append(Table("depth_pairs", "Similarity of the mean maps of depth", PAIRS, alike))
    note = "Jensen-Shannon divergences are the textbook's; those of the study have reversed arguments"
    return Outcome(tables, [note])


def _places(record: Record, pattern: Pattern) -> list[tuple[object, ...]]:
    columns = record.header["grid"][1]
    numbers = zip(pattern.mean.tolist(), pattern.std.tolist(), strict=True)
    return [(record.name, *divmod(place, columns), *pair) for place, pair in enumerate(numbers)]


def _same_model(a: Record, b: Record) -> bool:
    return all(a.header[key] == b.header[key] for key in ("grid", "num_layers"))


def _pair(one: tuple[Record, Pattern], other: tuple[Record, Pattern]) -> tuple[object, ...]:
    a, b = (np.reshape(pattern.mean, record.header["grid"]) for record, pattern in (one, other))
    measures = (kl_bits(a, b), kl_bits(b, a), js_bits(a, b), pcc(a, b), scc(a, b), sim(a, b), emd(a, b))
    return (one[0].name, other[0].name, *measures)
