"""SAINT: drop tokens that many others resemble (SAINT: Similarity-Aware Token Pruning, 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.matching import cosines, unit_mean_keys
from vitrim.core.method import Adaptive, Count, MethodConfig, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Remove, at_blocks, check_blocks, one_each, removed_by
from vitrim.core.scoring import real_patches, rounded_up
from vitrim.core.tokens import TokenState, flagged, is_traced, no_gradient, sizes_follow
from vitrim.errors import VitrimError

Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]


def odd_places(current: int) -> int:
    """The fewest patch tokens that a layer leaves: those at odd places."""
    return max(current // 2, 1)


class SAINT(Adaptive):
    """Drop the patches that resemble at least ``neighbours`` others, in the first half of the blocks.

    Formulas and deviations are in docs/methods/saint.md.

    Example:
        >>> SAINT().stages(12), SAINT(r=[40, 20]).counts(196, 12)[:3]
        ((0, 1, 2, 3, 4, 5), [156, 136, 136])
    """

    name = "saint"
    paper = "Similarity-Aware Token Pruning: Your VLM but Faster (2025)"
    traits = Traits(single_images=True, least_kept=odd_places)
    runtime = frozenset({"threshold", "neighbours", "gamma"})
    tunable = Tunable(
        "threshold",
        1.0,
        0.05,
        digits=4,
        similarity=True,
        per_layer="threshold",
        places="blocks",
        others=dict.fromkeys(("r",)),
    )

    threshold: Cosine | tuple[Cosine, ...] = Field(
        0.75,
        description="least cosine of similar patches, or a list from the first block on; 1: the block drops nothing",
    )
    blocks: tuple[int, ...] | None = Field(
        None, description="where to drop, 0-based; default the first half, or as many as a list has"
    )
    neighbours: int = Field(5, ge=1, description="patches that a patch must resemble to be dropped")
    gamma: float = Field(10.0, ge=0.0, le=40.0, description="weight of the similarity in the score")
    variant: Literal["image", "published"] = Field(
        "image", description="each image drops its own number; 'published': the mean of the batch, rounded down"
    )
    r: tuple[Count, ...] | None = Field(
        None, description="patches dropped per block instead, the same number in every image; the ranking stays"
    )

    def faults(self) -> Iterator[str]:
        if self.r is not None and "variant" in self.model_fields_set:
            yield "variant is about numbers that depend on the images, and r fixes them"

    def stages(self, num_layers: int) -> tuple[int, ...]:
        if self.blocks is not None:
            return tuple(sorted(self.blocks))
        listed = self.threshold if self.r is None else self.r
        return tuple(range(len(listed) if isinstance(listed, tuple) else max(num_layers // 2, 1)))

    def amounts(self, num_layers: int) -> list[Amount | None]:
        blocks = self.stages(num_layers)
        check_blocks(blocks, num_layers)
        one_each(self.threshold, len(blocks), "saint: threshold")
        if self.r is None:
            return super().amounts(num_layers)
        return at_blocks(Remove, self.r, blocks, num_layers, "saint: r")

    def at(self, depth: int, num_layers: int) -> float:
        """Threshold of the block at ``depth``, one of the `stages`."""
        blocks = self.stages(num_layers)
        return one_each(self.threshold, len(blocks), "saint: threshold")[blocks.index(depth)]

    def frozen(self, initial: int, counts: Sequence[float]) -> MethodConfig:
        removed = removed_by(initial, counts)
        return self.changed("variant", r=tuple(removed[block] for block in self.stages(len(counts))))


class SAINTReducer(Reducer[SAINT]):
    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        threshold = self.config.at(self.layer.depth, self.layer.num_layers)
        follows = sizes_follow(x) and self.config.r is None
        if (threshold >= 1.0 and self.config.r is None) or (not follows and state.num_patches < 2):
            return None
        if is_traced() and self.config.r is None:
            raise VitrimError("torch.jit.trace cannot trace saint: how many patches it drops depends on the images")
        real = real_patches(state)
        with no_gradient():
            keys = unit_mean_keys(attention, state.num_prefix)
            similarity = cosines(keys[:, ::2], keys[:, 1::2])
            score, alike = redundancy(similarity, threshold, self.config.gamma, real[:, 1::2])
            order = score.masked_fill(~real[:, ::2], -torch.inf).argsort(dim=1, descending=True, stable=True)
            odd = torch.arange(1, state.num_patches, 2, device=order.device).expand(order.shape[0], -1)
            # Only even places may go; the odd ones follow behind them, and are never reached.
            ranked = torch.cat([2 * order, odd], dim=1)
            if self.config.r is not None:
                r = self.num_removed(state)
            else:
                many = (alike >= self.config.neighbours) & real[:, ::2]
                drops = many.sum(dim=1, keepdim=True)
                if self.config.variant == "published" and not follows:
                    drops = (drops.sum(dim=0) // max(len(drops), 1)).expand_as(drops)
                if self.config.align > 1:
                    total = real.sum(dim=1, keepdim=True) + state.num_prefix
                    drops = total - rounded_up(total - drops, self.config.align, total)
                if follows or self.config.variant == "image":
                    return drop_per_image(state, ranked, drops, real)
                r = int(drops[:1].sum())  # read back from the device: the same for all images
        return prune(state, ranked[:, r:]) if r else None


@register(SAINT)
def _reducer(config: SAINT, layer: Layer) -> type[Reducer[Any]] | None:
    return SAINTReducer if layer.depth in config.stages(layer.num_layers) else None


def redundancy(similarity: Tensor, threshold: float, gamma: float, real: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (B, S), of which the highest go first, and the number (B, S) of patches that each resembles.

    ``similarity`` (B, S, D): cosines of those that may go with those that stay; ``real`` (B, D): no padding.
    """
    real = real[:, None, :]
    alike = (similarity >= threshold) & real
    count = alike.sum(dim=2)
    mean_alike = (similarity * alike).sum(dim=2) / count.clamp_min(1)
    mean = (similarity * real).sum(dim=2) / real.sum(dim=2).clamp_min(1)
    # Patches without look-alikes have scores of a mean cosine, at most 1, and the others at least 1: these go first.
    return torch.where(count > 0, count * (gamma * (mean_alike - threshold)).exp(), mean), count


def drop_per_image(state: TokenState, ranked: Tensor, drops: Tensor, real: Tensor) -> Hard | None:
    """Drop the first patches of every image, padded to the longest; None if no image drops any.

    Args:
        ranked: (B, P) patches in the order in which they go; padding last among the even and among the odd ones.
        drops: (B, 1) number that goes.
        real: (B, P) False for padding, which comes last.
    """
    if sizes_follow(ranked):
        place = torch.arange(ranked.shape[1], device=ranked.device)
        return prune(state, torch.where(drops > 0, ranked, place).index_select(1, flagged(place >= drops)[0]))
    place = torch.arange(ranked.shape[1], device=ranked.device).expand_as(ranked)
    # an image that drops nothing keeps its order, as alone: the next block splits by place
    ranked = torch.where(drops > 0, ranked, place)
    stays = real.gather(1, ranked) & (place >= drops)
    # Read back from the device, once.
    numbers = torch.cat([drops, stays.sum(dim=1, keepdim=True)], dim=1).tolist()
    if all(dropped == 0 for dropped, _ in numbers):
        return None
    left = [kept for _, kept in numbers]
    order = stays.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, : max(left)]
    ragged = state.mask is not None or min(left) < max(left)
    return prune(state, ranked.gather(1, order), valid=stays.gather(1, order) if ragged else None)
