"""Likeness of class tokens, and whether it tells how good a method is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.features import cca_measures, cka, procrustes
from vitrim.analysis.record import Record, check_comparable
from vitrim.analysis.statistics import spearman_ci, spearman_kendall
from vitrim.analysis.tables import Outcome, Table
from vitrim.errors import VitrimError

__all__ = ["features", "pooled"]

ANY = {"procrustes": procrustes, "cka_distance": cka}
WIDE = ("pwcca_distance_ab", "pwcca_distance_ba", "mean_cca")
"""Those that need twice as many images as channels."""
MEASURES = (*ANY, *WIDE)
PAIRS = ("method_a", "method_b", "block", "images", *MEASURES, "difference", "signed")
SHOWN = PAIRS[:-1]
PROXY = ("block", "measure", "pairs", "spearman", "spearman_low", "spearman_high", "spearman_p", "kendall", "kendall_p")
ANCHORS = ("method", "block", "measure", "others", "spearman", "spearman_p", "kendall", "kendall_p")
HEAD = "head"
"""The block of what the classifier reads."""
FEWEST_PAIRS = 3


def features(records: Sequence[Record]) -> Outcome:
    """Distances between the features of every pair of records, and their rank correlation with the difference of the
    pair in accuracy or, without labels, in agreement with the dense model: over all pairs, and over those with each
    record, the anchor, where the difference has a sign.

    CCA needs twice as many images as channels, and is left out below.

    Raises:
        VitrimError: records of different images, or fewer images than classes.
    """
    return pooled([records])


def pooled(groups: Sequence[Sequence[Record]]) -> Outcome:
    """The same over pairs within each group; their rank correlations are over the pairs of all groups.

    Args:
        groups: records of the same images each, such as those of one analysis, with different names throughout.

    Raises:
        VitrimError: as `features`.
    """
    having = [[record for record in group if "head" in record.arrays] for group in groups]
    having = [group for group in having if len(group) > 1]
    if not having:
        return Outcome(notes=["features skipped: they need two records with features"])
    outcome, rows, kinds = Outcome(), [], []
    for group in having:
        _check(group)
        scores, score = _scores(group)
        kinds.append(score)
        rows += _pairs(group, scores)
        outcome.notes += _too_few(group)
    score = " or ".join(dict.fromkeys(kinds))
    table = Table("features", f"Distance of features; difference in {score}", PAIRS, rows, SHOWN)
    outcome.tables.append(table)
    proxy = _proxy(table)
    if not proxy:
        outcome.notes.append("proxy skipped: it needs three pairs of records, and labels or logits")
        return outcome
    outcome.tables.append(Table("proxy", f"Rank correlation of distances with the difference in {score}", PROXY, proxy))
    anchored = [row for group in having for record in group for row in _anchored(table, record.name)]
    if anchored:
        title = f"Rank correlation of distances from one record with the signed difference in {score}"
        outcome.tables.append(Table("proxy_anchors", title, ANCHORS, anchored))
    if max(map(len, having)) > 3 or len(having) > 1:
        outcome.notes.append("pairs of the same records are not independent: p-values and intervals are too narrow")
    return outcome


def _check(group: Sequence[Record]) -> None:
    check_comparable(group)
    classes = max((record.arrays["logits"].shape[1] for record in group if "logits" in record.arrays), default=0)
    count = len(group[0].feature(None))
    if count < classes:
        raise VitrimError(f"features need at least as many images as classes, got {count} for {classes}")


def _too_few(group: Sequence[Record]) -> list[str]:
    """A note where there are too few images for CCA."""
    widest, count = max(record.arrays["head"].shape[1] for record in group), len(group[0].feature(None))
    if count >= 2 * widest:
        return []
    return [f"CCA and PWCCA need {2 * widest} images, twice the {widest} channels, and there are {count}"]


def _pairs(group: Sequence[Record], scores: Mapping[str, float]) -> list[tuple[object, ...]]:
    """A row of `PAIRS` for every pair at every block that all have."""
    rows: list[tuple[object, ...]] = []
    common = set.intersection(*(set(record.header["feature_blocks"]) for record in group))
    for a, b in combinations(group, 2):
        signed = scores[b.name] - scores[a.name] if scores else None
        differences = (None if signed is None else abs(signed), signed)
        for block in (*sorted(common), None):
            one, other = a.feature(block), b.feature(block)
            place = HEAD if block is None else block
            rows.append((a.name, b.name, place, len(one), *_measures(one, other), *differences))
    return rows


def _measures(a: NDArray[Any], b: NDArray[Any]) -> list[float | None]:
    from threadpoolctl import threadpool_limits

    enough = len(a) >= 2 * max(a.shape[1], b.shape[1])
    with threadpool_limits(limits=1, user_api="blas"):  # matrices this small take many times longer on busy cores
        return [*(measure(a, b) for measure in ANY.values()), *(cca_measures(a, b) if enough else (None,) * len(WIDE))]


def _scores(records: Sequence[Record]) -> tuple[dict[str, float], str]:
    """Top-1 of each record or, without labels, agreement with the first dense one; by its name."""
    correct = {record.name: record.correct() for record in records}
    if all(one is not None for one in correct.values()):
        return {name: float(np.mean(one)) for name, one in correct.items() if one is not None}, "top-1"
    dense = next((record.first() for record in records if record.header["kind"] == "none"), None)
    firsts = {record.name: record.first() for record in records}
    if dense is None or any(first is None for first in firsts.values()):
        return {}, "nothing: no labels and no dense model"
    return {name: float(np.mean(first == dense)) for name, first in firsts.items()}, "agreement"


def _proxy(table: Table) -> list[tuple[object, ...]]:
    """Rank correlations of each measure at each block, with a bootstrap interval over the pairs."""
    rows: list[tuple[object, ...]] = []
    blocks, differences = table.column("block"), table.column("difference")
    for block in dict.fromkeys(blocks):
        for measure in MEASURES:
            values = zip(blocks, table.column(measure), differences, strict=True)
            pairs = np.array([(x, y) for place, x, y in values if place == block and None not in (x, y)])
            if len(pairs) < FEWEST_PAIRS:
                continue
            found = spearman_kendall(*pairs.T)
            low, high = spearman_ci(pairs)
            rho, tau = (found.spearman, float(low), float(high), found.spearman_p), (found.kendall, found.kendall_p)
            rows.append((block, measure, len(pairs), *rho, *tau))
    return rows


def _anchored(table: Table, anchor: str) -> list[tuple[object, ...]]:
    """Rank correlations of each measure at each block over the pairs with one record."""
    rows: list[tuple[object, ...]] = []
    own = [row for row in table.records() if anchor in (row["method_a"], row["method_b"])]
    for block in dict.fromkeys(row["block"] for row in own):
        for measure in MEASURES:
            pairs = [
                (row[measure], row["signed"] if row["method_a"] == anchor else -row["signed"])
                for row in own
                if row["block"] == block and row[measure] is not None and row["signed"] is not None
            ]
            if len(pairs) >= FEWEST_PAIRS:
                found = spearman_kendall(*np.array(pairs).T)
                rows.append((anchor, block, measure, len(pairs), *found))
    return rows
