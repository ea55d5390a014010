"""Numbers of tokens left after each block, image by image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrim.analysis.record import Record
from vitrim.analysis.tables import Outcome, Table

__all__ = ["counts"]

SHOWN = ("method", "block", "images", "tokens", "tokens_std", "p10", "median", "p90", "least", "most", "removed")
COLUMNS = (*SHOWN, "bound", "threshold")


def counts(records: Sequence[Record]) -> Outcome:
    """Tokens after each block, prefix included: mean, population standard deviation, deciles, ends; and how many the
    block removed, as a mean (negative where patches come back). Beside them the most tokens that a method which decides
    by image may keep, and the similarity above which one merges, where it has these."""
    rows = []
    for record in records:
        tokens = record.tokens()
        start = record.num_patches + record.header["num_prefix"]
        bounds, thresholds = (record.header.get(key) or [None] * tokens.shape[1] for key in ("bounds", "thresholds"))
        before = np.concatenate([np.full((len(tokens), 1), start), tokens[:, :-1]], 1)
        for block, (left, had) in enumerate(zip(tokens.T, before.T, strict=True)):
            deciles = np.quantile(left, [0.1, 0.5, 0.9]).tolist()
            ends = (int(left.min()), int(left.max()))
            moments = (float(left.mean()), float(left.std()))
            removed = float((had - left).mean())
            limits = (bounds[block], thresholds[block])
            rows.append((record.name, block, len(left), *moments, *deciles, *ends, removed, *limits))
    return Outcome([Table("counts", "Tokens after each block", COLUMNS, rows, SHOWN)])
