"""Bipartite matching, shared by the merging methods: split the patch tokens in two, give each source its best partner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.assignment import Hard, merge
from vitrim.tokens import TokenState


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


def best_partners(sources: Tensor, destinations: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosine similarity and index (B, S) of the best of the ``destinations`` (B, D, d) for each of ``sources`` (B, S, d).

    No gradient flows: which tokens merge is a decision. ``real`` (B, D) marks destinations that are not padding.
    """
    with torch.no_grad():
        similarity = F.normalize(sources, dim=-1) @ F.normalize(destinations, dim=-1).transpose(-1, -2)
        if real is not None:
            similarity = similarity.masked_fill(~real[:, None, :], -torch.inf)
        best, index = similarity.max(dim=-1)
    return best, index


def most_similar(best: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Split the sources into the ``r`` most similar (B, r) and the rest (B, S - r), the rest in ascending order.

    Args:
        best: (B, S) similarity of each source to its partner.
        r: how many sources merge, 0 <= r <= S.
    """
    moved = best.topk(r, dim=1).indices
    stays = torch.ones_like(best, dtype=torch.bool).scatter_(1, moved, False)
    # a stable sort that brings the staying sources to the front compacts them in order without a data-dependent shape
    kept = stays.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, : best.shape[1] - r]
    return moved, kept


def merge_most_similar(
    state: TokenState, sources: Tensor, destinations: Tensor, best: Tensor, partner: Tensor, r: int
) -> Hard:
    """Merge the ``r`` sources with the most similar partners; the others stay.

    The new order is that of ToMe: sources that stay, in order, then all destinations.

    Args:
        state: the current state.
        sources: (S,) or (B, S) patch indices of the sources.
        destinations: (D,) or (B, D) patch indices of the destinations.
        best: (B, S) similarity of each source to its partner.
        partner: (B, S) which destination that is, in [0, D).
        r: how many sources merge, 0 <= r <= S.
    """
    moved, kept = most_similar(best, r)
    return merge_sources(state, sources, destinations, partner, moved, kept)


def merge_sources(
    state: TokenState, sources: Tensor, destinations: Tensor, partner: Tensor, moved: Tensor, kept: Tensor
) -> Hard:
    """Merge the sources ``moved`` (B, r) into their partners and keep the sources ``kept`` (B, S - r), in that order."""
    batch = partner.shape[0]
    keep = torch.cat([_lookup(sources, kept), destinations.expand(batch, destinations.shape[-1])], dim=1)
    into = partner.gather(1, moved) + kept.shape[1]
    return merge(state, keep, _lookup(sources, moved), into)


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    """Entries ``index`` (B, M) of a table (S,) or (B, S)."""
    return table[index] if table.dim() == 1 else table.gather(1, index)
