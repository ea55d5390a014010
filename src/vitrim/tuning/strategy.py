"""The sources of a search's candidates: evolution, chance or optuna's samplers, over settings of some shape.

A strategy keeps nothing: what it proposes follows from the seed and from what was found so far. So a search that is
resumed goes on as if it had never stopped. A shape says how freely the amounts may differ from block to block. Few
parameters find less, and less luck: a search over a slope tries 9 settings, one over a curve moves two numbers.
"""

from __future__ import annotations

import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from vitrim.core.method import MethodConfig
from vitrim.errors import MissingPackageError, VitrimError, check_known
from vitrim.tuning.space import SLOPES, Point, Space, normal, slope

Search = Literal["evolution", "random", "gp", "tpe"]
"""``evolution``: mutation and crossover of the best; ``random``: points at random; ``gp``, ``tpe``: optuna's Gaussian
process and tree of Parzen estimators."""

Shape = Literal["slope", "curve", "free"]
"""With t the depth in [0, 1], what a block removes is in proportion to: ``slope``, ``1 + s (2 t - 1)`` with ``s`` in
[-1, 1]; ``curve``, ``exp(a t + b t^2)``; ``free``, a weight of its own."""

PARENTS = 4
"""The best trials, of which others are bred."""

CROSSED = 0.3
"""The share of candidates that have two different parents, where these are drawn."""

FURTHER = 0.03
"""Standard deviation that is added with every proposal of a sampler that was there before."""

VALUES = 9
"""Slopes that are tried."""

LARGEST = 3.0
"""Largest ``a`` and ``b`` that are drawn; the weights then differ by a factor of 400 at most."""

STEP = 0.5
"""Standard deviation of a step in ``a`` and ``b``."""


@dataclass(frozen=True)
class Observation:
    """A trial as a strategy knows it.

    Attributes:
        value: its score on all search images; of a trial that stopped before, estimated from those it saw.
        full: whether it saw all of them.
    """

    point: Point
    config: MethodConfig
    value: float
    full: bool


class Strategy(ABC):
    """Proposes points.

    Attributes:
        children: candidates that are scored together, before the next are proposed.
    """

    children = 4

    def starts(self, space: Space) -> list[Point]:
        """The points that a search starts from besides the constant setting."""
        return space.starts()

    @abstractmethod
    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Sources of points, and the points; further ones follow from what is seen later.

        Args:
            space: of at least two values.
            seen: the trials so far, in their order.
        """


def parents_of(seen: Sequence[Observation]) -> list[Observation]:
    """The best trials that saw all images, the best first."""
    return sorted((one for one in seen if one.full), key=lambda one: one.value)[:PARENTS]


# ---- a weight for every block ----------------------------------------------------------------------------------------


class Evolution(Strategy):
    """Neighbours and mixtures of the best trials that saw all images."""

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Mutate one of the best, or cross two of them, without end."""
        random = np.random.default_rng((seed, len(seen)))
        parents = parents_of(seen)
        while True:
            one, other = (parents[place] for place in random.integers(len(parents), size=2))
            if one is not other and random.random() < CROSSED:
                yield "crossover", space.cross(one.point, other.point, random)
            else:
                yield "mutation", space.mutate(one.config, random)


