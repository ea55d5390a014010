"""Sources of a search's candidates: evolution, random draws or optuna's samplers, over settings of some shape.

A strategy is stateless: its proposals follow from the seed and the observations, so a resumed search continues exactly.
A shape limits how amounts may differ between blocks. Few parameters find less, but less by luck: a slope has 9
settings, a curve two numbers.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError, check_installed, check_known
from vitrim.tuning.space import SLOPES, Point, Space, normal, slope

Search = Literal["evolution", "random", "gp", "tpe"]
"""``evolution``: mutation and crossover of the best; ``random``: random points; ``gp``, ``tpe``: optuna's Gaussian
process and tree of Parzen estimators."""

Shape = Literal["slope", "curve", "free"]
"""A block's removal, at depth t in [0, 1], is proportional to: ``slope``, ``1 + s (2 t - 1)`` with ``s`` in [-1, 1];
``curve``, ``exp(a t + b t^2)``; ``free``, a weight of its own."""

PARENTS = 4
"""Best trials, the parents of new candidates."""

CROSSED = 0.3
"""Share of crossovers among candidates with two different parents."""

FURTHER = 0.03
"""Standard deviation added whenever a sampler repeats a known setting."""

VALUES = 9
"""Number of slopes."""

LARGEST = 3.0
"""Largest ``a`` and ``b`` drawn; weights then differ by a factor of at most 400."""

STEP = 0.5
"""Standard deviation of a step in ``a`` and ``b``."""


@dataclass(frozen=True)
class Observation:
    """A trial as strategies see it.

    Attributes:
        value: score on all search images; extrapolated for a dropped trial.
        full: it was scored on all of them.
    """

    point: Point
    config: MethodConfig
    value: float
    full: bool


class Strategy(ABC):
    """Proposes points.

    Attributes:
        children: candidates scored together before the next are proposed.
    """

    children = 4

    def starts(self, space: Space) -> list[Point]:
        return space.starts()

    @abstractmethod
    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Yield sources and points, which may depend on the trials so far.

        Args:
            space: with at least two values.
        """


def parents_of(seen: Sequence[Observation]) -> list[Observation]:
    """The best fully scored trials, best first."""
    return sorted((one for one in seen if one.full), key=lambda one: one.value)[:PARENTS]


# ---- a weight for every block ----------------------------------------------------------------------------------------


class Evolution(Strategy):
    """Neighbours and mixtures of the best fully scored trials."""

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        random = np.random.default_rng((seed, len(seen)))
        parents = parents_of(seen)
        while True:
            one, other = (parents[place] for place in random.integers(len(parents), size=2))
            if one is not other and random.random() < CROSSED:
                yield "crossover", space.cross(one.point, other.point, random)
            else:
                yield "mutation", space.mutate(one.config, random)


class RandomSearch(Strategy):
    """Random points, with a fifth of the weights 0."""

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        random = np.random.default_rng((seed, len(seen)))
        while True:
            yield "random", normal((random.random(space.size) * (random.random(space.size) < 0.8)).tolist())


class Optuna(Strategy):
    """One of optuna's samplers, created for every proposal with a seed derived from the search's and the number of
    trials, because optuna's storages do not keep the state of a sampler.

    Raises:
        MissingPackageError: optuna is not installed.
    """

    children = 1

    def __init__(self, name: Literal["gp", "tpe"]) -> None:
        check_installed(f"--search {name}", "optuna")
        self.name = name

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Yield the sampler's proposal, then points at growing distance: with integer token counts, nearby points are
        often the same setting, and known settings are not tried again."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        names = [f"w{place:03d}" for place in range(space.size)]
        ranges: dict[str, Any] = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names}
        own: dict[str, Any] = {"seed": (seed + len(seen)) % 2**32, "n_startup_trials": 1}
        samplers = optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optuna warns about experimental features
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
    """Nine slopes, all of them initial points.

    Example:
        >>> import vitrim
        >>> space = Space(vitrim.ToMe(), num_layers=3, grid=(8, 8), num_prefix=1)
        >>> len(Slopes().starts(space)), Slopes().starts(space)[0]
        (9, (1.0, 0.5, 0.0))
    """

    children = 1

    def starts(self, space: Space) -> list[Point]:
        return [slope(float(s), space.size) for s in np.linspace(-1.0, 1.0, VALUES)] if space.size > 1 else []

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        return iter(())


class Curves(Strategy):
    """Points ``exp(a t + b t^2)``.

    Args:
        bred: derive them from the best trials, by steps and means; otherwise draw at random.
    """

    def __init__(self, *, bred: bool) -> None:
        self.bred = bred

    def starts(self, space: Space) -> list[Point]:
        """Two falling and two rising curves."""
        return [curve(2.0 * s, 0.0, space.size) for s in SLOPES] if space.size > 1 else []

    def propose(self, space: Space, seen: Sequence[Observation], seed: int) -> Iterator[tuple[str, Point]]:
        """Step away from one of the best, or mix two of them; or draw both parameters uniformly. Endlessly."""
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
    """The ``a`` and ``b`` of the curve nearest to a point.

    Example:
        >>> [round(one, 6) for one in bend_of(curve(-1.0, 0.5, 6))]
        [-1.0, 0.5]
    """
    depth = np.linspace(0.0, 1.0, len(point))
    terms = np.stack([np.ones_like(depth), depth, depth**2], axis=1)
    found = np.linalg.lstsq(terms, np.log(np.maximum(point, np.exp(-2 * LARGEST))), rcond=None)[0]
    return float(found[1]), float(found[2])


# ---- strategies by name ----------------------------------------------------------------------------------------------


def make_strategy(search: str = "evolution", shape: str = "free") -> Strategy:
    """The strategy with these names, see `Search` and `Shape`.

    Raises:
        VitrimError: an unknown name, or a search that does not support the shape.
        MissingPackageError: optuna is needed and not installed.

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
