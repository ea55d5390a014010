"""Plain loops that replace many small operators, compiled by Numba where it is installed (``vitrim[fast]``).

At batch 1 on a CPU, a decision costs what calling its operators costs, some eighty in a block that merges. The
operators beside each loop define the correct result. Loops of a single method are at the end of its file.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from vitrim.core.tokens import is_traced

INSTALLED = find_spec("numba") is not None

MOST = 2**18
"""Numbers in the largest tensor that loops accept: they use one core, and operators all of them. On two cores both
are equally fast from DeiT-S at batch 8 on."""

DTYPES = (torch.float32, torch.float64)
HALF = (torch.bfloat16, torch.float16)
"""Dtypes that NumPy lacks or computes slowly: their tokens are moved in float32."""


class Loop:
    """A function of arrays and numbers, compiled on its first call; the tensors that it fills must be contiguous.

    Example:
        >>> def double(x, out):
        ...     for i in range(len(x)):
        ...         out[i] = 2.0 * x[i]
        >>> filled = torch.empty(2)
        >>> Loop(double)(torch.tensor([1.0, 2.0]), filled)
        >>> filled
        tensor([2., 4.])
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self._compiled: Callable[..., None] | None = None

    def __call__(self, *values: Any) -> None:
        if self._compiled is None:
            self._compiled = _compile(self.function)
        # Contiguous, so that it is compiled once for a dtype and not once for each layout.
        self._compiled(*[value.contiguous().numpy() if isinstance(value, Tensor) else value for value in values])


