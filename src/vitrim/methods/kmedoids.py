"""K-Medoids: cluster the patches and keep the medoids (Marin et al. 2023; Haurum et al., ICCVW 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, Site, StepOutput
from vitrim.core.matching import distances, merge_clusters, nearest_centre
from vitrim.core.method import Needs, StagedConfig
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount
from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError

WEIGHT = "kmedoids_weight"


class KMedoids(StagedConfig):
    """Cluster the patches by K-medoids with attention as weights; the medoid represents its cluster.

    Formulas and deviations are in docs/methods/kmedoids.md.

    Example:
        >>> KMedoids(keep_rate=0.5).counts(196, 12)[-1]
        24
    """

    name = "kmedoids"
    paper = "Token Pooling in Vision Transformers (WACV 2023)"
    kind = "merge"
    tunable = replace(StagedConfig.tunable, first_place=1)

    iterations: int = Field(3, ge=0, le=1000, description="rounds of assignment and choice of medoids")
    cost: Literal["cluster", "all"] = Field(
        "cluster",
        description="what a medoid minimises: weighted distances to its members; 'all': as published",
    )
    equal_weight: bool = Field(False, description="weights 1, first medoids far apart; no attention map")
    start: Literal["central", "random"] = Field(
        "central",
        description="with equal_weight: first medoid, the patch nearest to all others; 'random': one drawn for all "
        "images, and 'far' by the largest distance, as published",
    )

    def faults(self) -> Iterator[str]:
        if self.start == "random" and not self.equal_weight:
            yield "start=random goes with equal_weight=true; by weight the heaviest patches start"

    def needs(self) -> Needs:
        return Needs(attention_map=not self.equal_weight)

    def obstacle(self) -> str | None:
        return "start=random draws anew in every forward; use start=central" if self.start == "random" else None

    def amounts(self, num_layers: int) -> list[Amount | None]:
        if 0 in self.stages(num_layers) and not self.equal_weight:
            raise VitrimError("kmedoids weighs patches by the attention of the block before: blocks start at 1")
        return super().amounts(num_layers)


class KMedoidsReducer(Reducer[KMedoids]):
    site: ClassVar[Site] = "before"

    def reduce(self, site: Site, x: Tensor, attention: Attention | None, state: TokenState) -> StepOutput:
        if site != "before" or self.layer.amount is None:
            return x, state
        assignment = self(x, attention, state)
        state = replace(state, carry={name: value for name, value in state.carry.items() if name != WEIGHT})
        return (x, state) if assignment is None else assignment.apply(x, state)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        keep = self.num_keep(state)
        with torch.no_grad():
            # an image with NaN has no nearest medoid, and its tokens still need places
            distance = distances(x[:, state.num_prefix :]).nan_to_num(0.0, 0.0, 0.0)
            if self.config.equal_weight:
                weight = distance.new_ones(distance.shape[:2])
                medoids = (
                    published_start(distance, keep) if self.config.start == "random" else farthest_first(distance, keep)
                )
            else:
                weight = state.carry[WEIGHT][:, state.num_prefix :].nan_to_num(0.0)
                medoids = weight.argsort(dim=1, descending=True, stable=True)[:, :keep]
            medoids, cluster = k_medoids(distance, weight, medoids, self.config.iterations, self.config.cost == "all")
            is_medoid = torch.zeros_like(weight).scatter_(1, medoids, 1.0)
        return merge_clusters(state, medoids, cluster, is_medoid)


class WeighingReducer(KMedoidsReducer):
    """Also pass on the attention that tokens received, for the stage in the next block."""

    site = "after"

    def remember(self, attention: Attention, state: TokenState) -> Tensor:
        """(B, N) attention that each token received."""
        return attention.detach().column_mean().detach()

    def reduce(self, site: Site, x: Tensor, attention: Any, state: TokenState) -> StepOutput:
        if site == "after":
            return x, replace(state, carry={**state.carry, WEIGHT: attention})
        return super().reduce(site, x, attention, state)


@register(KMedoids)
def _reducer(config: KMedoids, layer: Layer) -> type[KMedoidsReducer] | None:
    if not config.equal_weight and any(amount is not None for amount in layer.amounts[layer.depth + 1 :][:1]):
        return WeighingReducer
    return None if layer.amount is None else KMedoidsReducer


def k_medoids(
    distance: Tensor, weight: Tensor, medoids: Tensor, iterations: int, over_all: bool = False
) -> tuple[Tensor, Tensor]:
    """Medoids (B, K) after ``iterations`` rounds from the distinct ``medoids``, and the cluster (B, P) of every patch.

    ``over_all``: the published cost, a candidate's own ``weight`` (B, P) times its ``distance`` (B, P, P) to all
    patches.

    Example:
        >>> points = torch.tensor([[[0.0], [1.0], [2.0], [9.0], [10.0], [11.0]]])
        >>> k_medoids(torch.cdist(points, points), torch.ones(1, 6), torch.tensor([[0, 5]]), 1)
        (tensor([[1, 4]]), tensor([[0, 0, 0, 1, 1, 1]]))
    """
    index = torch.arange(distance.shape[1], device=distance.device).expand(distance.shape[:2])
    for _ in range(iterations):
        cluster = nearest_centre(distance, medoids)
        if over_all:
            cost = weight * distance.sum(dim=2)
        else:
            # Only distances inside a cluster count; a mask keeps the shape the same in every image.
            together = cluster[:, :, None] == cluster[:, None, :]
            cost = (distance * together * weight[:, None, :]).sum(dim=2)
        least = cost.new_full(medoids.shape, torch.inf).scatter_reduce(1, cluster, cost, "amin")
        # The lowest index of equal costs, in every cluster.
        candidate = torch.where(cost == least.gather(1, cluster), index, distance.shape[1])
        medoids = torch.full_like(medoids, distance.shape[1]).scatter_reduce(1, cluster, candidate, "amin")
    return medoids, nearest_centre(distance, medoids)


def farthest_first(distance: Tensor, count: int) -> Tensor:
    """(B, count) distinct patches: the one nearest to all others, then always the one farthest from those chosen."""
    return _one_after_another(distance, distance.sum(dim=2).argmin(dim=1, keepdim=True), count, torch.minimum)


def published_start(distance: Tensor, count: int) -> Tensor:
    """(B, count) distinct patches: one drawn for the batch, then always that of the largest distance to any chosen."""
    first = torch.randint(distance.shape[1], (1, 1), device=distance.device).expand(distance.shape[0], 1)
    return _one_after_another(distance, first, count, torch.maximum)


def _one_after_another(
    distance: Tensor, first: Tensor, count: int, joined: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """(B, count) distinct patches: ``first`` (B, 1), then always that of the largest ``joined`` distance."""
    chosen, gap = [first], None
    taken = torch.zeros_like(distance[:, 0], dtype=torch.bool)
    for _ in range(count - 1):
        last = chosen[-1][:, :, None].expand(-1, 1, distance.shape[2])
        to_last, taken = distance.gather(1, last).squeeze(1), taken.scatter(1, chosen[-1], 1)
        gap = to_last if gap is None else joined(gap, to_last)
        # a duplicate of a chosen patch has gap 0 and may still follow
        chosen.append(gap.masked_fill(taken, -1.0).argmax(dim=1, keepdim=True))
    return torch.cat(chosen, dim=1)
