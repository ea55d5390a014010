"""Tables with made numbers, as the families make them, for tests of figures and reports."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from vitrim.analysis.families.counts import COLUMNS as COUNTS
from vitrim.analysis.families.counts import SHOWN as COUNTS_SHOWN
from vitrim.analysis.families.depth import OVERALL, PLACES
from vitrim.analysis.families.depth import PAIRS as DEPTH_PAIRS
from vitrim.analysis.families.features import ANCHORS, PROXY
from vitrim.analysis.families.features import PAIRS as FEATURES
from vitrim.analysis.families.patterns import CLUSTERS, CLUSTERS_SHOWN, OVERLAP, OVERLAP_SHOWN
from vitrim.analysis.family import FamilyResult, Tables
from vitrim.report import Table

NAMES = ("topk:keep_rate=0.9", "topk:keep_rate=0.5", "tome:r=8")
BLOCKS = (1, 3)


def results() -> dict[str, FamilyResult]:
    """One `FamilyResult` per family of records: three records and the dense model, two blocks."""
    draw = np.random.default_rng(0)
    pairs = [(a, b, block) for a, b in combinations(NAMES, 2) for block in BLOCKS]

    def numbers(columns: tuple[str, ...], taken: int) -> list[float]:
        return [float(number) for number in draw.random(len(columns) - taken)]

    overlap = [(a, b, block, 40, 14.0, 10.0 - NAMES.index(b), *numbers(OVERLAP, 6)) for a, b, block in pairs]
    clusters = [(a, b, block, 40, 9.0, 8.0, *numbers(CLUSTERS, 6)) for a, b, block in pairs]
    counts = [
        (name, block, 40, *numbers(COUNTS, 5), 17.0 if name == NAMES[2] else None, None)
        for name in ("dense", *NAMES)
        for block in range(4)
    ]
    places = [(name, row, column, row + column, 0.5 * row) for name in NAMES for row in range(2) for column in range(3)]
    features = [
        (a, b, block, 40, *numbers(FEATURES, 6), 0.1 * place, 0.1 * place)
        for place, (a, b) in enumerate(combinations(("dense", *NAMES), 2))
        for block in (1, "head")
    ]
    measures = ("procrustes", "cka_distance", "pwcca_distance_ab")
    proxy = [("head", measure, 6, *numbers(PROXY, 3)) for measure in measures]
    anchors = [(name, "head", "procrustes", 3, *numbers(ANCHORS, 4)) for name in NAMES]
    depth_pairs = [(a, b, *numbers(DEPTH_PAIRS, 2)) for a, b in combinations(NAMES, 2)]
    return {
        "patterns": FamilyResult(
            [
                Table("overlap", "Overlap", OVERLAP, overlap, OVERLAP_SHOWN),
                Table("clusters", "Clusters", CLUSTERS, clusters, CLUSTERS_SHOWN),
            ],
        ),
        "depth": FamilyResult(
            [
                Table("depth", "Depth", OVERALL, [(name, 40, *numbers(OVERALL, 2)) for name in NAMES]),
                Table("depth_maps", "Maps", PLACES, places, ()),
                Table("depth_pairs", "Pairs", DEPTH_PAIRS, depth_pairs),
            ]
        ),
        "counts": FamilyResult([Table("counts", "Tokens", COUNTS, counts, COUNTS_SHOWN)]),
        "features": FamilyResult(
            [
                Table("features", "Features", FEATURES, features, FEATURES[:-1]),
                Table("proxy", "Proxy", PROXY, proxy),
                Table("proxy_anchors", "Anchors", ANCHORS, anchors),
            ]
        ),
    }


def tables() -> Tables:
    """All of them by name."""
    return Tables.of(results())
