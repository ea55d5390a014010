"""Which patches methods keep, and how they group them: every pair of records, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.clusters import ami, completeness, homogeneity, permuted, v_measure
from vitrim.analysis.patterns import chance_ioa, chance_iou, ioa, iou, least_ioa, least_iou
from vitrim.analysis.record import Record, check_comparable
from vitrim.analysis.tables import Outcome, Table, named, summary

__all__ = ["patterns"]

AMI_IMAGES = 200
"""Images of which adjusted mutual information is the mean."""

PAIR = ("method_a", "method_b", "block", "images")


def patterns(records: Sequence[Record]) -> Outcome:
    """Overlap of kept patches, and agreement of clusters, of every pair of records after every block of either.

    Raises:
        VitrimError: records of different images.
    """
    reduced = [record for record in records if record.blocks]
    if len(reduced) < 2:
        return Outcome(notes=["patterns skipped: they need two records of methods that reduce"])
    check_comparable(reduced)
    outcome = Outcome()
    standing = [record for record in reduced if "kept" in record.arrays]
    rows = [row for pair in combinations(standing, 2) for row in _overlap(*pair)]
    if rows:
        outcome.tables.append(Table("overlap", "Overlap of the kept patches", OVERLAP, rows, OVERLAP_SHOWN))
    grouping = [record for record in reduced if record.header["kind"] != "prune"]
    rows = [row for pair in combinations(grouping, 2) for row in _clusters(*pair)]
    if rows:
        outcome.tables.append(Table("clusters", "Agreement of the clusters", CLUSTERS, rows, CLUSTERS_SHOWN))
    else:
        outcome.notes.append("clusters skipped: they need two records of methods that merge")
    if len(standing) < len(reduced):
        outcome.notes.append("methods with soft tokens keep no patches, and are left out of the overlap")
    return outcome


OVERLAP = (
    *(*PAIR, "kept_a", "kept_b"),
    *(*named("iou"), "iou_least", "iou_chance", *named("ioa"), "ioa_least", "ioa_chance"),
)
OVERLAP_SHOWN = (*PAIR[:3], "iou", "iou_low", "iou_high", "iou_least", "iou_chance", "ioa", "ioa_least", "ioa_chance")


def _overlap(a: Record, b: Record) -> list[tuple[object, ...]]:
    """Rows of a pair; IoA divides by the smaller sets, so that record is put second."""
    if a.kept()[:, -1].sum() < b.kept()[:, -1].sum():
        a, b = b, a
    of_a, of_b = a.kept(), b.kept()
    rows: list[tuple[object, ...]] = []
    blocks = sorted({*a.blocks, *b.blocks})
    pairs_of_sets = [(_after(of_a, a.blocks, block), _after(of_b, b.blocks, block)) for block in blocks]
    numbers_of = summary(np.stack([measure(*sets) for sets in pairs_of_sets for measure in (iou, ioa)], 1))
    for place, (block, (one, other)) in enumerate(zip(blocks, pairs_of_sets, strict=True)):
        union, within = numbers_of[2 * place : 2 * place + 2]
        patches = a.num_patches
        sizes = np.stack([np.broadcast_to(mask.sum(-1), len(a)) for mask in (one, other)], 1)
        pairs, counts = np.unique(sizes, axis=0, return_counts=True)
        levels = np.average([_levels(patches, *pair) for pair in pairs.tolist()], axis=0, weights=counts).tolist()
        static = all(record.header["kind"] == "prune" and not record.header.get("adaptive") for record in (a, b))
        least = levels[:2] if static else (None, None)
        numbers = (*union, least[0], levels[2], *within, least[1], levels[3])
        rows.append((a.name, b.name, block, len(a), *map(float, sizes.mean(0)), *numbers))
    return rows


def _levels(patches: int, a: int, b: int) -> tuple[float, float, float, float]:
    """Lower bounds of IoU and IoA of sets of ``a`` and ``b`` patches, and their means over random ones."""
    chance = (chance_iou(patches, a, b), chance_ioa(patches, a) if b else 0.0)
    return (least_iou(patches, a, b), least_ioa(patches, a, b), *chance)


CLUSTERS = (
    *(*PAIR, "clusters_a", "clusters_b"),
    *(*named("homogeneity"), *named("completeness"), *named("v_measure"), "v_chance", "ami"),
)
CLUSTERS_SHOWN = (
    *PAIR[:3],
    "homogeneity",
    "completeness",
    *named("v_measure", ("", "_low", "_high")),
    "v_chance",
    "ami",
)


def _clusters(a: Record, b: Record) -> list[tuple[object, ...]]:
    """Rows of a pair. ``a`` is the truth of homogeneity."""
    of_a, of_b = a.labels(), b.labels()
    rows: list[tuple[object, ...]] = []
    blocks, measures = sorted({*a.blocks, *b.blocks}), (homogeneity, completeness, v_measure)
    pairs = [(_labels_after(of_a, a.blocks, block), _labels_after(of_b, b.blocks, block)) for block in blocks]
    numbers_of = summary(np.stack([measure(*pair) for pair in pairs for measure in measures], 1))
    for place, (block, (one, other)) in enumerate(zip(blocks, pairs, strict=True)):
        numbers = [number for numbers in numbers_of[3 * place : 3 * place + 3] for number in numbers]
        few = np.linspace(0, len(a) - 1, min(len(a), AMI_IMAGES)).astype(int)
        chance = float(v_measure(one, permuted(other)).mean())
        adjusted = float(ami(one[few], other[few]).mean())
        sizes = (_distinct(one), _distinct(other))
        rows.append((a.name, b.name, block, len(a), *sizes, *numbers, chance, adjusted))
    return rows


def _distinct(labels: NDArray[np.int32]) -> float:
    """The mean number of clusters of an image."""
    ordered = np.sort(labels, axis=1)
    return float(1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1).mean())


def _after(kept: NDArray[np.bool_], blocks: Sequence[int], block: int) -> NDArray[np.bool_]:
    """(I, P), what is kept after a block: after the last one before it that changed something, or everything."""
    stage = int(np.searchsorted(blocks, block, side="right")) - 1
    return kept[:, stage] if stage >= 0 else np.ones_like(kept[:, 0])


def _labels_after(labels: NDArray[np.int32], blocks: Sequence[int], block: int) -> NDArray[np.int32]:
    stage = int(np.searchsorted(blocks, block, side="right")) - 1
    start = np.arange(labels.shape[-1], dtype=np.int32)
    return labels[:, stage] if stage >= 0 else np.broadcast_to(start, labels[:, 0].shape)
