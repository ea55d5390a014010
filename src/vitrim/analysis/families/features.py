"""Likeness of class tokens, and whether it tells how good a method is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.analysis.features import cca_measures, cka, procrustes
from vitrim.analysis.record import Record, check_comparable
from vitrim.analysis.statistics import spearman_ci, spearman_kendall
from vitrim.analysis.tables import Outcome, Table
from vitrim.errors import VitrimError

__all__ = ["features"]

ANY = {"procrustes": procrustes, "cka_distance": cka}
WIDE = ("pwcca_distance_ab", "pwcca_distance_ba", "mean_cca")
"""Those that need twice as many images as channels."""
MEASURES = (*ANY, *WIDE)
PAIRS = ("method_a", "method_b", "block", "images", *MEASURES, "difference")
PROXY = ("block", "measure", "pairs", "spearman", "spearman_low", "spearman_high", "spearman_p", "kendall", "kendall_p")
HEAD = "head"
"""The block of what the classifier reads."""
FEWEST_PAIRS = 3


def features(records: Sequence[Record]) -> Outcome:
    """Distances between the features of every pair of records, and their rank correlation with the difference of the
    pair in accuracy or, without labels, in agreement with the dense model.

    CCA needs twice as many images as channels, and is left out below.

    Raises:
        VitrimError: records of different images, or fewer images than classes.
    """
    having = [record for record in records if "head" in record.arrays]
    if len(having) < 2:
        return Outcome(notes=["features skipped: they need two records with features"])
    check_comparable(having)
    classes = max((record.arrays["logits"].shape[1] for record in having if "logits" in record.arrays), default=0)
    if len(having[0]) < classes:
        raise VitrimError(f"features need at least as many images as classes, got {len(having[0])} for {classes}")
    scores, score = _scores(having)
    outcome, rows = Outcome(), []
    common = set.intersection(*(set(record.header["feature_blocks"]) for record in having))
    for a, b in combinations(having, 2):
        for block in (*sorted(common), None):
            measures = _measures(a.feature(block), b.feature(block))
            difference = abs(scores[a.name] - scores[b.name]) if scores else None
            rows.append((a.name, b.name, HEAD if block is None else block, len(a), *measures, difference))
    outcome.tables.append(Table("features", f"Distance of features; difference in {score}", PAIRS, rows))
    widest = max(record.arrays["head"].shape[1] for record in having)
    if len(having[0]) < 2 * widest:
        outcome.notes.append(
            f"CCA and PWCCA need {2 * widest} images, twice the {widest} channels, and there are {len(having[0])}"
        )
    proxy = _proxy(outcome.tables[0])
    if proxy:
        outcome.tables.append(
            Table("proxy", f"Rank correlation of distances with the difference in {score}", PROXY, proxy)
        )
        if len(having) > 3:
            outcome.notes.append("pairs of the same records are not independent: p-values and intervals are too narrow")
    else:
        outcome.notes.append("proxy skipped: it needs three pairs of records, and labels or logits")
    return outcome


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
