"""Numbers of tokens left after each block, image by image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitrim.analysis.record import Record
from vitrim.analysis.tables import Outcome, Table

__all__ = ["counts"]

COLUMNS = ("method", "block", "images", "tokens", "tokens_std", "p10", "median", "p90", "least", "most", "removed")


def counts(records: Sequence[Record]) -> Outcome:
    """Tokens after each block, prefix included: mean, population standard deviation, deciles, ends; and how many the
    block removed, as a mean (negative where patches come back)."""
    rows = []
    for record in records:
        tokens = record.tokens()
        start = record.num_patches + record.header["num_prefix"]
        before = np.concatenate([np.full((len(tokens), 1), start), tokens[:, :-1]], 1)
        for block, (left, had) in enumerate(zip(tokens.T, before.T, strict=True)):
            deciles = np.quantile(left, [0.1, 0.5, 0.9]).tolist()
            ends = (int(left.min()), int(left.max()))
            moments = (float(left.mean()), float(left.std()))
            rows.append((record.name, block, len(left), *moments, *deciles, *ends, float((had - left).mean())))
    return Outcome([Table("counts", "Tokens after each block", COLUMNS, rows)])
