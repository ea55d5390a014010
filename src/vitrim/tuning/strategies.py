"""Where the candidates of a search come from: evolution, which is built in, chance, or optuna's samplers.

A strategy keeps nothing: what it proposes follows from the seed and from what was found so far. So a search that is
resumed goes on as if it had never stopped.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from vitrim.core.method import MethodConfig
from vitrim.errors import MissingPackageError, unknown
from vitrim.tuning.space import Point, Space, normal

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

Search = Literal["evolution", "random", "gp", "tpe"]
"""``evolution``: mutation and crossover of the best; ``random``: points at random; ``gp``, ``tpe``: optuna's Gaussian
process and tree of Parzen estimators."""

PARENTS = 4
FURTHER = 0.03
"""Standard deviation that is added with every proposal of a sampler that was there before."""


@dataclass(frozen=True)
class Told:
    """A trial as a strategy knows it.

    Attributes:
        point: its weights.
        config: its setting.
        value: its score on all search images; of a trial that stopped before, estimated from those it saw.
        full: whether it saw all of them.
    """

    point: Point
    config: MethodConfig
    value: float
    full: bool


class Strategy(Protocol):
    """Proposes points."""

    children: int
    """Candidates that are scored together, before the next are proposed."""

    def propose(self, space: Space, told: Sequence[Told], seed: int) -> Iterator[tuple[str, Point]]:
        """Name the source of a point, and the point, without end.

        Args:
            space: of at least two values.
            told: the trials so far, in their order.
            seed: of the search.
        """
        ...


class Evolution:
    """Neighbours and mixtures of the best trials that saw all images."""

    children = 4

    def propose(self, space: Space, told: Sequence[Told], seed: int) -> Iterator[tuple[str, Point]]:
        """Mutate one of the best, or cross two of them."""
        random = np.random.default_rng((seed, len(told)))
        parents = sorted((one for one in told if one.full), key=lambda one: one.value)[:PARENTS]
        while True:
            one, other = (parents[place] for place in random.integers(len(parents), size=2))
            if one is not other and random.random() < 0.3:
                yield "crossover", space.cross(one.point, other.point, random)
            else:
                yield "mutation", space.mutate(one.config, random)


class Chance:
    """Points at random, a fifth of the weights 0."""

    children = 4

    def propose(self, space: Space, told: Sequence[Told], seed: int) -> Iterator[tuple[str, Point]]:
        """Draw weights evenly."""
        random = np.random.default_rng((seed, len(told)))
        while True:
            yield "random", normal((random.random(space.size) * (random.random(space.size) < 0.8)).tolist())


class Optuna:
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

    def propose(self, space: Space, told: Sequence[Told], seed: int) -> Iterator[tuple[str, Point]]:
        """Ask the sampler, told of all trials, then go further and further away from the point that it proposes:
        whole tokens make near points the same setting, and a setting that was there before is not tried again."""
        asked = self._ask(space, told, (seed + len(told)) % 2**32)
        random, far = np.random.default_rng((seed, len(told))), 0.0
        while True:
            weights = asked if far == 0.0 else (asked + random.normal(0.0, far, len(asked))).clip(0.0, 1.0)
            yield self.name, normal(weights.tolist())
            far += FURTHER

    def _ask(self, space: Space, told: Sequence[Told], seed: int) -> NDArray[np.float64]:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        names = [f"w{place:03d}" for place in range(space.size)]
        ranges: dict[str, Any] = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what optuna calls experimental
            study = optuna.create_study(sampler=self._sampler(seed))
            for one in told:
                params = dict(zip(names, one.point, strict=True))
                study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, value=one.value))
            asked = study.ask(ranges)
        return np.array([asked.params[name] for name in names])

    def _sampler(self, seed: int) -> BaseSampler:
        import optuna

        if self.name == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=1, multivariate=True)


def make_strategy(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        VitrimError: there is none.
        MissingPackageError: it needs optuna, which is not installed.
    """
    if name == "evolution":
        return Evolution()
    if name == "random":
        return Chance()
    if name in ("gp", "tpe"):
        return Optuna(name)  # type: ignore[arg-type]
    raise unknown("search", name, get_args(Search))
