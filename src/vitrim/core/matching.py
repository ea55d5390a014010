"""Bipartite matching and clustering, shared by the merging methods."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.assignment import Hard, merge, merge_of
from vitrim.core.attention import Attention
from vitrim.core.tokens import TokenState, decision_dtype, flagged, take

SHORTEST = 1e-12  # the least length that a vector is divided by


def unit(keys: Tensor) -> Tensor:
    """``keys`` (B, N, d) scaled to length 1, without gradient: which tokens merge is a decision. Zeros stay zeros."""
    # Called once for all tokens, before they are split: at batch 1, matching costs its number of small operations.
    keys = keys.detach()
    if compiled.suit(keys):
        scaled = torch.empty_like(keys, memory_format=torch.contiguous_format)
        compiled.UNIT(keys, SHORTEST, scaled)
        return scaled
    length: Tensor = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    return keys / length.clamp_min(SHORTEST)


def unit_mean_keys(attention: Attention, num_prefix: int) -> Tensor:
    """(B, P, d) keys of the patches, averaged over heads and scaled to length 1, as ToMe compares them.

    Example:
        >>> attention = Attention(*torch.randn(3, 1, 2, 5, 8), scale=1.0)
        >>> unit_mean_keys(attention, num_prefix=1).norm(dim=-1).round(decimals=5)
        tensor([[1., 1., 1., 1.]])
    """
    keys = attention.keys.detach()
    # Only plain keys with contiguous rows: cells and stored maps have a mean of their own.
    plain = type(attention).mean_keys is Attention.mean_keys and keys.stride(3) == 1
    if not (plain and compiled.suit(keys)):
        return unit(attention.mean_keys()[:, num_prefix:])
    batch, heads, n, dim = keys.shape
    scaled = keys.new_empty(batch, n - num_prefix, dim)
    compiled.UNIT_MEAN(*compiled.memory_of(keys), heads, num_prefix, SHORTEST, scaled)
    return scaled


def alternate_similarity(attention: Attention, num_prefix: int) -> Tensor:
    """(B, S, D) cosines of the mean keys of sources and destinations of the `alternate_split`."""
    sources, destinations = alternate_split(num_prefix)
    if compiled.suit(attention.keys.detach()):
        keys = unit_mean_keys(attention, num_prefix)
        return cosines(keys[:, sources], keys[:, destinations])
    return alternate_cosines(attention.mean_keys(), num_prefix)


def alternate_cosines(vectors: Tensor, num_prefix: int) -> Tensor:
    """(B, S, D) cosines of the ``vectors`` (B, N, d) of sources and destinations of the `alternate_split`."""
    return cosines(*split_alternately(vectors, num_prefix, unit))


def split_alternately(
    values: Tensor, num_prefix: int, change: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Split ``values`` (B, N, ...) of all tokens into sources (B, S, ...) and destinations (B, D, ...).

    ``change``, if given, is applied to all patches first.
    """
    # One operation selects both: engines may be slow at strided rows, and pay for every operation.
    patches = torch.arange(num_prefix, values.shape[1], device=values.device)
    split = [patches[part] for part in alternate_split(num_prefix)]
    values = values.index_select(1, torch.cat(split))
    sources, destinations = (values if change is None else change(values)).split([len(part) for part in split], dim=1)
    return sources, destinations


