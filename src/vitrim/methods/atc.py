"""ATC: agglomerative clustering of the tokens (Haurum et al., Agglomerative Token Clustering, ECCV 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitrim.core import compiled
from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.matching import cosines, merge_groups, unit_mean_keys
from vitrim.core.method import Count, StagedConfig, Tunable
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, filled_up, per_layer
from vitrim.core.tokens import TokenState, is_traced, no_gradient, whole
from vitrim.errors import VitrimError

Linkage = Literal["single", "complete", "average"]
LINKAGES: tuple[Linkage, ...] = get_args(Linkage)
FAR = 1e30
"""Greater than any distance of two clusters. Finite, because distances are averaged."""


class ATC(StagedConfig):
    """Cluster the patches agglomeratively by their keys, between attention and MLP.

    Formulas and deviations are in docs/methods/atc.md.

    Example:
        >>> ATC(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "atc"
    paper = "Agglomerative Token Clustering (ECCV 2024)"
    kind = "merge"
    runtime = frozenset({"keep_rate", "r", "linkage"})
    tunable = Tunable(
        "keep_rate",
        1.0,
        0.05,
        digits=3,
        per_layer="keep_rate",
        places="blocks",
        first_place=0,
        others=dict.fromkeys(("r",)),
    )

    linkage: Linkage = Field(
        "average",
        description="distance of two clusters: that of their closest members, of their farthest, or the mean over all"
        " pairs",
    )
    r: Count | tuple[Count, ...] | None = Field(
        None,
        description="instead of keep_rate: patches removed per block, or a list from the first block on (0 after "
        "its end)",
    )
    prefix_counts: bool = Field(
        False, description="with r: count prefix tokens, and remove fewer patches by their number, as released"
    )
    proportional: bool = Field(
        True, description="add log(size) to the attention logits, and weigh by size; false: neither (MAE)"
    )

    def faults(self) -> Iterator[str]:
        if self.r is not None and {"keep_rate", "blocks", "rule"} & self.model_fields_set:
            yield "give either r, which is for every block, or keep_rate with blocks and rule"
        if self.prefix_counts and self.r is None:
            yield "prefix_counts goes with r"

    def obstacle(self) -> str | None:
        if self.linkage == "single":
            return None
        return f"linkage={self.linkage} merges cluster by cluster, in no fixed number of steps; use linkage=single"

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return super().stages(num_layers) if self.r is None else tuple(range(num_layers))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        if self.r is None:
            return super().amounts(num_layers)
        return per_layer(filled_up(self.r, num_layers), num_layers)

    def planned(self, num_layers: int, num_prefix: int) -> list[Amount | None]:
        if not self.prefix_counts or self.r is None:
            return super().planned(num_layers, num_prefix)
        each = self.r if isinstance(self.r, tuple) else (self.r,) * num_layers
        fewer = tuple(max(r - num_prefix, 0) for r in each)
        return self.changed("prefix_counts", r=fewer).planned(num_layers, num_prefix)


@register(ATC)
class ATCReducer(Reducer[ATC]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        if is_traced() and self.config.obstacle() is not None:
            raise VitrimError("torch.jit.trace cannot trace atc: how many steps it takes depends on the images")
        count = self.num_keep(state)
        with no_gradient():
            keys = unit_mean_keys(attention, state.num_prefix)
            # an image with NaN has no closest pair, and its tokens still need places
            distance = (1.0 - cosines(keys, keys)).nan_to_num(0.0, 0.0, 0.0)
            stands = agglomerate(distance, self.config.linkage, state.num_patches - count)
        weight = None if self.config.proportional else torch.ones_like(state.size)
        return merge_groups(state, stands, count, weight)


def agglomerate(distance: Tensor, linkage: Linkage, merges: int) -> Tensor:
    """(B, P) the first patch of the cluster of each patch, after the ``merges`` closest mergers; 0 <= merges < P.

    ``distance`` (B, P, P) is at most `FAR`, and overwritten; ``merges`` is the number of patches minus that of
    clusters.

    Example:
        >>> points = torch.tensor([[[0.0], [5.0], [1.0], [9.0]]])
        >>> agglomerate(torch.cdist(points, points), "average", 2)
        tensor([[0, 1, 0, 1]])
    """
    if compiled.suit(distance[:1, :1]):  # for any size: mergers depend on each other, with operators too
        stands = torch.empty(distance.shape[:2], dtype=torch.int64)
        AGGLOMERATE(distance, LINKAGES.index(linkage), merges, stands)
        return stands
    # a product may round d_ij and d_ji differently, and mutual neighbours must find each other
    distance = torch.minimum(distance, distance.mT)
    return spanning(distance, merges) if linkage == "single" else by_rounds(distance, linkage == "average", merges)


def by_rounds(distance: Tensor, average: bool, merges: int) -> Tensor:
    """Agglomerate by complete or ``average`` linkage, merging all mutual nearest neighbours in every round."""
    # Two clusters that are each other's nearest merge at that distance sooner or later: neither linkage brings clusters
    # closer. So the tree equals that of one merger at a time, and its closest mergers are the result. A pair is set
    # aside once enough closer mergers are known.
    batch, n = distance.shape[0], whole(distance.shape[1])
    patch = torch.arange(n, device=distance.device).expand(batch, n)
    into, height = patch, distance.new_full((batch, n), torch.inf)  # the patch that each patch joined, and its distance
    if distance.is_meta or batch == 0:  # nothing is read from it, and no product is behind
        return into
    place, size, highest = patch, torch.ones_like(height), torch.zeros_like(height)
    while True:
        distance.diagonal(dim1=1, dim2=2).fill_(FAR)
        closest, partner = distance.min(dim=2)
        row = patch[:, : partner.shape[1]]
        mutual = (partner.gather(1, partner) == row) & (closest < FAR)
        # rounding must not make a merger closer than those that made its clusters
        apart = torch.maximum(closest, torch.maximum(highest, highest.gather(1, partner)))
        known = torch.cat([height, apart.masked_fill(~(mutual & (row < partner)), torch.inf)], dim=1)
        mutual = mutual & (apart <= known.kthvalue(merges, dim=1, keepdim=True).values)
        first, second = mutual & (row < partner), mutual & (row > partner)
        left = (size > 0).sum(dim=1) - second.sum(dim=1)
        mergers, most = torch.stack([second.sum(dim=1).amax(), left.amax()]).tolist()  # read back from the device
        if mergers == 0:
            break
        into = into.scatter(1, place, torch.where(second, place.gather(1, partner), into.gather(1, place)))
        height = height.scatter(1, place, torch.where(second, apart, height.gather(1, place)))
        # rows, then columns, of the first of a pair become those of the merged cluster
        other = torch.where(first, partner, row)
        both = size + torch.where(first, size.gather(1, partner), 0.0)
        share = torch.where(first, size.gather(1, partner) / both.clamp_min(1.0), 0.0)
        for dim in (1, 2):
            index = other.unsqueeze(3 - dim).expand_as(distance)
            joined = distance.gather(dim, index)
            mean = share.unsqueeze(3 - dim)
            distance = distance.lerp(joined, mean) if average else torch.maximum(distance, joined)
        # the remaining clusters, in order, in the smallest square that holds them in every image
        size = torch.where(second, 0.0, both)
        kept = (size > 0).to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :most]
        highest = torch.where(first, apart, highest).gather(1, kept)
        place, size = place.gather(1, kept), size.gather(1, kept)
        distance = distance.gather(1, kept.unsqueeze(2).expand(-1, -1, distance.shape[2]))
        distance = distance.gather(2, kept.unsqueeze(1).expand(-1, most, -1))
        gone = size == 0
        distance = distance.masked_fill(gone.unsqueeze(1) | gone.unsqueeze(2), FAR)
        distance = torch.minimum(distance, distance.mT)  # rounding must not make a pair unequal
    chosen = height.argsort(dim=1, stable=True)[:, :merges]
    return followed(patch.scatter(1, chosen, into.gather(1, chosen)))


def spanning(distance: Tensor, merges: int) -> Tensor:
    """Agglomerate by single linkage: the shortest edges of a minimum spanning tree, by Boruvka's algorithm."""
    batch, n = distance.shape[0], whole(distance.shape[1])
    patch = torch.arange(n, device=distance.device).expand(batch, n)
    label, found = patch, []
    # In each step, every tree adds its edge to the nearest patch outside, so there are at most half as many trees: the
    # number of steps depends on the shape alone.
    for _ in range((n - 1).bit_length()):
        outside = label.unsqueeze(2) != label.unsqueeze(1)
        length, to = torch.where(outside, distance, torch.inf).min(dim=2)
        # By label: every patch of a tree writes to the tree's entry, and the nearest edge of the tree remains.
        shortest = torch.full_like(length, torch.inf).scatter_reduce(1, label, length, "amin")
        # among equal edges the lowest number, which is the same from both ends
        number = torch.minimum(patch, to) * n + torch.maximum(patch, to)
        number = number.masked_fill(length > shortest.gather(1, label), n * n)
        edge = torch.full_like(number, n * n - 1).scatter_reduce(1, label, number, "amin")
        ends, reaches = (edge // n, edge % n), shortest < torch.inf
        tree, again = joined_trees(label, ends, reaches)
        found.append((shortest.masked_fill(again | ~reaches, torch.inf), *ends))
        label = tree.gather(1, label)
    lengths, one, other = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
    chosen = lengths.argsort(dim=1, stable=True)[:, :merges]
    ends = one.gather(1, chosen), other.gather(1, chosen)
    # the same with these edges alone, which are in order
    label, order = patch, torch.arange(merges, device=distance.device)
    for _ in range((n - 1).bit_length()):
        at = ends[0].new_full((batch, n), merges)
        labels = label.gather(1, ends[0]), label.gather(1, ends[1])
        rank = torch.where(labels[0] != labels[1], order, merges)
        for end in labels:
            at = at.scatter_reduce(1, end, rank, "amin")
        edge = at.clamp(max=merges - 1)
        tree, _ = joined_trees(label, (ends[0].gather(1, edge), ends[1].gather(1, edge)), at < merges)
        label = tree.gather(1, label)
    return torch.full_like(label, n).scatter_reduce(1, label, patch, "amin").gather(1, label)


def joined_trees(label: Tensor, ends: tuple[Tensor, Tensor], reaches: Tensor) -> tuple[Tensor, Tensor]:
    """The label (B, P) of the tree that each tree belongs to after its edge is added, and the edges (B, P) added twice.

    ``ends`` (B, P) each: the patches at the ends of the edge that the tree of each label adds, if it ``reaches`` any.
    """
    itself = torch.arange(label.shape[1], device=label.device).expand_as(label)
    # One end lies in the tree itself: the sum of both labels less its own is the other tree.
    other = label.gather(1, ends[0]) + label.gather(1, ends[1]) - itself
    other = torch.where(reaches, other, itself)
    # the only cycles are two trees that add the same edge
    again = (other.gather(1, other) == itself) & (itself < other)
    return followed(torch.where(again, itself, other)), again


def followed(into: Tensor) -> Tensor:
    """(B, P) ends of the chains that start at each of P places and continue at ``into`` (B, P).

    Example:
        >>> followed(torch.tensor([[0, 0, 1, 2]]))
        tensor([[0, 0, 0, 0]])
    """
    # Every step doubles the length of the chain that is followed.
    for _ in range((whole(into.shape[1]) - 1).bit_length()):
        into = into.gather(1, into)
    return into


def _agglomerate(distance: Any, linkage: int, merges: int, stands: Any) -> None:
    """Fill ``stands`` (B, P) as `agglomerate` does; ``linkage``: 0 single, 1 complete, 2 average."""
    # The two closest clusters merge into the lower number, `merges` times. Each cluster remembers its nearest higher
    # one, which changes only when that one merges: no linkage brings clusters closer.
    n, far = distance.shape[1], distance.dtype.type(np.inf)
    near, least = np.empty(n, np.int64), np.empty(n, distance.dtype)
    count = np.empty(n, distance.dtype)
    for b in range(len(distance)):
        apart, stand = distance[b], stands[b]
        count[:] = 1
        for i in range(n):
            stand[i] = i
            best, at = far, i
            for j in range(i + 1, n):
                if apart[i, j] < best:
                    best, at = apart[i, j], j
            least[i], near[i] = best, at
        for _ in range(merges):
            first = 0
            for i in range(1, n):
                if least[i] < least[first]:
                    first = i
            second = near[first]
            one, other = apart[first], apart[second]
            for i in range(n):
                if linkage == 0:
                    one[i] = min(one[i], other[i])
                elif linkage == 1:
                    one[i] = max(one[i], other[i])
                else:
                    one[i] = (count[first] * one[i] + count[second] * other[i]) / (count[first] + count[second])
            for i in range(n):  # a merged cluster is far from all
                apart[i, first] = one[i]
                apart[i, second] = far
            count[first] += count[second]
            least[second] = far
            near[second] = second
            stand[second] = first
            # Only clusters whose nearest was one of the two look again, among the higher numbers.
            for i in range(second):
                if i != first and near[i] != first and near[i] != second:
                    continue
                best, at = far, i
                for j in range(i + 1, n):
                    if apart[i, j] < best:
                        best, at = apart[i, j], j
                least[i], near[i] = best, at
        for i in range(n):
            stand[i] = stand[stand[i]]  # lower numbers are resolved already


AGGLOMERATE = compiled.Loop(_agglomerate)
