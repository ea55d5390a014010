"""Tables with made numbers, as the families make them, for tests of figures and reports."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from vitrim.analysis.family import FamilyResult, Tables
from vitrim.analysis.record import Record

NAMES = ("topk:keep_rate=0.9", "topk:keep_rate=0.5", "tome:r=8")
BLOCKS = (1, 3)
MEAN = ("", "_std", "_low", "_high")


def results() -> dict[str, FamilyResult]:
    """One `FamilyResult` per family of records: three records and the dense model, two blocks."""
    draw = np.random.default_rng(0)

    def numbers(*names: str) -> dict[str, float]:
        return {name: float(draw.random()) for name in names}

    def pair(a: str, b: str, **more: Any) -> dict[str, Any]:
        return {"method_a": a, "method_b": b, **more}

    def family(**tables: list[dict[str, Any]]) -> FamilyResult:
        result = FamilyResult()
        for name, rows in tables.items():
            result.add(name, name.capitalize(), rows, () if name == "depth_maps" else None)
        return result

    def means(*names: str) -> list[str]:
        return [f"{name}{end}" for name in names for end in MEAN]

    levels = ("iou_least", "iou_chance", "ioa_least", "ioa_chance")
    ranks = ("spearman", "spearman_p", "kendall", "kendall_p")
    measures = ("procrustes", "cka_distance", "pwcca_distance_ab")
    deciles = ("tokens_std", "p10", "median", "p90", "least", "most", "removed")
    divergences = ("kl_bits_ab", "kl_bits_ba", "js_bits", "pcc", "scc", "sim", "emd_patches")
    pairs = [(a, b, block) for a, b in combinations(NAMES, 2) for block in BLOCKS]
    return {
        "patterns": family(
            overlap=[
                pair(a, b, block=block, images=40, kept_a=14.0, kept_b=10.0 - NAMES.index(b))
                | numbers(*means("iou", "ioa"), *levels)
                for a, b, block in pairs
            ],
            clusters=[
                pair(a, b, block=block, images=40, clusters_a=9.0, clusters_b=8.0)
                | numbers(*means("homogeneity", "completeness", "v_measure"), "v_chance", "ami")
                for a, b, block in pairs
            ],
            pattern_proxies=[
                pair(a, b, block="end", images=40) | numbers("iou", "v_measure", "difference", "signed")
                for a, b in combinations(NAMES, 2)
            ],
            pattern_anchors=[
                {"method": name, "block": "end", "measure": measure, "others": 2, **numbers(*ranks)}
                for measure in ("iou", "v_measure")
                for name in NAMES
            ],
        ),
        "depth": family(
            depth=[
                {"method": name, "images": 40, **numbers("depth", "depth_std", "shallowest_patch", "deepest_patch")}
                for name in NAMES
            ],
            depth_maps=[
                {"method": name, "row": row, "column": column, "depth": row + column, "depth_std": 0.5 * row}
                for name in NAMES
                for row in range(2)
                for column in range(3)
            ],
            depth_pairs=[pair(a, b) | numbers(*divergences) for a, b in combinations(NAMES, 2)],
        ),
        "counts": family(
            counts=[
                {"method": name, "block": block, "images": 40, **numbers("tokens", *deciles)}
                | {"bound": 17.0 if name == NAMES[2] else None, "threshold": None}
                for name in ("dense", *NAMES)
                for block in range(4)
            ]
        ),
        "features": family(
            features=[
                pair(a, b, block=block, images=40)
                | numbers(*measures, "mean_cca")
                | {"difference": 0.1 * place, "signed": 0.1 * place}
                for place, (a, b) in enumerate(combinations(("dense", *NAMES), 2))
                for block in (1, "head")
            ],
            proxy=[
                {"block": "head", "measure": measure, "pairs": 6} | numbers(*ranks, "spearman_low", "spearman_high")
                for measure in measures
            ],
            proxy_anchors=[
                {"method": name, "block": "head", "measure": measure, "others": 3, **numbers(*ranks)}
                for measure in measures
                for name in NAMES
            ],
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
