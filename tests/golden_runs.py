"""The models of the analysis vectors (``run_*`` in tests/golden/analysis) as masks, labels and features."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import golden_files as golden
from golden_files import Reference

PATCHES = 196
STAGES = (3, 6, 9)
FEATURE_BLOCKS = (3, 6, 9, 11)
NAMES = tuple(
    sorted(file for file in golden.index() if file.startswith("analysis/run_") and file != "analysis/run_deit_100")
)


class Run:
    """One model under one method on the 60 images.

    Attributes:
        kept: (I, S, P) bool, or None of methods that only merge.
        labels: (I, S, P) composed clusters, or None of methods that only prune.
        features: (I, C) by block.
    """

    def __init__(self, ref: Reference) -> None:
        kept = [ref[f"kept_abs/{block}"] for block in STAGES] if "kept_abs/3" in ref else None
        stages = [ref[f"assign/{block}"] for block in STAGES] if "assign/3" in ref else None
        self.kept = None if kept is None else np.stack([mask(one) for one in kept], 1)
        self.labels = None if stages is None else composed(stages)
        self.features = {block: ref[f"cls_features/{block}"].T.astype(np.float64) for block in FEATURE_BLOCKS}


def mask(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """(I, P) bool of patch ids (I, K); -1 is a fused token, -2 a filler."""
    found = np.zeros((len(ids), PATCHES), dtype=bool)
    image, place = np.nonzero(ids >= 0)
    found[image, ids[image, place]] = True
    return found


def composed(stages: list[NDArray[Any]]) -> NDArray[np.int64]:
    """(I, S, P), the cluster of every patch after each stage, from the maps of the stages."""
    labels = [stages[0].astype(np.int64)]
    for stage in stages[1:]:
        before = labels[-1]
        labels.append(np.where(before < 0, -1, np.take_along_axis(stage, np.maximum(before, 0), axis=-1)))
    return np.stack(labels, 1)


@cache
def run(model: str) -> Run:
    """The run of a model named as in the tables, e.g. ``topk_0.5``."""
    method, rate = model.split("_")
    return Run(golden.load(f"analysis/run_{method}_{round(100 * float(rate))}"))


def table(ref: Reference) -> tuple[list[str], list[tuple[str, str]]]:
    """Columns of a reference table and the pairs of models of its rows."""
    read = {key: ref[key] for key in ("columns", "model_a", "model_b")}
    columns, first, second = (json.loads(str(one)) if not isinstance(one, list) else one for one in read.values())
    return columns, list(zip(first, second, strict=True))
