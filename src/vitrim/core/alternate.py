"""Bipartite matching of even with odd places: ToMe's, one way, and MCTF's, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrim.core import loops
from vitrim.core.assignment import Hard, merge, merge_of
from vitrim.core.matching import most_similar_first, pair_most_similar
from vitrim.core.tokens import TokenState


def alternate_split(num_prefix: int) -> tuple[slice, slice]:
    """Sources and destinations among the patch tokens: even and odd places of the whole sequence, prefix counted.

    ToMe section 3 splits all tokens, class token included, into even places (sources) and odd places. Prefix tokens
    neither move nor receive, so the same split is written on patches: with a class token in front, patch 0 is odd.

    Example:
        >>> alternate_split(num_prefix=1)
        (slice(1, None, 2), slice(0, None, 2))
    """
    first = num_prefix % 2
    return slice(first, None, 2), slice(1 - first, None, 2)


def merge_alternate(state: TokenState, order: Tensor, partner: Tensor, *, by_position: bool = True) -> Hard:
    """Merge the first of the sources into destinations of the `alternate_split`; the others stay.

    As `merge_most_similar` with that split, in half as many operations: at batch 1 their number is what merging costs.

    Args:
        state: the current state.
        order: (B, S) the sources, those that merge first.
        partner: (B, r) which destination each of the first r of them joins, in [0, D).
        by_position: put the sources that stay in order of position; False: leave them as they are in ``order``.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 7, 8), num_prefix=1)
        >>> hard = merge_alternate(state, order=torch.tensor([[2, 1, 0]]), partner=torch.tensor([[0]]))
        >>> hard.anchor, hard.moved, hard.into
        (tensor([[0, 2, 4, 1, 3, 5]]), tensor([[6]]), tensor([[3]]))
    """
    batch, r, p = order.shape[0], partner.shape[1], state.num_prefix
    index = torch.arange(state.num_tokens, device=order.device)
    sources, destinations = alternate_split(p)
    tokens = torch.take(index[p:][sources], order)
    kept = tokens[:, r:].sort(dim=1).values if by_position else tokens[:, r:]
    anchor = torch.cat([index[:p].expand(batch, -1), kept, index[p:][destinations].expand(batch, -1)], dim=1)
    return Hard(anchor, moved=tokens[:, :r], into=partner + (p + kept.shape[1]))


def match_alternate(state: TokenState, similarity: Tensor, r: int, *, by_position: bool = True) -> Hard:
    """Merge the ``r`` most similar pairs of the `alternate_split`: `merge_alternate` of what `pair_most_similar` finds.

    Args:
        state: the current state.
        similarity: (B, S, D) of the sources and destinations of that split, as of `cosines`.
        r: how many sources merge, 0 <= r <= S.
        by_position: as for `merge_alternate`.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 5, 8), num_prefix=1)
        >>> hard = match_alternate(state, torch.tensor([[[0.1, 0.2], [0.9, 0.3]]]), 1)
        >>> hard.anchor, hard.moved, hard.into
        (tensor([[0, 2, 1, 3]]), tensor([[4]]), tensor([[2]]))
    """
    if not loops.suit(similarity):
        return merge_alternate(state, *pair_most_similar(similarity, r), by_position=by_position)
    index = torch.empty(similarity.shape[0], state.num_tokens + r, dtype=torch.int64)
    _MATCH(similarity, r, state.num_prefix, by_position, index)
    return merge_of(index, r)


def _match(similarity: Any, r: int, num_prefix: int, by_position: bool, index: Any) -> None:
    """Fill ``index``, see `merge_of`, as `match_alternate` decides, as a loop."""
    _, sources, destinations = similarity.shape
    first = num_prefix + num_prefix % 2  # a source is at place first + 2 s
    kept = num_prefix + sources - r
    worst = np.empty(sources, similarity.dtype)
    stays = np.empty(sources, np.bool_)
    for b in range(similarity.shape[0]):
        for s in range(sources):
            best = similarity[b, s, 0]
            for d in range(1, destinations):
                best = max(best, similarity[b, s, d])
            worst[s] = -best
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


_MATCH = loops.Loop(_match)


def match_both_ways(state: TokenState, attraction: Tensor, r: int, bidirectional: bool = True) -> Hard:
    """Merge ``r`` patches: floor(r / 2) from even to odd places, then the rest from odd places to the even ones left.

    The sets are those of the `alternate_split`, even places first if there is no prefix. The new order: even places in
    order, then odd ones by descending attraction in the second phase.

    Args:
        state: the current state.
        attraction: (B, E, O) of the patches at even and odd places.
        r: how many fuse, 0 < r <= (E + O) // 2.
        bidirectional: False: all r from even to odd places.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 5, 8), num_prefix=1)
        >>> hard = match_both_ways(state, torch.tensor([[[0.1, 0.2], [0.9, 0.3]]]), 2)
        >>> hard.anchor, hard.moved, hard.into
        (tensor([[0, 2, 1]]), tensor([[4, 3]]), tensor([[2, 1]]))
    """
    if loops.suit(attraction):
        index = torch.empty(attraction.shape[0], state.num_tokens + r, dtype=torch.int64)
        _BOTH_WAYS(attraction, r // 2 if bidirectional else r, r, state.num_prefix, index)
        return merge_of(index, r)
    even, odd = alternate_split(state.num_prefix)
    patches = torch.arange(state.num_patches, device=attraction.device)
    return merge(state, *match(attraction, patches[even], patches[odd], r, bidirectional))


def _both_ways(attraction: Any, forth: int, r: int, num_prefix: int, index: Any) -> None:
    """Fill ``index``, see `merge_of`, as `match_both_ways` decides, as a loop."""
    _, evens, odds = attraction.shape
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
            place[order[m]] = -1  # it attracts nothing any more
        index[b, :num_prefix] = np.arange(num_prefix)
        at = num_prefix
        for i in range(evens):
            if place[i] >= 0:
                index[b, at], place[i] = even + 2 * i, at
                at += 1
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
            into[m] = end[into[m]]  # what an odd patch received goes where it goes


_BOTH_WAYS = loops.Loop(_both_ways)


def match(attraction: Tensor, even: Tensor, odd: Tensor, r: int, bidirectional: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pair patches: those that stay (B, P - r), that move (B, r), and into which of the staying ones (B, r).

    Args:
        attraction: (B, E, O) W of the patches at even and odd places.
        even, odd: (E,), (O,) their patch indices.
        r: how many fuse, 0 < r <= (E + O) // 2.
        bidirectional: floor(r / 2) of them from even to odd places, the rest back; else all from even to odd.
    """
    batch, evens, odds = attraction.shape
    forth = r // 2 if bidirectional else r
    moved, kept, partner = move_evens(attraction, forth)
    if forth == r:
        return torch.cat([even[kept], odd.expand(batch, odds)], dim=1), even[moved], partner + kept.shape[1]
    if forth:  # an even patch that has moved attracts nothing any more
        attraction = attraction.scatter(1, moved.unsqueeze(2).expand(-1, -1, odds), -torch.inf)
    order = most_similar_first(attraction.amax(dim=1))
    moved_back, stays = order[:, : r - forth], order[:, r - forth :]
    into = attraction.gather(2, moved_back.unsqueeze(1).expand(-1, evens, -1)).argmax(dim=1)
    if forth:
        place = torch.arange(kept.shape[1] + stays.shape[1], device=order.device).expand(batch, -1)
        first, last = place[:, : kept.shape[1]], place[:, kept.shape[1] :]
        into = order.new_zeros(batch, evens).scatter(1, kept, first).gather(1, into)
        # where each odd patch ends: behind the even ones, or in one of them; what it received goes with it
        end = order.new_zeros(batch, odds).scatter(1, order, torch.cat([into, last], dim=1))
        into = torch.cat([end.gather(1, partner), into], dim=1)
    return torch.cat([even[kept], odd[stays]], dim=1), torch.cat([even[moved], odd[moved_back]], dim=1), into


def move_evens(attraction: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` even patches of highest attraction, the others in order, and the odd partners of the first.

    Args:
        attraction: (B, E, O), as of `match`.
        count: 0 <= count <= E.

    Returns:
        (B, count) and (B, E - count) even patches, and (B, count) odd ones, counted among their kind.
    """
    if count == 0:
        kept = torch.arange(attraction.shape[1], device=attraction.device).expand(attraction.shape[0], -1)
        return kept[:, :0], kept, kept[:, :0]
    order, partner = pair_most_similar(attraction, count)
    return order[:, :count], order[:, count:].sort(dim=1).values, partner
