"""ATM: adaptive token merging (Lee and Choi, Lossless Token Merging Even Without Fine-Tuning, ECAI 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, merge
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.matching import (
    alternate_split,
    best_partners,
    cosines,
    match_alternate,
    merge_flagged,
    merge_most_similar,
    unit,
    unit_mean_keys,
)
from vitrim.core.method import Adaptive, Count, MethodConfig, Traits, Tunable
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Limited, per_layer, removed_by
from vitrim.core.scoring import first_ranked, rounded_up
from vitrim.core.tokens import TokenState, decision_dtype, is_traced, sizes_follow, take
from vitrim.errors import VitrimError

ROUNDING: dict[str, Callable[[float], int]] = {
    "floor": math.floor,
    "nearest": lambda count: math.floor(count + 0.5),
    "ceil": math.ceil,
}

THRESHOLDS = {"alpha", "beta", "theta_min", "theta", "granularity", "rounding", "capacity"}
"""Options that decide how many pairs merge."""


def least_alternate(current: int) -> int:
    """The fewest patch tokens that a layer leaves; behind the splitting layer the prefix counts as small tokens."""
    return min(current // 2 + 1, current)


class ATM(Adaptive):
    """Merge the pairs whose keys are more similar than a threshold that falls with depth (section 3 of the paper).

    Formulas and deviations are in docs/methods/atm.md.

    Example:
        >>> [round(theta, 3) for theta in ATM().thresholds(12)[:4]]
        [0.985, 0.939, 0.891, 0.88]
    """

    name = "atm"
    paper = "Lossless Token Merging Even Without Fine-Tuning in Vision Transformers (ECAI 2025)"
    kind = "merge"
    traits = Traits(
        batch_dependent=True, single_images=True, least_kept=least_alternate, fixed_by=("freeze", "capacity")
    )
    runtime = frozenset({"alpha", "beta", "theta_min", "theta", "r"})
    tunable = Tunable(
        "alpha", 1.0, 0.05, digits=4, similarity=True, fixed={"beta": 0.0, "theta_min": 0.0}, per_layer="theta"
    )

    alpha: float = Field(0.985, gt=0.0, le=1.0, description="threshold of the first layer")
    beta: float = Field(0.045, ge=0.0, le=10.0, description="how fast the threshold falls")
    theta_min: float = Field(0.88, ge=-1.0, le=1.0, description="lowest threshold")
    theta: tuple[Annotated[float, Field(ge=-1, le=1)], ...] | None = Field(
        None, description="instead of alpha, beta and theta_min: the threshold of every layer"
    )
    splitting_layer: int | None = Field(
        None, ge=0, description="last layer (counted from 1) with alternate matching; default floor(0.75 L)"
    )
    granularity: Literal["batch", "image"] = Field("batch", description="one amount per batch (paper) or per image")
    r: tuple[Count, ...] | None = Field(
        None, description="instead of thresholds: pairs merged in every layer, the same number in every image"
    )
    capacity: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="slots for patches after every layer, to which images are padded"
    )
    metric: Literal["mean", "concat"] = Field("mean", description="keys averaged over heads, or all heads side by side")
    rounding: Literal["floor", "nearest", "ceil"] = Field("floor", description="how the batch mean becomes an amount")
    proportional: bool = Field(True, description="add log(size) to the attention logits (off for MAE)")
    last_block: Literal["full", "class_token", "auto"] = Field(
        "auto",
        description="'auto' and 'class_token': the last layer computes the class token only; 'full': it merges too",
    )

    def faults(self) -> Iterator[str]:
        if self.theta is not None and {"alpha", "beta", "theta_min"} & self.model_fields_set:
            yield "give either theta, one threshold per layer, or alpha, beta and theta_min"
        if self.r is not None and THRESHOLDS & self.model_fields_set:
            yield "r takes the place of thresholds, granularity, rounding and capacity: give it alone"
        batch_wise = self.granularity == "batch" and "granularity" in self.model_fields_set
        if self.capacity is not None and (batch_wise or "rounding" in self.model_fields_set):
            yield "with a capacity every image is on its own: granularity=image, and nothing is rounded"
        if self.capacity is not None and self.align > 1:
            yield "capacity says how many slots there are, so align has nothing to round"

    def amounts(self, num_layers: int) -> list[Amount | None]:
        for name, each, what in (("theta", self.theta, "thresholds"), ("capacity", self.capacity, "counts")):
            if each is not None and len(each) != num_layers:
                raise VitrimError(f"atm: {name} has {len(each)} {what} but the model has {num_layers} blocks")
        return super().amounts(num_layers) if self.r is None else per_layer(self.r, num_layers)

    def planned(self, num_layers: int, num_prefix: int) -> list[Amount | None]:
        every = super().planned(num_layers, num_prefix)
        least = partial(least_by_size, num_prefix=num_prefix)
        return [
            amount if amount is None or not self.by_size(depth, num_layers) else Limited(amount, least)
            for depth, amount in enumerate(every)
        ]

    def by_size(self, depth: int, num_layers: int) -> bool:
        """True behind the splitting layer, where a layer pairs small with large tokens instead of alternate places."""
        return depth + 1 > (num_layers * 3 // 4 if self.splitting_layer is None else self.splitting_layer)

    def obstacle(self) -> str | None:
        return None if self.capacity is not None else super().obstacle()

    def frozen(self, initial: int, counts: Sequence[float]) -> MethodConfig:
        removed, current = [], initial
        # A mean may be of images that had more pairs than this layer will have.
        for wanted in removed_by(initial, counts):
            removed.append(min(wanted, current - least_alternate(current)))
            current -= removed[-1]
        return self.changed(*THRESHOLDS, r=tuple(removed))

    def bounded(self, counts: Sequence[int]) -> MethodConfig:
        return self.changed("rounding", "align", granularity="image", capacity=tuple(counts))

    def threshold(self, depth: int) -> float:
        """theta_l (Eq. 1) of the layer at ``depth`` = l - 1."""
        if self.theta is not None:
            return self.theta[depth]
        return max(self.alpha - math.expm1(self.beta * depth), self.theta_min)

    def thresholds(self, num_layers: int) -> list[float]:
        return [self.threshold(depth) for depth in range(num_layers)]


@register(ATM)
class ATMReducer(Reducer[ATM]):
    site = "between"
    everywhere = True

    @property
    def theta(self) -> float:
        return self.config.threshold(self.layer.depth)

    @property
    def by_size(self) -> bool:
        """See `ATM.by_size`."""
        return self.config.by_size(self.layer.depth, self.layer.num_layers)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        follows = sizes_follow(x) and self.config.obstacle() is not None
        if not follows and state.num_patches < 2:  # a single patch has no partner
            return None
        if is_traced() and self.config.obstacle() is not None:
            raise VitrimError("torch.jit.trace cannot trace atm: how many tokens it merges depends on the images")
        if self.config.metric == "concat":
            keys = attention.keys.transpose(1, 2).flatten(2).to(decision_dtype(attention.k.dtype))
            patches = unit(keys[:, state.num_prefix :])
        else:
            patches = unit_mean_keys(attention, state.num_prefix)
        if follows:
            return self.merge_single(patches, state)
        if self.config.capacity is not None or (self.config.granularity == "image" and x.shape[0] > 1):
            return self.merge_per_image(patches, state)
        if self.by_size:  # small tokens into large ones, behind the splitting layer
            # By size, then by place: the paper sorts all tokens, and the prefix would be among the small ones.
            order = state.size[:, state.num_prefix :].sort(dim=1, stable=True).indices
            half = max(state.num_tokens // 2 - state.num_prefix, 0)
            sources, destinations = order[:, :half], order[:, half:]
            best, partner = best_partners(take(patches, sources), take(patches, destinations))
            r = self.num_similar(best, state)
            return merge_most_similar(state, sources, destinations, best, partner, r) if r else None
        even, odd = alternate_split(state.num_prefix)
        similarity = cosines(patches[:, even], patches[:, odd])
        r = self.num_similar(similarity.amax(dim=-1), state)
        return match_alternate(state, similarity, r) if r else None

    def merge_single(self, patches: Tensor, state: TokenState) -> Hard | None:
        """Merge the pairs above the threshold in the single image of an exported graph, for both granularities."""
        if self.theta >= 1.0:
            return None
        if self.by_size:
            order = state.size[:, state.num_prefix :].sort(dim=1, stable=True).indices
            half = torch.sym_max(state.num_tokens // 2 - state.num_prefix, 0)
            sources, destinations = order[:, :half], order[:, half:]
            similarity = cosines(take(patches, sources), take(patches, destinations))
        else:
            even, odd = alternate_split(state.num_prefix)
            index = torch.arange(state.num_patches, device=patches.device)
            sources, destinations = index[even], index[odd]
            similarity = cosines(patches[:, even], patches[:, odd])
        # one more column: a single patch has no partner, and engines have no maximum of an empty row
        best, partner = torch.constant_pad_nd(similarity, (0, 1), -torch.inf).max(dim=-1)
        merges = best > self.theta
        if self.config.align > 1:
            merges = self.aligned(best, merges, state.num_tokens)
        return merge_flagged(state, sources, destinations, merges, partner)

    def aligned(self, best: Tensor, merges: Tensor, total: Tensor | int) -> Tensor:
        """(B, S) the most similar of the sources that ``merges`` (B, S) flags, so many that of ``total`` tokens a
        multiple of ``align`` is left."""
        left = rounded_up(total - merges.sum(1, keepdim=True), self.config.align, total)
        return first_ranked(best, total - left)

    def num_similar(self, best: Tensor, state: TokenState) -> int:
        """Number of sources that merge, from the similarity ``best`` (B, S) of each to its partner."""
        if self.config.r is not None:
            return min(self.num_removed(state), best.shape[1])
        # read back from the device; a cosine rounded above 1 must not exceed a threshold of 1
        similar = int((best > self.theta).sum()) if self.theta < 1.0 else 0
        r = min(ROUNDING[self.config.rounding](similar / max(best.shape[0], 1)), best.shape[1])
        align, total = self.config.align, state.num_tokens
        return max(total - math.ceil((total - r) / align) * align, 0)

    def merge_per_image(self, patches: Tensor, state: TokenState) -> Hard | None:
        """Merge exactly the pairs of each image above the threshold, and pad where images keep different counts."""
        sources, destinations, real_source, real_destination = self.split_per_image(state)
        best, partner = best_partners(take(patches, sources), take(patches, destinations), real_destination)
        merges = (best.clamp(max=1.0) > self.theta) & real_source
        # With a capacity no count is read back: images with more tokens than slots merge further pairs.
        if self.config.capacity is not None:
            # slots after this layer: its capacity, within what one matching can reach
            slots = min(self.config.capacity[self.layer.depth], state.num_patches)
            most_merged, most_kept, ragged = sources.shape[1], max(slots, destinations.shape[1]), True
            surplus = real_source.sum(1) + real_destination.sum(1) - most_kept
            merges = merges | first_ranked(best.masked_fill(~real_source, -torch.inf), surplus[:, None])
        elif self.config.align > 1:
            total = real_source.sum(1) + real_destination.sum(1) + state.num_prefix
            merges = self.aligned(best.masked_fill(~real_source, -torch.inf), merges, total[:, None])
        merged, kept_sources = merges.sum(1), (real_source & ~merges).sum(1)
        kept = kept_sources + real_destination.sum(1)
        if self.config.capacity is None:
            counts = torch.stack([merged, kept]).tolist()  # read back once
            most_merged, most_kept = max(counts[0]), max(counts[1])
            if most_merged == 0:
                return None
            ragged = len(set(counts[0])) > 1 or len(set(counts[1])) > 1
        moved = _first(merges, most_merged)
        into = kept_sources[:, None] + partner.gather(1, moved)
        stays = torch.cat([real_source & ~merges, real_destination], dim=1)
        keep = torch.cat([sources, destinations], dim=1).gather(1, _first(stays, most_kept))
        # an image that merges nothing keeps its order, as alone: the next layer splits by place
        keep = torch.where(merged[:, None] > 0, keep, torch.arange(most_kept, device=keep.device))
        if not ragged:
            return merge(state, keep, sources.gather(1, moved), into)
        slot = torch.arange(max(most_merged, most_kept), device=patches.device)
        into = torch.where(slot[:most_merged] < merged[:, None], into, most_kept)
        return merge(state, keep, sources.gather(1, moved), into, valid=slot[:most_kept] < kept[:, None])

    def split_per_image(self, state: TokenState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Patch indices (B, S), (B, D) of sources and destinations, and masks of those that are not padding."""
        # Real tokens come first in every image, so that each image is split as it would be alone.
        p, batch = state.num_prefix, state.size.shape[0]
        index = torch.arange(state.num_patches, device=state.size.device).expand(batch, -1)
        real = torch.ones_like(index, dtype=torch.bool) if state.mask is None else state.mask[:, p:]
        if not self.by_size:
            even, odd = alternate_split(p)
            return index[:, even], index[:, odd], real[:, even], real[:, odd]
        # Padding sorts behind all sizes; `half` and `count` are of the real tokens of each image.
        size = state.size[:, p:].masked_fill(~real, torch.inf)
        order = size.sort(dim=1, stable=True).indices
        count = real.sum(1, keepdim=True)
        half = ((count + p) // 2 - p).clamp_min(0)
        most = max(state.num_tokens // 2 - p, 0)
        place = index[:, : state.num_patches - most] + half
        return (
            order[:, :most],
            order.gather(1, place.clamp(max=state.num_patches - 1)),
            index[:, :most] < half,
            place < count,
        )


def least_by_size(current: int, num_prefix: int) -> int:
    """The fewest of ``current`` patches left by size: prefix tokens count as small, but do not merge.

    Example:
        >>> least_by_size(256, num_prefix=1), least_by_size(256, num_prefix=5)
        (129, 131)
    """
    return max(least_alternate(current), current - max((current + num_prefix) // 2 - num_prefix, 0))


def _first(flags: Tensor, count: int) -> Tensor:
    """(B, count) places of the set entries of ``flags`` (B, S), in order, then of unset ones."""
    return flags.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :count]
