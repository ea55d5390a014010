"""Shapes: how freely the amounts of a setting may differ from block to block, as few parameters or many.

Few parameters find less, and less luck: a search over a slope tries 9 settings, one over a curve moves two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from vitrim.errors import VitrimError, unknown
from vitrim.tuning.space import SLOPES, Point, Space, normal
from vitrim.tuning.strategies import PARENTS, Chance, Evolution, Strategy, Told

Shape = Literal["slope", "curve", "free"]
"""With t the depth in [0, 1], what a block removes is in proportion to: ``slope``, ``1 + s (2 t - 1)`` with ``s`` in
[-1, 1]; ``curve``, ``exp(a t + b t^2)``; ``free``, a weight of its own."""

VALUES = 9
"""Slopes that are tried."""

LARGEST = 3.0
"""Largest ``a`` and ``b`` that are drawn; the weights then differ by a factor of 400 at most."""

STEP = 0.5
"""Standard deviation of a step in ``a`` and ``b``."""


def check_shape(name: str, strategy: str) -> Shape:
    """The shape of that name.

    Raises:
        VitrimError: there is none, or the strategy cannot search it.
    """
    if name not in get_args(Shape):
        raise unknown("shape", name, get_args(Shape))
    if name != "free" and strategy not in ("evolution", "random"):
        raise VitrimError(
            f"shape {name} is searched by evolution or random, and {strategy} moves every weight by itself"
        )
    return name  # type: ignore[return-value]


def starts(space: Space, shape: Shape) -> list[Point]:
    """The points of a shape that a search starts from besides the constant setting; all of a slope's.

    Example:
        >>> import vitrim
        >>> space = Space(vitrim.ToMe(), num_layers=3, grid=(8, 8), num_prefix=1)
        >>> len(starts(space, "slope")), starts(space, "slope")[0], starts(space, "curve")[0][0]
        (9, (1.0, 0.5, 0.0), 1.0)
    """
    if space.size < 2:
        return []
    if shape == "slope":
        return [slope(float(s), space.size) for s in np.linspace(-1.0, 1.0, VALUES)]
    if shape == "curve":
        return [curve(2.0 * s, 0.0, space.size) for s in SLOPES]
    return space.starts()


def shaped(strategy: Strategy, shape: Shape) -> Strategy:
    """The strategy that proposes points of a shape as ``strategy`` does those of any."""
    if shape == "slope":
        return Nothing()
    if shape == "curve":
        return Curves(bred=isinstance(strategy, Evolution))
    return strategy


class Nothing:
    """No points: those of a slope are few, and a search starts from all of them."""

    children = 1

    def propose(self, space: Space, told: Sequence[Told], seed: int) -> Iterator[tuple[str, Point]]:
        """End at once."""
        return iter(())


class Curves:
    """Points ``exp(a t + b t^2)``.

    Args:
        bred: from the best trials, by steps and means; otherwise at random.
    """

    def __init__(self, *, bred: bool) -> None:
        self.bred = bred
        self.children = Evolution.children if bred else Chance.children

    def propose(self, space: Space, told: Sequence[Told], seed: int) -> Iterator[tuple[str, Point]]:
        """Step away from one of the best, or lie between two of them; or draw both parameters evenly."""
        random = np.random.default_rng((seed, len(told)))
        parents = sorted((one for one in told if one.full), key=lambda one: one.value)[:PARENTS]
        while True:
            if not self.bred:
                yield "random", curve(random.uniform(-LARGEST, LARGEST), random.uniform(-LARGEST, LARGEST), space.size)
                continue
            one, other = (bend_of(parents[place].point) for place in random.integers(len(parents), size=2))
            source, (a, b) = "mutation", one
            if one != other and random.random() < 0.3:
                source, share = "crossover", random.random()
                a, b = share * one[0] + (1.0 - share) * other[0], share * one[1] + (1.0 - share) * other[1]
            else:
                a, b = a + random.normal(0.0, STEP), b + random.normal(0.0, STEP)
            yield source, curve(a, b, space.size)


def slope(s: float, size: int) -> Point:
    """Weights ``1 + s (2 t - 1)``.

    Example:
        >>> slope(0.5, 3)
        (0.3333333333333333, 0.6666666666666666, 1.0)
    """
    return normal((1.0 + s * np.linspace(-1.0, 1.0, size)).tolist())


def curve(a: float, b: float, size: int) -> Point:
    """Weights ``exp(a t + b t^2)``.

    Example:
        >>> [round(weight, 3) for weight in curve(-1.0, 0.0, 3)]
        [1.0, 0.607, 0.368]
    """
    depth = np.linspace(0.0, 1.0, size)
    return normal(np.exp(a * depth + b * depth**2).tolist())


def bend_of(point: Point) -> tuple[float, float]:
    """The ``a`` and ``b`` of the curve through a point, or nearest to it.

    Example:
        >>> [round(one, 6) for one in bend_of(curve(-1.0, 0.5, 6))]
        [-1.0, 0.5]
    """
    depth = np.linspace(0.0, 1.0, len(point))
    terms = np.stack([np.ones_like(depth), depth, depth**2], axis=1)
    found = np.linalg.lstsq(terms, np.log(np.maximum(point, np.exp(-2 * LARGEST))), rcond=None)[0]
    return float(found[1]), float(found[2])
