"""ALGM: merge similar windows first, then similar tokens anywhere (Norouzi et al., ALGM, CVPR 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, merge
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.matching import (
    alternate_split,
    best_partners,
    merge_alternate,
    merge_flagged,
    most_similar_first,
    unit,
)
from vitrim.core.method import Adaptive, Count, MethodConfig, Needs, Traits, Tunable
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Limited, Pattern, Remove, half
from vitrim.core.tokens import TokenState, decision_dtype, flagged, is_traced, sizes_follow
from vitrim.errors import VitrimError

SIDE = 2
"""Rows and columns of a window."""


class ALGM(Adaptive):
    """Merge windows of 2 x 2 patches in an early block, and pairs of tokens from anywhere in a later one.

    Formulas and deviations are in docs/methods/algm.md.

    Example:
        >>> ALGM(threshold=0.9).stages(12), ALGM().stages(24)
        ((0, 4), (0, 6))
    """

    name = "algm"
    paper = (
        "ALGM: Adaptive Local-then-Global Token Merging for Efficient Semantic Segmentation with Plain Vision "
        "Transformers (CVPR 2024)"
    )
    kind = "merge"
    traits = Traits(batch_dependent=True, single_images=True, aligns=False)
    runtime = frozenset({"threshold"})
    tunable = Tunable("threshold", 1.0, 0.05, digits=4, similarity=True)

    threshold: float = Field(0.88, ge=-1.0, le=1.0, description="least mean cosine of a merged window")
    r: tuple[Count, Count] | None = Field(
        None, description="instead of thresholds: windows and pairs merged, the same numbers in every image"
    )
    local_block: int = Field(0, ge=0, description="block that merges windows, 0-based")
    global_block: int | None = Field(
        None, ge=1, description="block that merges pairs, 0-based; default 4 of 12 and 6 of 24"
    )

    def faults(self) -> Iterator[str]:
        if self.global_block is not None and self.global_block <= self.local_block:
            yield "global_block must be behind local_block: windows are merged while the grid is whole"
        if self.r is not None and "threshold" in self.model_fields_set:
            yield "give either threshold or r"

    def stages(self, num_layers: int) -> tuple[int, int]:
        """Local and global block, 0-based."""
        last = min(2 + num_layers // 6, num_layers - 1) if self.global_block is None else self.global_block
        return self.local_block, last

    def needs(self) -> Needs:
        return Needs(grid=True)

    def amounts(self, num_layers: int) -> list[Amount | None]:
        first, last = self.stages(num_layers)
        if not first < last < num_layers:
            raise VitrimError(
                f"algm: blocks {first} and {last} must be two, in order, of the {num_layers} blocks of this model"
            )
        amounts: list[Amount | None] = super().amounts(num_layers)
        if self.r is not None:
            windows, pairs = self.r
            amounts[first] = WindowsMerged(windows)
            amounts[last] = Limited(Remove(pairs), half)
        return amounts

    def frozen(self, initial: int, counts: Sequence[float]) -> MethodConfig:
        first, last = self.stages(len(counts))
        # A merged window of 4 patches leaves one: each removes 3.
        windows = math.floor((initial - counts[first]) / (SIDE * SIDE - 1) + 0.5)
        pairs = math.floor(counts[last - 1] - counts[last] + 0.5)
        return self.changed("threshold", r=(windows, pairs))


@dataclass(frozen=True)
class WindowsMerged(Pattern):
    """Merge a fixed number of windows to one token each and keep the other patches.

    Example:
        >>> WindowsMerged(10).number((14, 14)), WindowsMerged(10).number((3, 5))
        (166, 9)
    """

    windows: int

    def number(self, grid: tuple[int, int]) -> int:
        rows, columns = grid
        return rows * columns - (SIDE * SIDE - 1) * min(self.windows, windows_of(rows, columns))

    def reaches(self, grid: tuple[int, int]) -> bool:
        return self.windows <= windows_of(*grid)


def windows_of(rows: int, columns: int) -> int:
    return (rows // SIDE) * (columns // SIDE)


class _Merging(Reducer[ALGM]):
    """Common part of both steps: tokens of length 1, and the smallest count of the batch."""

    site = "between"

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        if sizes_follow(x) and self.config.is_adaptive():  # too few patches merge nothing there, either
            return self.merging_single(unit(x[:, state.num_prefix :].to(decision_dtype(x.dtype))), state)
        if is_traced() and self.config.is_adaptive():
            raise VitrimError("torch.jit.trace cannot trace algm: how many tokens it merges depends on the images")
        if x.shape[0] == 0 or state.num_patches < SIDE * SIDE:
            return None
        return self.merging(unit(x[:, state.num_prefix :].to(decision_dtype(x.dtype))), state)

    def merging(self, patches: Tensor, state: TokenState) -> Hard | None:
        """Decide from ``patches`` (B, P, C) of length 1."""
        raise NotImplementedError

    def merging_single(self, patches: Tensor, state: TokenState) -> Hard | None:
        """Decide for the single image of an exported graph, without reading a count back."""
        raise NotImplementedError


class LocalReducer(_Merging):
    def merging(self, patches: Tensor, state: TokenState) -> Hard | None:
        rows, columns = state.known_grid(ALGM.name)
        windows = window_patches(rows, columns, patches.device)
        alike = mean_cosine(patches, windows)
        if self.config.r is None:
            # The paper's threshold per window, and the fewest windows of any image, since images keep equally many.
            r = int((alike >= self.config.threshold).sum(1).amin())  # read back from the device
        else:
            r = min(self.config.r[0], windows.shape[0])
        if r == 0:
            return None
        return self.merged(state, windows[alike.argsort(dim=1, descending=True, stable=True)[:, :r]])

    def merging_single(self, patches: Tensor, state: TokenState) -> Hard | None:
        windows = window_patches(*state.known_grid(ALGM.name), patches.device)
        return self.merged(state, windows[flagged(mean_cosine(patches, windows) >= self.config.threshold)])

    @staticmethod
    def merged(state: TokenState, best: Tensor) -> Hard:
        """Merge the windows ``best`` (B, r, 4), in any order."""
        anchors, moved = best[..., 0], best[..., 1:].flatten(1)
        # The windows do not overlap, so the patches that leave are as many in every image.
        gone = moved.new_zeros(moved.shape[0], state.num_patches, dtype=torch.int8).scatter(1, moved, 1)
        keep = gone.sort(dim=1, stable=True).indices[:, : gone.shape[1] - moved.shape[1]]
        place = (1 - gone).cumsum(dim=1) - 1  # of every patch, among the kept
        into = place.gather(1, anchors.repeat_interleave(SIDE * SIDE - 1, dim=1))
        return merge(state, keep, moved, into)


class GlobalReducer(_Merging):
    def merging(self, patches: Tensor, state: TokenState) -> Hard | None:
        sources, destinations = alternate_split(state.num_prefix)
        best, partner = best_partners(patches[:, sources], patches[:, destinations])
        least = self.least(best)
        fixed = self.config.r
        # read back from the device
        r = int((best > least).sum(1).amin()) if fixed is None else self.num_removed(state)
        if r == 0:
            return None
        order = most_similar_first(best)
        return merge_alternate(state, order, partner.gather(1, order[:, :r]))

    def least(self, best: Tensor) -> Tensor:
        """Similarity above which pairs merge, from the ``best`` (B, S) of all sources."""
        return best.mean(1).mean() + best.std(1).mean() / (self.layer.depth + 1)

    def merging_single(self, patches: Tensor, state: TokenState) -> Hard | None:
        even, odd = alternate_split(state.num_prefix)
        index = torch.arange(state.num_patches, device=patches.device)
        best, partner = best_partners(patches[:, even], patches[:, odd])
        return merge_flagged(state, index[even], index[odd], best > self.least(best), partner)


@register(ALGM)
def _reducer(config: ALGM, layer: Layer) -> type[Reducer[Any]] | None:
    first, last = config.stages(layer.num_layers)
    return {first: LocalReducer, last: GlobalReducer}.get(layer.depth)


def window_patches(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """(windows, 4) patches of each 2 x 2 window of a grid, in raster order; an odd last row or column is in none."""
    down, right = rows // SIDE, columns // SIDE
    patches = torch.arange(rows * columns, device=device).view(rows, columns)[: down * SIDE, : right * SIDE]
    return patches.reshape(down, SIDE, right, SIDE).transpose(1, 2).reshape(down * right, SIDE * SIDE)


def mean_cosine(patches: Tensor, windows: Tensor) -> Tensor:
    """(B, W) mean cosine over the 6 pairs in each of the ``windows`` (W, 4) of unit ``patches`` (B, P, C)."""
    # The square of the sum of four unit vectors is 4 + twice the six cosines: no product per pair.
    count = SIDE * SIDE
    total: Tensor = patches[:, windows.flatten()].unflatten(1, windows.shape).sum(2)
    cosine: Tensor = (total.square().sum(-1) - count) / (count * (count - 1))
    return cosine
