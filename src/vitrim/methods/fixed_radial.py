"""Fixed radial patterns: keep the patches around the image centre (Haurum et al., Which Tokens to Use?, ICCVW 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, prune
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer
from vitrim.core.method import Needs, StagedConfig, Traits
from vitrim.core.plan import Layer
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Keep, Pattern, check_blocks
from vitrim.core.tokens import TokenState
from vitrim.core.versions import constant

Norm = Literal["l1", "l2", "linf"]


class FixedRadial(StagedConfig):
    """Keep the patches within a radius of the image centre, the same for every image (section 3 of the paper).

    The radius of a stage is that whose count of patches is nearest to the keep rule's target, the smaller one on ties.
    Formulas and deviations are in docs/methods/fixed_radial.md.
    """

    paper = "Which Tokens to Use? Investigating Token Reduction in Vision Transformers (ICCVW 2023)"
    traits = Traits(aligns=False)
    norm: ClassVar[Norm]

    float32_rings: bool = Field(False, description="rings as float32 rounding splits them, as published")
    contiguous: bool = Field(False, description="reduce in every block from the first to the last stage")
    min_radius: float = Field(1.0, gt=0.0, description="with contiguous: the radius after the last stage")

    def needs(self) -> Needs:
        return Needs(grid=True)

    def amounts(self, num_layers: int) -> list[Amount | None]:
        blocks = self.stages(num_layers)
        check_blocks(blocks, num_layers)
        schedule: list[Amount | None] = [None] * num_layers
        if self.contiguous:
            first, last = blocks[0], blocks[-1]
            for block in range(first, last + 1):
                # Equal steps of the radius over all blocks from the first to the last stage.
                step = (block - first + 1) / (last - first + 2)
                schedule[block] = WithinLine(self.norm, step, self.min_radius)
            return schedule
        for block, share in enumerate(super().amounts(num_layers)):
            if isinstance(share, Keep):
                schedule[block] = WithinRing(self.norm, share, self.float32_rings)
        return schedule


class L1(FixedRadial):
    """Keep patches near the middle, by the distance |x| + |y|: a diamond.

    Example:
        >>> L1(keep_rate=0.5).counts(196, 12)[3]
        84
    """

    name = "l1"
    norm = "l1"


class L2(FixedRadial):
    """Keep patches near the middle, by the Euclidean distance: a disc.

    Example:
        >>> L2(keep_rate=0.5).counts(196, 12)[3]
        96
    """

    name = "l2"
    norm = "l2"


class Linf(FixedRadial):
    """Keep patches near the middle, by the distance max(|x|, |y|): a square.

    Example:
        >>> Linf(keep_rate=0.5).counts(196, 12)[3]
        100
    """

    name = "linf"
    norm = "linf"


class Within(Pattern):
    """The patches within a radius of the centre."""

    def patches(self, grid: tuple[int, int]) -> list[int]:
        """Original indices of the patches kept of a ``grid`` (rows, columns), ascending."""
        raise NotImplementedError

    def number(self, grid: tuple[int, int]) -> int:
        return len(self.patches(grid))


@dataclass(frozen=True)
class WithinRing(Within):
    """Patches within the ring whose count is nearest to the keep rule's target."""

    norm: Norm
    share: Keep
    float32: bool

    def patches(self, grid: tuple[int, int]) -> list[int]:
        initial = grid[0] * grid[1]
        target = self.share.keep(initial, initial)
        distance: Sequence[float]
        if self.float32:
            distance = _float32_distances(grid, self.norm)
        else:  # exact, in raster order, in half patches; squared for l2
            rows, columns = ([abs(2 * place - (side - 1)) for place in range(side)] for side in grid)
            pairs = [(a, b) for a in rows for b in columns]
            if self.norm == "l1":
                distance = [a + b for a, b in pairs]
            else:
                distance = [a * a + b * b if self.norm == "l2" else max(a, b) for a, b in pairs]
        within = {d: count for count, d in enumerate(sorted(distance), start=1)}  # the last of equal distances
        radius = min(within, key=lambda r: (abs(within[r] - target), r))
        return [patch for patch, d in enumerate(distance) if d <= radius]


@dataclass(frozen=True)
class WithinLine(Within):
    """Patches within a radius on the line from the corner (step 0) to ``min_radius`` (step 1)."""

    norm: Norm
    step: float
    min_radius: float

    def patches(self, grid: tuple[int, int]) -> list[int]:
        distance = _float32_distances(grid, self.norm)
        radius = distance[0] + self.step * (self.min_radius - distance[0])
        # on a narrow grid no centre may lie within the last radii
        return [patch for patch, d in enumerate(distance) if d <= max(radius, min(distance))]


@register(Linf)
@register(L2)
@register(L1)
class FixedRadialReducer(Reducer[FixedRadial]):
    site = "before"
    spares_block = True

    index: Tensor

    def follow(self, config: FixedRadial, layer: Layer) -> None:
        super().follow(config, layer)
        # computed once for the model's own size, per forward for others; a buffer, so that it follows the device
        device = self.index.device if "index" in self._buffers else None
        index = torch.tensor(self.kept(layer.grid_size), dtype=torch.int64, device=device)
        self.register_buffer("index", index, persistent=False)

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        grid = state.known_grid(self.config.name)
        index = self.index if grid == self.layer.grid_size else torch.tensor(self.kept(grid), device=x.device)
        if index.shape[0] == state.num_patches:
            return None
        return prune(state, index.expand(x.shape[0], -1))

    def forward(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | None:
        # the count depends on the grid of this forward, not on the number of patches alone
        return self.assign(x, cast(Attention, attention), state)

    def kept(self, grid: tuple[int, int]) -> list[int]:
        """Current patches of a ``grid`` that stay: patterns are nested and keep their order."""
        earlier = [amount for amount in self.layer.amounts[: self.layer.depth] if isinstance(amount, Within)]
        amount = self.layer.amount
        assert isinstance(amount, Within)
        # Patterns are nested: the indices count the patches that the stage before kept.
        current = earlier[-1].patches(grid) if earlier else list(range(grid[0] * grid[1]))
        kept = set(amount.patches(grid))
        return [index for index, patch in enumerate(current) if patch in kept]


def _float32_distances(grid: tuple[int, int], norm: Norm) -> list[float]:
    """The published distances: float32 coordinates from -side // 2 to side // 2 in ``side`` steps."""
    rows, columns = (len(list(range(side))) for side in grid)  # plain numbers, also when compiled with dynamic shapes
    table: list[float] = _float32_table(rows, columns, norm)
    return table


@constant
def _float32_table(height: int, width: int, norm: Norm) -> list[float]:
    a, b = _float32_axis(height)[:, None], _float32_axis(width)[None, :]
    distance = {"l1": a + b, "l2": np.sqrt(a * a + b * b), "linf": np.maximum(a, b)}[norm]
    return [float(value) for value in distance.flatten()]


def _float32_axis(side: int) -> npt.NDArray[np.float32]:
    """|torch.linspace(-side // 2, side // 2, side)| to the last bit: counted from either end, with fused rounding."""
    # In NumPy, because export would make tensors part of the model.
    low, high = np.float32(-side // 2), np.float32(side // 2)
    step = np.float64((high - low) / np.float32(max(side - 1, 1)))
    index = np.arange(side)
    axis = np.where(index < side // 2, low + step * index, high - step * (side - 1 - index))
    return np.abs(axis.astype(np.float32)) if side > 1 else np.abs(np.array([low]))
