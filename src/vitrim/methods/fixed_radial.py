"""Fixed radial patterns: keep the patches around the image centre (Haurum et al., Which Tokens to Use?, ICCVW 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from vitrim.assignment import Hard, prune
from vitrim.attention import Attention
from vitrim.block import Reducer
from vitrim.config import Layer, MethodConfig, StagedConfig
from vitrim.errors import VitrimError
from vitrim.registry import register_method
from vitrim.schedule import KEEP_RULES, Amount, KeepRule, check_blocks
from vitrim.tokens import TokenState

Norm = Literal["l1", "l2", "linf"]


class FixedRadial(StagedConfig):
    """Keep the patches within a radius of the image centre, the same for every image (section 3 of the paper).

    The radius of a stage is the one, among the distances that occur on the grid, whose count of patches is nearest to
    the keep rule's target; the smaller one of two equally near. The study's sanity check: a learned selection that does
    not beat these has learned little.

    Deviations from the published code: tokens are removed, where it only masks them (the class token's result is the
    same, and it gets faster); distances are exact integers, where float32 rounding splits rings that are equal
    (``float32_rings=True`` gives the published sets). ``contiguous`` is its other mode: every block between the first
    and the last of ``blocks`` reduces, to radii on a line from the corner to ``min_radius``, without ``keep_rate``.

    The grid must be square. Acts before the block.
    """

    paper = "Which Tokens to Use? Investigating Token Reduction in Vision Transformers (ICCVW 2023)"
    kind = "prune"
    norm: ClassVar[Norm]

    float32_rings: bool = Field(False, description="rings as float32 rounding splits them, as published")
    contiguous: bool = Field(False, description="reduce in every block from the first to the last stage")
    min_radius: float = Field(1.0, gt=0.0, description="with contiguous: the radius after the last stage")

    def schedule(self, num_layers: int) -> list[Amount | None]:
        blocks = self.stages(num_layers)
        check_blocks(blocks, num_layers)
        schedule: list[Amount | None] = [None] * num_layers
        if self.contiguous:
            first, last = blocks[0], blocks[-1]
            for block in range(first, last + 1):
                step = (block - first + 1) / (last - first + 2)
                schedule[block] = WithinLine(self.norm, step, self.min_radius)
            return schedule
        for stage, block in enumerate(blocks, start=1):
            schedule[block] = WithinRing(self.norm, self.keep_rate, stage, self.rule, self.float32_rings)
        return schedule

    def build(self, layer: Layer) -> Reducer | None:
        return FixedRadialReducer(self, layer)


@register_method
class L1(FixedRadial):
    """`FixedRadial` with the distance |x| + |y|: a diamond.

    Example:
        >>> L1(keep_rate=0.5).counts(196, 12)[3]
        84
    """

    name = "l1"
    norm = "l1"


@register_method
class L2(FixedRadial):
    """`FixedRadial` with the Euclidean distance: a disc.

    Example:
        >>> L2(keep_rate=0.5).counts(196, 12)[3]
        96
    """

    name = "l2"
    norm = "l2"


@register_method
class Linf(FixedRadial):
    """`FixedRadial` with the distance max(|x|, |y|): a square.

    Example:
        >>> Linf(keep_rate=0.5).counts(196, 12)[3]
        100
    """

    name = "linf"
    norm = "linf"


class Pattern:
    """An amount that knows which patches it keeps, not only how many."""

    def patches(self, initial: int) -> list[int]:
        """Original indices of the patches it keeps of ``initial``, ascending."""
        raise NotImplementedError

    def keep(self, initial: int, current: int) -> int:
        return len(self.patches(initial))


@dataclass(frozen=True)
class WithinRing(Pattern):
    """Patches within the ring whose count is nearest to the keep rule's target."""

    norm: Norm
    rate: float
    stage: int
    rule: KeepRule
    float32: bool

    def patches(self, initial: int) -> list[int]:
        target = KEEP_RULES[self.rule](self.rate, self.stage, initial, initial)
        side = _side(initial)
        distance = _float32_distances(side, self.norm) if self.float32 else _exact_distances(side, self.norm)
        radii = sorted(set(distance))
        radius = min(radii, key=lambda r: (abs(sum(d <= r for d in distance) - target), r))
        return [patch for patch, d in enumerate(distance) if d <= radius]


@dataclass(frozen=True)
class WithinLine(Pattern):
    """Patches within a radius on the line from the corner (step 0) to ``min_radius`` (step 1)."""

    norm: Norm
    step: float
    min_radius: float

    def patches(self, initial: int) -> list[int]:
        distance = _float32_distances(_side(initial), self.norm)
        radius = distance[0] + self.step * (self.min_radius - distance[0])
        return [patch for patch, d in enumerate(distance) if d <= radius]


class FixedRadialReducer(Reducer):
    site = "before"

    index: Tensor

    def configure(self, config: MethodConfig) -> None:
        schedule = config.schedule(self.layer.num_layers)
        self.amount = schedule[self.layer.depth]
        self.earlier = next((amount for amount in schedule[: self.layer.depth][::-1] if amount is not None), None)
        # the model's own size once and for all; other sizes are worked out when they come. A buffer, so that it is
        # where the tokens are
        device = self.index.device if "index" in self._buffers else None
        index = torch.tensor(self._index(self.layer.initial_patches), dtype=torch.int64, device=device)
        self.register_buffer("index", index, persistent=False)

    def assign(self, x: Tensor, attention: Attention | None, state: TokenState) -> Hard | None:
        if self.amount is None:
            return None
        own_size = state.initial_patches == self.layer.initial_patches
        index = self.index if own_size else torch.tensor(self._index(state.initial_patches), device=x.device)
        if index.shape[0] == state.num_patches:
            return None
        return prune(state, index.expand(x.shape[0], -1))

    def _index(self, initial: int) -> list[int]:
        """Which of the current patches stay: patterns are nested and keep their order."""
        if not isinstance(self.amount, Pattern):
            return []
        current = self.earlier.patches(initial) if isinstance(self.earlier, Pattern) else list(range(initial))
        kept = set(self.amount.patches(initial))
        return [index for index, patch in enumerate(current) if patch in kept]


def _side(initial: int) -> int:
    side = math.isqrt(initial)
    if side * side != initial:
        raise VitrimError(f"fixed radial patterns need a square grid of patches, and {initial} patches are none")
    return side


def _exact_distances(side: int, norm: Norm) -> list[int]:
    """Distances of all patches from the centre in raster order; twice the coordinate is an odd or even integer."""
    axis = [abs(2 * place - (side - 1)) for place in range(side)]
    pairs = [(a, b) for a in axis for b in axis]
    if norm == "l1":
        return [a + b for a, b in pairs]
    return [a * a + b * b if norm == "l2" else max(a, b) for a, b in pairs]


def _float32_distances(side: int, norm: Norm) -> list[float]:
    """The published distances: float32 coordinates from -side // 2 to side // 2 in ``side`` steps."""
    axis = torch.linspace(-side // 2, side // 2, side, dtype=torch.float32)
    a, b = axis.abs()[:, None], axis.abs()[None, :]
    grid = {"l1": a + b, "l2": (a * a + b * b).sqrt(), "linf": torch.maximum(a, b)}[norm]
    return [float(value) for value in grid.flatten()]