def best_partners(sources: Tensor, destinations: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Similarity and index (B, S) of the best of ``destinations`` (B, D, d) for each of ``sources`` (B, S, d).

    Both have length 1 (see `unit`); ``real`` (B, D) is False for padding.
    """
    similarity = cosines(sources.detach(), destinations.detach())
    if real is not None:
        similarity = similarity.masked_fill(~real[:, None, :], -torch.inf)
    best, index = similarity.max(dim=-1)
    return best, index


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """(B, S, D) products of unit vectors ``a`` (B, S, d) and ``b`` (B, D, d), in full precision. Differentiable."""
    with full_precision(a):
        return torch.bmm(a, b.transpose(1, 2))


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off for the device of ``x``: it would run products that decide in half precision."""
    kind = x.device.type
    # meta has no autocast; torch.compile of 2.11 cannot query which devices have it
    # Entered only where autocast is on, because entering costs as much as several small operations.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def most_similar_first(best: Tensor) -> Tensor:
    """(B, S) sources in descending order of their similarity ``best`` (B, S) to their partner; ties by index."""
    return best.argsort(dim=1, descending=True, stable=True)


def pair_most_similar(similarity: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """The sources (B, S), most similar first, and the destinations (B, r) of the first ``r`` of them, 0 <= r <= S.

    Example:
        >>> pair_most_similar(torch.tensor([[[0.1, 0.2], [0.9, 0.3]]]), 1)
        (tensor([[1, 0]]), tensor([[0]]))
    """
    order = most_similar_first(similarity.amax(dim=-1))
    # Finding a partner costs more than the maximum, so only sources that move get one.
    return order, take(similarity, order[:, :r]).argmax(dim=-1)


def most_similar(best: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """The ``r`` sources (B, r) of highest ``best`` (B, S), 0 <= r <= S, and the rest (B, S - r) in ascending order."""
    order = most_similar_first(best)
    return order[:, :r], order[:, r:].sort(dim=1).values


def merge_most_similar(
    state: TokenState, sources: Tensor, destinations: Tensor, best: Tensor, partner: Tensor, r: int
) -> Hard:
    """Merge the ``r`` sources with the most similar partners, 0 <= r <= S; the others stay, before all destinations.

    Args:
        sources: (S,) or (B, S) patch indices of the sources.
        destinations: (D,) or (B, D) patch indices of the destinations.
        best: (B, S) similarity of each source to its partner.
        partner: (B, S) its destination, in [0, D).
    """
    moved, kept = most_similar(best, r)
    keep = torch.cat([_lookup(sources, kept), destinations.expand(moved.shape[0], destinations.shape[-1])], dim=1)
    return merge(state, keep, _lookup(sources, moved), partner.gather(1, moved) + kept.shape[1])


def merge_flagged(state: TokenState, sources: Tensor, destinations: Tensor, merges: Tensor, partner: Tensor) -> Hard:
    """Merge the sources of a single image that ``merges`` (1, S) flags; otherwise as `merge_most_similar`."""
    moved, kept = flagged(merges), flagged(~merges)
    keep = torch.cat([_lookup(sources, kept), destinations.expand(1, destinations.shape[-1])], dim=1)
    # An image that merges nothing keeps its order, because the next layer splits by place.
    keep = torch.where(merges.any(), keep, torch.arange(keep.shape[1], device=keep.device))
    return merge(state, keep, _lookup(sources, moved), partner.gather(1, moved) + kept.shape[1])


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    """Entries ``index`` (B, M) of a ``table`` (S,) or (B, S)."""
    # torch.take checks for an empty table, which an export cannot tell of a data-dependent size
    return table[index] if table.dim() == 1 else table.gather(1, index)


def distances(patches: Tensor) -> Tensor:
    """(B, P, P) Euclidean distances between the ``patches`` (B, P, C), in at least float32. No gradient flows."""
    wide = patches.detach().to(decision_dtype(patches.dtype))
    return torch.cdist(wide, wide)


def nearest_centre(distance: Tensor, centres: Tensor) -> Tensor:
    """(B, P) index in [0, K) of the nearest of the distinct ``centres`` (B, K), by ``distance`` (B, P, P)."""
    cluster = distance.gather(2, centres[:, None, :].expand(-1, distance.shape[1], -1)).argmin(dim=2)
    # A centre belongs to itself, also where another lies at distance 0.
    own = torch.arange(centres.shape[1], device=centres.device).expand_as(centres)
    return cluster.scatter(1, centres, own)


def merge_clusters(state: TokenState, centres: Tensor, cluster: Tensor, weight: Tensor) -> Hard:
    """Merge every cluster into the plain weighted sum of its patches, at the place of its centre.

    Args:
        centres: (B, K) distinct patch indices, in output order.
        cluster: (B, P) the cluster of each patch, in [0, K).
        weight: (B, P) weights of the patches.
    """
    is_centre = torch.zeros_like(cluster, dtype=torch.bool).scatter_(1, centres, 1)
    # False sorts before True, and stably: the patches that are no centres, in order, as many in every image.
    others = is_centre.to(torch.int8).sort(dim=1, stable=True).indices[:, : cluster.shape[1] - centres.shape[1]]
    weight = torch.cat([weight.new_ones(weight.shape[0], state.num_prefix), weight], dim=1)
    return merge(state, centres, others, cluster.gather(1, others), weight=weight, normalise=False)


def density_peaks(distance: Tensor, log_density: Tensor, farthest: Tensor, count: int) -> Tensor:
    """(B, count) patches with the largest product of density and distance to a denser patch.

    Args:
        distance: (B, P, P) between patches.
        log_density: (B, P); the logarithm keeps the order and does not underflow.
        farthest: see `separations`.
    """
    # A product of densities near zero would underflow; a sum of logarithms orders the same.
    peak = log_density + separations(distance, log_density, farthest).log()
    return peak.argsort(dim=1, descending=True, stable=True)[:, :count]


def separations(distance: Tensor, density: Tensor, farthest: Tensor) -> Tensor:
    """(B, P) distance of every patch to the nearest one of higher ``density`` (B, P), as in density peak clustering.

    ``farthest`` is the value for the densest patch; broadcasts to (B, P, P).
    """
    denser = density[:, None, :] > density[:, :, None]
    return torch.where(denser, distance, farthest).amin(dim=2)


def merge_groups(state: TokenState, stands: Tensor, count: int, weight: Tensor | None = None) -> Hard:
    """Merge every group into the mean of its patches, at the place of its representative; groups in order of place.

    Args:
        stands: (B, P) the representative of each patch's group; it represents itself.
        count: groups of every image.
        weight: (B, N) weights of all tokens in the means; None for their sizes.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 5, 8), num_prefix=1)
        >>> hard = merge_groups(state, torch.tensor([[0, 1, 0, 1]]), 2)
        >>> hard.anchor, hard.moved, hard.into
        (tensor([[0, 1, 2]]), tensor([[3, 4]]), tensor([[1, 2]]))
    """
    itself = stands == torch.arange(stands.shape[1], device=stands.device)
    # Representatives first, in order of place, then the others: the count of the former is the same in every image.
    order = itself.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
    keep, moved = order.split([count, order.shape[1] - count], dim=1)
    place = itself.cumsum(dim=1) - 1  # of every representative, among representatives
    return merge(state, keep, moved, place.gather(1, stands.gather(1, moved)), weight=weight)


def alternate_split(num_prefix: int) -> tuple[slice, slice]:
    """Sources and destinations among the patches (ToMe section 3): even and odd places of the whole sequence.

    Prefix tokens neither move nor receive, and count: with a class token in front, patch 0 is odd.

    Example:
        >>> alternate_split(num_prefix=1)
        (slice(1, None, 2), slice(0, None, 2))
    """
    first = num_prefix % 2
    return slice(first, None, 2), slice(1 - first, None, 2)


def merge_alternate(state: TokenState, order: Tensor, partner: Tensor, *, by_position: bool = True) -> Hard:
    """Merge the first r sources into destinations of the `alternate_split`; the others stay, before the destinations.

    Args:
        order: (B, S) the sources, those that merge first.
        partner: (B, r) the destination of each of the first r, in [0, D).
        by_position: sort the remaining sources by position; False: keep their order.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 7, 8), num_prefix=1)
        >>> hard = merge_alternate(state, order=torch.tensor([[2, 1, 0]]), partner=torch.tensor([[0]]))
        >>> hard.anchor, hard.moved, hard.into
        (tensor([[0, 2, 4, 1, 3, 5]]), tensor([[6]]), tensor([[3]]))
    """
    # As `merge_most_similar` with that split, in half as many operations, which are the cost at batch 1.
    batch, r, n, p = order.shape[0], partner.shape[1], state.num_tokens, state.num_prefix
    index = torch.arange(n, device=order.device)
    sources, destinations = alternate_split(p)
    kept = order.shape[1] - r
    into = partner + (p + kept)
    moved = 2 * order[:, :r] + (p + sources.start)  # every other token, counted from the first source
    if not by_position:
        tokens = 2 * order[:, r:] + (p + sources.start)
        anchor = torch.cat([index[:p].expand(batch, -1), tokens, index[p:][destinations].expand(batch, -1)], dim=1)
        return Hard(anchor, moved, into)
    # one sort gives both: destinations sort behind all sources, and moved tokens, in order, behind those
    receives = (index >= p) & ((index - destinations.start - p) % 2 == 0)
    place = torch.where(receives, index + n, index).expand(batch, -1)
    last = torch.arange(2 * n, 2 * n + r, device=order.device).expand(batch, -1)
    anchor, moved = place.scatter(1, moved, last).argsort(dim=1).split([n - r, r], dim=1)
    return Hard(anchor, moved, into)


def match_alternate(state: TokenState, similarity: Tensor, r: int, *, by_position: bool = True) -> Hard:
    """Merge the ``r`` most similar pairs of the `alternate_split` by ``similarity`` (B, S, D), 0 <= r <= S."""
    if not compiled.suit(similarity):
        return merge_alternate(state, *pair_most_similar(similarity, r), by_position=by_position)
    index = torch.empty(similarity.shape[0], state.num_tokens + r, dtype=torch.int64)
    compiled.MATCH(similarity, r, state.num_prefix, by_position, index)
    return merge_of(index, r)


def match_both_ways(state: TokenState, attraction: Tensor, r: int, bidirectional: bool = True) -> Hard:
    """Merge ``r`` patches: floor(r / 2) from even to odd places, then the rest from odd to remaining even places.

    The new order is even places in order, then odd ones by descending attraction in the second phase.

    Args:
        attraction: (B, E, O) of the patches at even and odd places; even ones first without a prefix.
        r: patches that merge, 0 < r <= (E + O) // 2.
        bidirectional: False: all r from even to odd places.

    Example:
        >>> state = TokenState.start(torch.zeros(1, 5, 8), num_prefix=1)
        >>> hard = match_both_ways(state, torch.tensor([[[0.1, 0.2], [0.9, 0.3]]]), 2)
        >>> hard.anchor, hard.moved, hard.into
        (tensor([[0, 2, 1]]), tensor([[4, 3]]), tensor([[2, 1]]))
    """
    if compiled.suit(attraction):
        index = torch.empty(attraction.shape[0], state.num_tokens + r, dtype=torch.int64)
        compiled.BOTH_WAYS(attraction, r // 2 if bidirectional else r, r, state.num_prefix, index)
        return merge_of(index, r)
    even, odd = alternate_split(state.num_prefix)
    patches = torch.arange(state.num_patches, device=attraction.device)
    return merge(state, *match(attraction, patches[even], patches[odd], r, bidirectional))


def match(attraction: Tensor, even: Tensor, odd: Tensor, r: int, bidirectional: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pair patches as `match_both_ways`: remaining (B, P - r), moved (B, r), and the places these join (B, r).

    ``even`` (E,) and ``odd`` (O,) are their patch indices.
    """
    batch, evens, odds = attraction.shape
    forth = r // 2 if bidirectional else r
    moved, kept, partner = move_evens(attraction, forth)
    if forth == r:
        return torch.cat([even[kept], odd.expand(batch, odds)], dim=1), even[moved], partner + kept.shape[1]
    if forth:  # a moved patch no longer attracts any
        attraction = attraction.scatter(1, moved.unsqueeze(2).expand(-1, -1, odds), -torch.inf)
    # Second phase: odd patches by their best even partner that stayed.
    order = most_similar_first(attraction.amax(dim=1))
    moved_back, stays = order[:, : r - forth], order[:, r - forth :]
    into = attraction.gather(2, moved_back.unsqueeze(1).expand(-1, evens, -1)).argmax(dim=1)
    if forth:
        # Partners are indices among even patches; the result counts places among those that remain.
        place = torch.arange(kept.shape[1] + stays.shape[1], device=order.device).expand(batch, -1)
        first, last = place[:, : kept.shape[1]], place[:, kept.shape[1] :]
        into = order.new_zeros(batch, evens).scatter(1, kept, first).gather(1, into)
        # the final place of each odd patch, behind the even ones or in one of them; patches that joined it follow
        end = order.new_zeros(batch, odds).scatter(1, order, torch.cat([into, last], dim=1))
        into = torch.cat([end.gather(1, partner), into], dim=1)
    return torch.cat([even[kept], odd[stays]], dim=1), torch.cat([even[moved], odd[moved_back]], dim=1), into


def move_evens(attraction: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` even patches of highest attraction, the others in order, and the odd partners of the former.

    Indices within their kind; ``attraction`` (B, E, O) as in `match`, 0 <= count <= E.
    """
    if count == 0:
        kept = torch.arange(attraction.shape[1], device=attraction.device).expand(attraction.shape[0], -1)
        return kept[:, :0], kept, kept[:, :0]
    order, partner = pair_most_similar(attraction, count)
    return order[:, :count], order[:, count:].sort(dim=1).values, partner