def suit(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> bool:
    """True if loops may replace operators on ``tensors``: small, on a CPU, in ``dtypes``, without gradients."""
    # Compilers, exporters, tracers and all that watches operators (counters, `torch.func`) must see operators.
    if not INSTALLED or torch.compiler.is_compiling() or is_traced():
        return False
    for x in tensors:
        own = type(x) is Tensor and x.device.type == "cpu" and x.dtype in dtypes
        if not own or x.requires_grad or not 0 < x.numel() <= MOST:
            return False
    watchers = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    # differentiation that `requires_grad` does not show
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return watchers == 0 and not transformed


def memory_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """The memory (S,) behind a view (B, H, N, d) with contiguous rows, and the strides of images, heads and tokens."""
    # NumPy cannot see that the rows of a view are contiguous, and would read them number by number.
    length = sum((count - 1) * step for count, step in zip(x.shape, x.stride(), strict=True)) + 1
    image, head, token, _ = x.stride()
    return x.as_strided((length,), (1,)), image, head, token


def _compile(function: Callable[..., None]) -> Callable[..., None]:
    import numba  # takes half a second

    # sums in any order, so that they use whole vectors; NaN and infinity stay what they are
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    try:
        compiled: Callable[..., None] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache is writable
        compiled = numba.njit(**options)(function)
    return compiled


# ---- the loops -------------------------------------------------------------------------------------------------------


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
    """Fill ``pooled`` (B, M, C) and ``new_size`` (B, M) as `Hard.pool` and the sums of sizes do."""
    # a wrong method outside vitrim would make the loop read beyond the array
    if into.shape != moved.shape or weight.shape != size.shape or not len(x) == len(anchor) == len(moved):
        raise IndexError("tokens, their weights, those to move and what they join do not belong together")
    if anchor.min() < 0 or moved.min() < 0 or max(anchor.max(), moved.max()) >= x.shape[1]:
        raise IndexError("a token to keep or to move is not among those there are")
    if into.min() < 0 or into.max() >= anchor.shape[1]:
        raise IndexError("a token is to join one that is not kept")
    total = np.empty(anchor.shape[1], weight.dtype)
    for b in range(anchor.shape[0]):
        for m in range(anchor.shape[1]):
            # The anchor first; the moved tokens are added as shares of their distance to it, as in `Hard.pool`.
            a = anchor[b, m]
            new_size[b, m] = size[b, a]
            total[m] = weight[b, a]
            for c in range(x.shape[2]):
                pooled[b, m, c] = x[b, a, c] if normalise else weight[b, a] * x[b, a, c]
        # All sizes before any share: a share is of the whole group.
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


POOL = Loop(_pool)


def _expand(y: Any, anchor: Any, moved: Any, into: Any, places: Any) -> None:
    """Fill ``places`` (B, n, C) as `Hard.expand` does."""
    n = places.shape[1]
    if into.shape != moved.shape or anchor.shape != y.shape[:2] or len(moved) != len(y):
        raise IndexError("tokens and their places do not belong together")
    if anchor.min() < 0 or anchor.max() >= n:
        raise IndexError("a token to keep is not among those there are")
    if moved.size > 0 and (moved.min() < 0 or moved.max() >= n or into.min() < 0 or into.max() >= y.shape[1]):
        raise IndexError("a token to move, or what it joins, is not among those there are")
    for b in range(len(y)):
        # A place that no token covers was pruned; without such places nothing has to be cleared.
        if anchor.shape[1] + moved.shape[1] < n:
            places[b] = 0
        for m in range(anchor.shape[1]):
            places[b, anchor[b, m]] = y[b, m]
        for r in range(moved.shape[1]):
            places[b, moved[b, r]] = y[b, into[b, r]]


EXPAND = Loop(_expand)


def _unit(keys: Any, shortest: float, scaled: Any) -> None:
    """Fill ``scaled`` (B, N, d) as `unit` does."""
    for b in range(keys.shape[0]):
        for n in range(keys.shape[1]):
            key, row = keys[b, n], scaled[b, n]
            square = key[0] * key[0]
            for c in range(1, len(key)):
                square += key[c] * key[c]
            length = max(np.sqrt(square), keys.dtype.type(shortest))
            for c in range(len(key)):
                row[c] = key[c] / length


UNIT = Loop(_unit)


def _unit_mean(
    memory: Any, image: int, head: int, token: int, heads: int, num_prefix: int, shortest: float, scaled: Any
) -> None:
    """Fill ``scaled`` (B, P, d) as `unit_mean_keys` does; see `memory_of`."""
    dim = scaled.shape[2]
    for b in range(scaled.shape[0]):
        for n in range(scaled.shape[1]):
            row, at = scaled[b, n], b * image + (num_prefix + n) * token
            key = memory[at : at + dim]
            for c in range(dim):
                row[c] = key[c]
            for h in range(1, heads):
                key = memory[at + h * head : at + h * head + dim]
                for c in range(dim):
                    row[c] += key[c]
            square = row[0] * row[0]
            for c in range(1, dim):
                square += row[c] * row[c]
            # scaled is a sum: a mean of length `shortest` is `heads` times as long
            length = max(np.sqrt(square), scaled.dtype.type(shortest * heads))
            for c in range(dim):
                row[c] /= length


UNIT_MEAN = Loop(_unit_mean)


def _match(similarity: Any, r: int, num_prefix: int, by_position: bool, index: Any) -> None:
    """Fill ``index`` (see `merge_of`) as `match_alternate` decides."""
    # As in `alternate_split` and `merge_alternate`: sources are the even places of the whole sequence, and the
    # remaining sources stand before the destinations.
    _, sources, destinations = similarity.shape
    first = num_prefix + num_prefix % 2  # source s is token first + 2 s
    kept = num_prefix + sources - r
    worst = np.empty(sources, similarity.dtype)
    stays = np.empty(sources, np.bool_)
    for b in range(similarity.shape[0]):
        for s in range(sources):
            best = similarity[b, s, 0]
            for d in range(1, destinations):
                best = max(best, similarity[b, s, d])
            worst[s] = -best
        # Negated and stable, so that equal similarities keep the order of the operators.
        order = np.argsort(worst, kind="mergesort")
        stays[:] = True
        for m in range(r):
            s = order[m]
            stays[s] = False
            partner = 0
            for d in range(1, destinations):
                if similarity[b, s, d] > similarity[b, s, partner]:
                    partner = d
            index[b, kept + destinations + m] = first + 2 * s
            index[b, kept + destinations + r + m] = kept + partner
        for n in range(num_prefix):
            index[b, n] = n
        at = num_prefix
        for m in range(r, sources):
            index[b, at] = first + 2 * order[m]
            at += 1
        if by_position:
            at = num_prefix
            for s in range(sources):
                if stays[s]:
                    index[b, at] = first + 2 * s
                    at += 1
        for d in range(destinations):
            index[b, kept + d] = num_prefix + 1 - num_prefix % 2 + 2 * d


MATCH = Loop(_match)


def _both_ways(attraction: Any, forth: int, r: int, num_prefix: int, index: Any) -> None:
    """Fill ``index`` (see `merge_of`) as `match_both_ways` decides."""
    _, evens, odds = attraction.shape
    # The even patches that stay come first, then the odd ones; indices into `attraction` count each kind by itself.
    even, odd = num_prefix + num_prefix % 2, num_prefix + 1 - num_prefix % 2  # the first token of each kind
    kept, anchors = num_prefix + evens - forth, num_prefix + evens + odds - r
    place, end = np.empty(evens, np.int64), np.empty(odds, np.int64)
    worst_even, worst_odd = np.empty(evens, attraction.dtype), np.empty(odds, attraction.dtype)
    for b in range(attraction.shape[0]):
        moved, into = index[b, anchors : anchors + r], index[b, anchors + r :]
        for i in range(evens):
            worst_even[i] = -attraction[b, i].max()
        order = np.argsort(worst_even, kind="mergesort")
        place[:] = 0
        for m in range(forth):
            partner, row = 0, attraction[b, order[m]]
            for j in range(1, odds):
                if row[j] > row[partner]:
                    partner = j
            moved[m], into[m] = even + 2 * order[m], partner
            place[order[m]] = -1  # it no longer attracts any
        index[b, :num_prefix] = np.arange(num_prefix)
        at = num_prefix
        for i in range(evens):
            if place[i] >= 0:
                index[b, at], place[i] = even + 2 * i, at
                at += 1
        # Only even patches that stayed attract odd ones; none is needed if all r went forth.
        worst_odd[:] = np.inf
        for i in range(evens):
            if place[i] >= 0 and forth < r:
                for j in range(odds):
                    worst_odd[j] = min(worst_odd[j], -attraction[b, i, j])
        order = np.argsort(worst_odd, kind="mergesort") if forth < r else np.arange(odds)
        for m in range(odds):
            j = order[m]
            if m < r - forth:
                partner = -1
                for i in range(evens):
                    if place[i] >= 0 and (partner < 0 or attraction[b, i, j] > attraction[b, partner, j]):
                        partner = i
                moved[forth + m], into[forth + m] = odd + 2 * j, place[partner]
                end[j] = place[partner]
            else:
                end[j] = kept + m - (r - forth)
                index[b, end[j]] = odd + 2 * j
        for m in range(forth):
            into[m] = end[into[m]]  # patches that joined an odd one move on with it


BOTH_WAYS = Loop(_both_ways)
