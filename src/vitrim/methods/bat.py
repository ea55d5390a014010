"""BAT: attentive patches are matched, inattentive ones clustered (Long et al., Beyond Attentive Tokens, CVPR 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, merge
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.matching import best_partners, density_peaks, distances, most_similar_first, nearest_centre, unit
from vitrim.core.method import Traits
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, KeepRule
from vitrim.core.scoring import ScoredPruning, patch_score
from vitrim.core.tokens import TokenState, take


@dataclass(frozen=True)
class Decoupled:
    """An amount: the patches that ``share`` keeps, less ``pairs`` of them, plus ``clusters`` of the others.

    Example:
        >>> from vitrim.core.schedule import Keep
        >>> Decoupled(Keep(0.7), pairs=4, clusters=6).parts(196, 196)
        (138, 4, 6)
    """

    share: Amount
    pairs: int
    clusters: int

    def parts(self, initial: int, current: int) -> tuple[int, int, int]:
        """Numbers of attentive patches, of those that merge (at most every second), and of clusters of the rest."""
        attentive = max(1, min(self.share.keep(initial, current), current))
        if attentive == current:
            return current, 0, 0
        return attentive, min(self.pairs, attentive // 2), min(self.clusters, current - attentive)

    def keep(self, initial: int, current: int) -> int:
        attentive, pairs, clusters = self.parts(initial, current)
        return attentive - pairs + clusters


class BAT(ScoredPruning):
    """Keep the patches the class token attends to, without duplicates, and a summary of the rest.

    Formulas and deviations are in docs/methods/bat.md.

    Example:
        >>> BAT(keep_rate=0.7).counts(196, 12)[-1]
        68
    """

    name = "bat"
    paper = "Beyond Attentive Tokens: Incorporating Token Importance and Diversity for Efficient ViTs (CVPR 2023)"
    kind = "merge"
    traits = Traits(aligns=False)

    rule: KeepRule = Field("ceil_current", description="how keep_rate becomes a count")
    pairs: int = Field(4, ge=0, description="attentive patches that merge into another attentive one, at each stage")
    clusters: int = Field(4, ge=1, description="tokens that the inattentive patches become, at each stage")

    def amounts(self, num_layers: int) -> list[Amount | None]:
        shares = super().amounts(num_layers)
        return [None if share is None else Decoupled(share, self.pairs, self.clusters) for share in shares]


@register(BAT)
class BATReducer(Reducer[BAT]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        amount = self.layer.amount
        assert isinstance(amount, Decoupled)
        count, pairs, clusters = amount.parts(state.initial_patches, state.num_patches)
        score = patch_score(attention, state, self.config.score)
        rank = score.argsort(dim=1, descending=True, stable=True)
        attentive, others = rank[:, :count], rank[:, count:]
        patches = x[:, state.num_prefix :].detach()
        centres, joining, cluster = cluster_inattentive(take(patches, others), clusters)
        keep, moved, into = attentive, others.gather(1, joining), cluster + (count - pairs)
        if pairs:  # OpenVINO does not compile the empty matrices of no pairs
            kept, matched, partner = match_attentive(take(patches, attentive), pairs)
            keep = attentive.gather(1, kept)
            moved = torch.cat([attentive.gather(1, matched), moved], dim=1)
            into = torch.cat([partner, into], dim=1)
        # probabilities may underflow to 0: such a group gets equal weights
        weight = score.clamp_min(torch.finfo(score.dtype).tiny)
        keep = torch.cat([keep, others.gather(1, centres)], dim=1)
        return merge(state, keep=keep, moved=moved, into=into, weight=state.pad_prefix(weight))


def match_attentive(patches: Tensor, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``patches`` (B, A, C), most attentive first, into those that stay (B, A - pairs) and those that merge (B,
    pairs), and find the entry of the former that each joins. Odd ranks merge into even ones.
    """
    vectors = unit(patches)
    # Ranks 1, 3, 5 ... are the sources and 0, 2, 4 ... the destinations, so place m of the sources is rank 2 m + 1.
    similarity, best = best_partners(vectors[:, 1::2], vectors[:, ::2])
    moved = most_similar_first(similarity)[:, :pairs]
    gone = torch.zeros(patches.shape[:2], dtype=torch.int8, device=patches.device).scatter(1, 2 * moved + 1, 1)
    kept = gone.argsort(dim=1, stable=True)[:, : patches.shape[1] - pairs]
    # The place of each rank among those that stay; destinations always stay.
    place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    place = torch.zeros_like(gone, dtype=torch.int64).scatter(1, kept, place)
    return kept, 2 * moved + 1, place.gather(1, 2 * best.gather(1, moved))


def cluster_inattentive(patches: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centres (B, K) among the ``patches`` (B, P, C), the others (B, P - K), and which centre each of these joins."""
    distance = distances(patches)
    log_density = log_densities(distance, patches.shape[-1])
    centres = density_peaks(distance, log_density, distance.amax(dim=2, keepdim=True), count)
    cluster = nearest_centre(distance, centres)
    # Flags sort stably: the patches that are no centres, in order, as many in every image.
    is_centre = torch.zeros(cluster.shape, dtype=torch.int8, device=cluster.device).scatter(1, centres, 1)
    others = is_centre.argsort(dim=1, stable=True)[:, : cluster.shape[1] - count]
    return centres, others, cluster.gather(1, others)


def log_densities(distance: Tensor, channels: int) -> Tensor:
    """(B, P) log rho: minus the mean squared ``distance`` (B, P, P) to all patches, itself included, per channel."""
    return -distance.square().mean(dim=2) / channels
