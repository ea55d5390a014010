"""Tables with made numbers, as the families make them, for tests of figures and reports."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from vitrim.analysis.families.counts import COLUMNS as COUNTS
from vitrim.analysis.families.counts import SHOWN as COUNTS_SHOWN
from vitrim.analysis.families.depth import OVERALL, PLACES
from vitrim.analysis.families.depth import PAIRS as DEPTH_PAIRS
from vitrim.analysis.families.features import PAIRS as FEATURES
from vitrim.analysis.families.features import PROXY
from vitrim.analysis.families.patterns import CLUSTERS, CLUSTERS_SHOWN, OVERLAP, OVERLAP_SHOWN, PROXIES
from vitrim.analysis.family import FamilyResult, Tables
from vitrim.analysis.proxies import ANCHORS
from vitrim.analysis.record import Record
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
    anchors = [(name, "head", one, 3, *numbers(ANCHORS, 4)) for one in measures for name in NAMES]
    depth_pairs = [(a, b, *numbers(DEPTH_PAIRS, 2)) for a, b in combinations(NAMES, 2)]
    likeness = [(a, b, "end", 40, *numbers(PROXIES, 4)) for a, b in combinations(NAMES, 2)]
    ranks = [(name, "end", one, 2, *numbers(ANCHORS, 4)) for one in ("iou", "v_measure") for name in NAMES]
    return {
        "patterns": FamilyResult(
            [
                Table("overlap", "Overlap", OVERLAP, overlap, OVERLAP_SHOWN),
                Table("clusters", "Clusters", CLUSTERS, clusters, CLUSTERS_SHOWN),
                Table("pattern_proxies", "Likeness", PROXIES, likeness),
                Table("pattern_anchors", "Ranks", ANCHORS, ranks),
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


def rows(source: FamilyResult | Tables, name: str, **wanted: object) -> list[dict[str, Any]]:
    """The rows of a table, those that have the ``wanted`` values."""
    every = source if isinstance(source, Tables) else Tables.of({"": source})
    return [row for row in every[name].records() if all(row[key] == value for key, value in wanted.items())]


def grids(figure: Any) -> list[Any]:
    """The numbers of the images in a figure."""
    return [axis.images[0].get_array().filled(np.nan) for axis in figure.axes if axis.images]


# ---- records ---------------------------------------------------------------------------------------------------------

IMAGES, SIDE, PATCHES, CLASSES = 40, 3, 9, 3
HEADER = {
    "num_prefix": 1,
    "num_layers": 4,
    "grid": [SIDE, SIDE],
    "blocks": [1],
    "feature_blocks": [],
    "adaptive": False,
}


def made_record(method: str, kind: str, seed: int, groups: int, right: float) -> Record:
    """A record of nine patches: clusters or, of a method that prunes, as many patches kept as there are groups."""
    draw = np.random.default_rng(seed)
    labels = np.stack([draw.permutation(np.arange(PATCHES) % groups) for _ in range(IMAGES)])
    kept = np.stack([draw.permutation(PATCHES) < groups for _ in range(IMAGES)])
    targets = np.arange(IMAGES) % CLASSES
    shown = np.where(np.arange(IMAGES) < right * IMAGES, targets, (targets + 1) % CLASSES)
    arrays = {
        "ids": np.arange(IMAGES),
        "batch": np.zeros(IMAGES, int),
        "targets": targets,
        "source": np.concatenate([np.zeros((IMAGES, 1), int), labels + 1], 1)[:, None],
        "kept": np.packbits(kept[:, None], axis=-1),
        "num_tokens": 1 + np.concatenate([np.full((IMAGES, 1), PATCHES), draw.integers(2, 9, (IMAGES, 3))], 1),
        "head": draw.normal(size=(IMAGES, 4)),
        "logits": np.eye(CLASSES)[shown],
        "first": shown,
    }
    return Record({**HEADER, "method": method, "kind": kind, "soft": False}, arrays)
