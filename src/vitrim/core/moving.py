"""Moving tokens, as loops (see `loops.py`): what the operators of `assignment.py` do, in one call each."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitrim.core import loops


def _pool(
    x: Any,
    size: Any,
    weight: Any,
    normalise: bool,
    anchor: Any,
    moved: Any,
    into: Any,
    pooled: Any,
    new_size: Any,
) -> None:
    """Fill ``pooled`` (B, M, C) and ``new_size`` (B, M): what `Hard.pool` and sums of sizes give, as a loop."""
    # a method outside of vitrim may be wrong, and a loop would read what lies behind the array
    if into.shape != moved.shape or weight.shape != size.shape or not len(x) == len(anchor) == len(moved):
        raise IndexError("tokens, their weights, those to move and what they join do not belong together")
    if anchor.min() < 0 or moved.min() < 0 or max(anchor.max(), moved.max()) >= x.shape[1]:
        raise IndexError("a token to keep or to move is not among those there are")
    if into.min() < 0 or into.max() >= anchor.shape[1]:
        raise IndexError("a token is to join one that is not kept")
    total = np.empty(anchor.shape[1], weight.dtype)
    for b in range(anchor.shape[0]):
        for m in range(anchor.shape[1]):
            a = anchor[b, m]
            new_size[b, m] = size[b, a]
            total[m] = weight[b, a]
            for c in range(x.shape[2]):
                pooled[b, m, c] = x[b, a, c] if normalise else weight[b, a] * x[b, a, c]
        for r in range(moved.shape[1]):
            new_size[b, into[b, r]] += size[b, moved[b, r]]
            total[into[b, r]] += weight[b, moved[b, r]]
        for r in range(moved.shape[1]):
            s, m = moved[b, r], into[b, r]
            a = anchor[b, m]
            if normalise:
                share = weight[b, s] / total[m]
                for c in range(x.shape[2]):
                    pooled[b, m, c] += share * (x[b, s, c] - x[b, a, c])
            else:
                for c in range(x.shape[2]):
                    pooled[b, m, c] += weight[b, s] * x[b, s, c]


POOL = loops.Loop(_pool)


def _expand(y: Any, anchor: Any, moved: Any, into: Any, places: Any) -> None:
    """Fill ``places`` (B, n, C) as `Hard.expand` does, as a loop."""
    n = places.shape[1]
    if into.shape != moved.shape or anchor.shape != y.shape[:2] or len(moved) != len(y):
        raise IndexError("tokens and their places do not belong together")
    if anchor.min() < 0 or anchor.max() >= n:
        raise IndexError("a token to keep is not among those there are")
    if moved.size > 0 and (moved.min() < 0 or moved.max() >= n or into.min() < 0 or into.max() >= y.shape[1]):
        raise IndexError("a token to move, or what it joins, is not among those there are")
    for b in range(len(y)):
        if anchor.shape[1] + moved.shape[1] < n:
            places[b] = 0
        for m in range(anchor.shape[1]):
            places[b, anchor[b, m]] = y[b, m]
        for r in range(moved.shape[1]):
            places[b, moved[b, r]] = y[b, into[b, r]]


EXPAND = loops.Loop(_expand)