class RandomSearch(Strategy):
    """Points at random, a fifth of the weights 0."""

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Draw weights evenly, without end."""
        random = np.random.default_rng((seed, len(seen)))
        while True:
            yield "random", normal((random.random(space.size) * (random.random(space.size) < 0.8)).tolist())


class Optuna(Strategy):
    """One of optuna's samplers, made anew for every proposal with a seed that follows from the search's and the number
    of trials, since no storage of optuna's keeps the state of a sampler.

    Args:
        name: gp or tpe.

    Raises:
        MissingPackageError: optuna is not installed.
    """

    children = 1

    def __init__(self, name: Literal["gp", "tpe"]) -> None:
        if importlib.util.find_spec("optuna") is None:
            raise MissingPackageError(f"--search {name} needs the package optuna: pip install 'vitrim[tune]'")
        self.name = name

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Ask the sampler, then go further and further away from the point that it proposes: whole tokens make near
        points the same setting, and a setting that was there before is not tried again."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        names = [f"w{place:03d}" for place in range(space.size)]
        ranges: dict[str, Any] = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names}
        own: dict[str, Any] = {"seed": (seed + len(seen)) % 2**32, "n_startup_trials": 1}
        samplers = optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what optuna calls experimental
            gp = self.name == "gp"
            sampler = samplers.GPSampler(**own) if gp else samplers.TPESampler(**own, multivariate=True)
            study = optuna.create_study(sampler=sampler)
            for one in seen:
                params = dict(zip(names, one.point, strict=True))
                study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, value=one.value))
            trial = study.ask(ranges)
        proposed = np.array([trial.params[name] for name in names])
        random, far = np.random.default_rng((seed, len(seen))), 0.0
        while True:
            weights = proposed if far == 0.0 else (proposed + random.normal(0.0, far, len(proposed))).clip(0.0, 1.0)
            yield self.name, normal(weights.tolist())
            far += FURTHER


# ---- shapes of few parameters ----------------------------------------------------------------------------------------


class Slopes(Strategy):
    """Nine slopes, all of them starts.

    Example:
        >>> import vitrim
        >>> space = Space(vitrim.ToMe(), num_layers=3, grid=(8, 8), num_prefix=1)
        >>> len(Slopes().starts(space)), Slopes().starts(space)[0]
        (9, (1.0, 0.5, 0.0))
    """

    children = 1

    def starts(self, space: Space) -> list[Point]:
        """All slopes."""
        return [slope(float(s), space.size) for s in np.linspace(-1.0, 1.0, VALUES)] if space.size > 1 else []

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """End at once."""
        return iter(())


class Curves(Strategy):
    """Points ``exp(a t + b t^2)``.

    Args:
        bred: from the best trials, by steps and means; otherwise at random.
    """

    def __init__(self, *, bred: bool) -> None:
        self.bred = bred

    def starts(self, space: Space) -> list[Point]:
        """Two curves that fall and two that rise."""
        return [curve(2.0 * s, 0.0, space.size) for s in SLOPES] if space.size > 1 else []

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Step away from one of the best, or lie between two of them; or draw both parameters evenly. Without end."""
        random = np.random.default_rng((seed, len(seen)))
        parents = parents_of(seen)
        while True:
            if not self.bred:
                yield "random", curve(random.uniform(-LARGEST, LARGEST), random.uniform(-LARGEST, LARGEST), space.size)
                continue
            one, other = (bend_of(parents[place].point) for place in random.integers(len(parents), size=2))
            source, (a, b) = "mutation", one
            if one != other and random.random() < CROSSED:
                source, share = "crossover", random.random()
                a, b = share * one[0] + (1.0 - share) * other[0], share * one[1] + (1.0 - share) * other[1]
            else:
                a, b = a + random.normal(0.0, STEP), b + random.normal(0.0, STEP)
            yield source, curve(a, b, space.size)


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


# ---- by name ---------------------------------------------------------------------------------------------------------


def make_strategy(search: str = "evolution", shape: str = "free") -> Strategy:
    """The strategy of these names, see `Search` and `Shape`.

    Raises:
        VitrimError: there is none, or it cannot search the shape.
        MissingPackageError: it needs optuna, which is not installed.

    Example:
        >>> make_strategy("random", "curve").bred
        False
    """
    check_known("search", search, get_args(Search))
    check_known("shape", shape, get_args(Shape))
    if search in ("gp", "tpe"):
        if shape != "free":
            raise VitrimError(
                f"shape {shape} is searched by evolution or random, and {search} moves every weight by itself"
            )
        return Optuna(search)  # type: ignore[arg-type]
    if shape == "slope":
        return Slopes()
    if shape == "curve":
        return Curves(bred=search == "evolution")
    return Evolution() if search == "evolution" else RandomSearch()
