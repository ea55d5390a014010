"""Spaces of settings: the tunable values of a method, as points in [0, 1]^n.

A point has one weight per value, which distributes the removal over the blocks; a common scale sets its amount and is
chosen so that the cost meets a limit. So every point of a space meets the limit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from vitrim.core.method import MethodConfig, Tunable
from vitrim.core.reduce import reduce_, refuse_reduced
from vitrim.core.registry import host_of, methods, parse_method
from vitrim.errors import ReductionWarning, VitrimError

Point = tuple[float, ...]
"""Weights in [0, 1], of which the largest is 1."""

SLOPES = (-1.0, -0.5, 0.5, 1.0)
"""Slopes of initial points."""

LEAST = 0.125
"""Smallest weight of an active block, if blocks can be inactive."""


@dataclass(frozen=True)
class Space:
    """The settings of one method on one model.

    Attributes:
        base: the method with its fixed options.
        grid: rows and columns of patches.
        num_prefix: tokens before the patches.

    Example:
        >>> import vitrim
        >>> space = Space(vitrim.ToMe(), num_layers=4, grid=(8, 8), num_prefix=1)
        >>> space.constant(0.25).describe(), space.config((1.0, 0.5, 0.5, 0.0), scale=0.5).describe()
        ('tome:r=8', 'tome:r=[16,8,8,0]')
    """

    base: MethodConfig
    num_layers: int
    grid: tuple[int, int]
    num_prefix: int

    @classmethod
    def of(cls, model: nn.Module, method: MethodConfig | str) -> Space:
        """The space of a method on a model; `VitrimError` if no amount is tunable, or options fix it."""
        base = parse_method(method) if isinstance(method, str) else method
        host = host_of(model)
        facts = host.facts(model)
        space = cls(base, len(host.blocks(model)), facts.grid_size, facts.num_prefix)
        space.constant(0.0)
        if space.size > 1:
            space.config((1.0,) * space.size, scale=0.0)
        return space

    # ---- properties of the method ------------------------------------------------------------------------------------

    @property
    def tunable(self) -> Tunable:
        """The tunable option and its range; `VitrimError` if the method has none."""
        if self.base.tunable is None:
            raise VitrimError(f"{self.base.name} has no option that says how much it removes: there is nothing to tune")
        return self.base.tunable

    @property
    def per_layer(self) -> str | None:
        """The option with a value for each block; None if the method has one value for all."""
        return None if self.base.tunable is None else self.base.tunable.per_layer

    @property
    def placing(self) -> str | None:
        """The option that names the active blocks, if these are searched too: the method has such an option, learns
        nothing for single blocks, and its options do not set it."""
        option = self.tunable.places if self.tunable.first_place is not None else None
        searched = self.base.traits.training_free and option not in self.base.model_fields_set
        return option if searched else None

    @property
    def adaptive(self) -> bool:
        """True if token counts depend on the images."""
        return self.base.is_adaptive()

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks that may have a value of their own; empty for one value for all."""
        if self.per_layer is None:
            return ()
        if self.placing is not None:
            return tuple(range(self.tunable.first_place or 0, self.num_layers))
        return self.stages(self.base)

    def stages(self, config: MethodConfig) -> tuple[int, ...]:
        """The blocks that a setting's list has values for."""
        return config.stages(self.num_layers)

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def patches(self) -> int:
        """Patch tokens at the input of the first block."""
        return self.grid[0] * self.grid[1]

    @property
    def size(self) -> int:
        """The number of values, 1 for one value for all blocks."""
        return max(len(self.blocks), 1)

    @property
    def resolution(self) -> float:
        """A difference in scale that hardly changes a setting."""
        step = 10.0**-self.tunable.digits / abs(self.tunable.end(self.patches) - self.tunable.mildest)
        return step / 64

    # ---- points and settings -----------------------------------------------------------------------------------------

    def constant(self, strength: float) -> MethodConfig:
        """The setting with one value for all blocks, at a strength in [0, 1]."""
        fixed = {key: value for key, value in self.tunable.fixed.items() if key not in self.base.model_fields_set}
        return self._with({**fixed, self.tunable.option: self.tunable.value(strength, self.patches)})

    def config(self, point: Sequence[float], scale: float = 1.0) -> MethodConfig:
        """The setting whose strength in every block is weight times ``scale``, at most 1, tidied (`tidy`)."""
        return self.tidy(self.raw(point, scale))

    def raw(self, point: Sequence[float], scale: float = 1.0) -> MethodConfig:
        """`config` without tidying."""
        if self.per_layer is None or not self.blocks:
            return self.constant(point[0] * scale)
        chosen = [place for place, weight in enumerate(point) if weight >= LEAST or self.placing is None]
        if not chosen:
            return self.constant(0.0)
        values: dict[str, Any] = {
            self.per_layer: [self.tunable.value(point[place] * scale, self.patches) for place in chosen]
        }
        if self.placing is not None:
            values[self.placing] = [self.blocks[place] for place in chosen]
        return self._with(values)

    def point(self, config: MethodConfig) -> Point:
        """The weights of a setting: equal for one value for all blocks, 0 for inactive blocks.

        Example:
            >>> import vitrim
            >>> Space(vitrim.ToMe(), num_layers=3, grid=(8, 8), num_prefix=1).point(vitrim.ToMe(r=[8, 4, 0]))
            (1.0, 0.5, 0.0)
        """
        values = self._values(config)
        if self.placing is not None:
            stages = self.stages(config)
            values = values if isinstance(values, tuple) else (values,) * len(stages)
            weights = [0.0] * self.size
            for block, value in zip(stages, values, strict=True):
                weights[self.blocks.index(block)] = self.tunable.strength(value, self.patches)
            return normal(weights)
        if not isinstance(values, tuple):
            return (1.0,) * self.size
        values = (*values, *[self.tunable.mildest] * (self.size - len(values)))
        return normal([self.tunable.strength(value, self.patches) for value in values])

    def counts(self, config: MethodConfig) -> list[int] | None:
        """Patch tokens after each block; None if they depend on the images."""
        return config.counts(self.patches, self.num_layers, self.grid, self.num_prefix)

    def key(self, config: MethodConfig) -> str:
        """A key that is equal for settings with equal effect."""
        counts = self.counts(config)
        return config.describe() if counts is None else str(counts)

    def tidy(self, config: MethodConfig) -> MethodConfig:
        """The setting with per-block counts clipped to the tokens that can be removed, if it has any."""
        counts, values = self.counts(config), self._values(config)
        if self.tunable.digits or counts is None or not isinstance(values, tuple):
            return config
        before = [self.patches, *counts]
        least = [
            min(value, max(before[block] - counts[block], 0)) for block, value in zip(self.blocks, values, strict=True)
        ]
        tidy = self._with({str(self.per_layer): least})
        return tidy if self.counts(tidy) == counts else config

    def _values(self, config: MethodConfig) -> Any:
        """The values of the blocks, a tuple or one for all; None if the method has one value for all."""
        return getattr(config, str(self.per_layer), None) if self.blocks else None

    def _with(self, values: Mapping[str, Any]) -> MethodConfig:
        moved = {self.tunable.option, self.per_layer, self.placing}
        if self.per_layer in values:  # values per block replace the options that shape a single value
            moved |= self.tunable.fixed.keys()
        return self.base.changed(*(name for name in moved if name is not None), **values)

    # ---- starts ------------------------------------------------------------------------------------------------------

    def starts(self) -> list[Point]:
        """Initial points besides the constant one: equal weights, slopes and, if blocks are searched, pairs of adjacent
        blocks in the first half."""
        if self.size < 2:
            return []
        slopes = [slope(s, self.size) for s in SLOPES]
        searched = self.placing is not None and self.size > 3
        pairs = range(0, self.size // 2 + 1, max(self.size // 6, 1)) if searched else ()
        chosen = [normal([float(block in (first, first + 1)) for block in range(self.size)]) for first in pairs]
        return [(1.0,) * self.size, *slopes, *chosen]


def normal(weights: Sequence[float]) -> Point:
    """The weights as a `Point`, divided by the largest; equal weights if all are 0.

    Example:
        >>> normal([1.0, 4.0]), normal([0.0, 0.0])
        ((0.25, 1.0), (1.0, 1.0))
    """
    largest = max(weights)
    return tuple(weight / largest for weight in weights) if largest > 0.0 else (1.0,) * len(weights)


def slope(s: float, size: int) -> Point:
    """Weights ``1 + s (2 t - 1)`` at depth t in [0, 1].

    Example:
        >>> slope(0.5, 3)
        (0.3333333333333333, 0.6666666666666666, 1.0)
    """
    return normal((1.0 + s * np.linspace(-1.0, 1.0, size)).tolist())


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings about settings that remove less than requested, which a search tries on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReductionWarning)
        yield


def training_free(model: nn.Module, *, counted: bool = False) -> list[MethodConfig]:
    """The training-free methods with a tunable amount that fit ``model``, with their default options.

    Args:
        model: not changed.
        counted: leave out methods whose token counts depend on the images; they must run on images for every setting.

    Example:
        >>> import timm
        >>> names = [config.name for config in training_free(timm.create_model("test_vit", num_classes=3))]
        >>> "tome" in names, "dynamicvit" in names, "none" in names
        (True, False, False)
    """
    refuse_reduced(model)
    found = []
    shell = copy.deepcopy(model).to("meta")
    for kind in methods().values():
        if kind.tunable is None or not kind.traits.training_free or (counted and kind().is_adaptive()):
            continue
        config = kind()
        try:  # only reducing a model checks all requirements of a method
            with quiet():
                reduce_(copy.deepcopy(shell), config)
        except VitrimError:  # it is for other models, or its default stages need more layers
            continue
        found.append(config)
    return found
