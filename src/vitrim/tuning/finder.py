"""The search of one method: candidates under a limit of cost, racing on paired differences.

Candidates meet the limit by construction, so every forward is spent on their damage. They are scored on more and more
images, and stop where they are worse than the best one beyond noise. The winner is chosen on other images than those it
was searched on, and compared with the constant setting on a third set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.tuning.cost import Cost, cheapest, within
from vitrim.tuning.measured import Measured, joined, means
from vitrim.tuning.shapes import Shape, shaped, starts
from vitrim.tuning.space import Point, Space
from vitrim.tuning.strategies import Evolution, Strategy, Told
from vitrim.tuning.verdict import Difference, difference

FINALISTS = 8
TIMED = 4
"""Finalists that are timed where the cost is a latency that the search only predicts."""
TRIES = 30
"""Draws for a child that was not there before; where none is found, the space is known well enough."""


@dataclass(frozen=True)
class Trial:
    """One setting that was scored.

    Attributes:
        number: in the order of the search, the constant setting is 0.
        config: the setting.
        point: its weights.
        share: its cost as a share of the dense model's.
        source: how it was found: constant, start, mutation, crossover, random, gp or tpe.
        images: images of the search part it was scored on.
        scores: means over them, by proxy; less is better.
        measured: the cost as it was measured, of finalists where ``share`` is a prediction; else None.
    """

    number: int
    config: MethodConfig
    point: Point
    share: float
    source: str
    images: int
    scores: Mapping[str, float]
    measured: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The findings of a search.

    Attributes:
        constant: the trial with one value for all blocks.
        searched: the trial that won on the selection images, which may be the constant one.
        check: searched minus constant on the check images, by proxy; empty where they are the same.
        better: whether the searched one beats the constant one beyond noise on the check images.
        trials: all, in their order.
        levels: means on the check images by proxy, of "constant" and "searched"; empty where they are the same.
    """

    constant: Trial
    searched: Trial
    check: Mapping[str, Difference]
    better: bool
    trials: tuple[Trial, ...]
    levels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def best(self) -> Trial:
        """The trial to use: the constant one unless the searched one is better beyond noise."""
        return self.searched if self.better else self.constant


@dataclass(frozen=True)
class Candidate:
    """A setting that is to be scored: how it was found, and the point it is of."""

    config: MethodConfig
    point: Point
    source: str


class Finder:
    """A search for the least damage that one method does at a limited cost.

    Args:
        space: of the method.
        cost: what is limited.
        measured: gives the damage of settings, and keeps it.
        strategy: proposes candidates; default evolution.
        seed: of the candidates that are drawn.
        shape: of the settings that are tried.
        stops: asked before new candidates are proposed; True ends the search.
        on_trial: called with every finished trial.
    """

    def __init__(
        self,
        space: Space,
        cost: Cost,
        measured: Measured,
        *,
        strategy: Strategy | None = None,
        seed: int = 0,
        shape: Shape = "free",
        stops: Callable[[], bool] = bool,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self.space, self.cost, self.measured = space, cost, measured
        self.strategy, self.shape, self.stops = shaped(strategy or Evolution(), shape), shape, stops
        self.proxy = measured.proxy
        self.seed, self.on_trial = seed, on_trial
        self.trials: list[Trial] = []
        self._seen: list[NDArray[np.float32]] = []  # the scores of the trials

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def run(self, limit: float, evaluations: int) -> Outcome:
        """Search at a cost of at most ``limit``, a share of the dense model's, with so many trials at most.

        Raises:
            VitrimError: the limit is out of reach, or the model has no such score.
        """
        return self.check(*self.explore(limit, evaluations))

    def explore(self, limit: float, evaluations: int) -> tuple[Trial, Trial]:
        """Search, and choose on the selection images; the constant trial and the chosen one, which may be the same."""
        self.trials, self._seen = [], []
        starts = self.starts(limit)[:evaluations]
        seen = {self.space.key(start.config) for start in starts}
        best = self._race(starts, None)
        while len(self.trials) < evaluations and not self.stops():
            children = self._children(limit, min(self.strategy.children, evaluations - len(self.trials)), seen)
            if not children:
                break
            best = self._race(children, best)
        chosen = self._proved(self._finalists(), limit)
        return self.trials[0], chosen

    def starts(self, limit: float) -> list[Candidate]:
        """The candidates that a search begins with, the constant setting first.

        Raises:
            VitrimError: the limit is out of reach.
        """
        constant = within(self.space, None, self.cost, limit)
        if constant is None:
            raise VitrimError(self.out_of_reach(limit))
        seen = {self.space.key(constant)}
        found = [Candidate(constant, self.space.point(constant), "constant")]
        for point in starts(self.space, self.shape):
            candidate = self._candidate(point, limit, "start", seen)
            found += [] if candidate is None else [candidate]
        return found

    def out_of_reach(self, limit: float) -> str:
        """The reason why no setting is so cheap."""
        least = cheapest(self.space, self.cost)
        return (
            f"{self.space.base.name} cannot go below {least:.0%} of the dense model's {self.cost.unit} here, and "
            f"{limit:.1%} are asked for"
        )

    def reaches(self, limit: float) -> bool:
        """Tell whether the constant setting can be so cheap."""
        return within(self.space, None, self.cost, limit) is not None

    def agreement(self, trial: Trial) -> float:
        """The agreement with the dense model on the selection images.

        Raises:
            VitrimError: the model's predictions do not agree or disagree image by image.
        """
        scores = self.measured.whole([trial.config], "selection")[0]
        if "agree" not in scores:
            raise VitrimError("this model's predictions do not agree or disagree image by image: give another target")
        return 1.0 - float(scores["agree"].mean(dtype=np.float64))

    def check(self, constant: Trial, searched: Trial, trials: Sequence[Trial] | None = None) -> Outcome:
        """Compare the chosen trial with the constant one on images that neither was chosen by.

        Args:
            constant, searched: as `explore` gives them.
            trials: all that led to them; by default those of the last `explore`.
        """
        found: dict[str, Difference] = {}
        levels: dict[str, dict[str, float]] = {}
        if searched is not constant:
            one, other = self.measured.whole([searched.config, constant.config], "check")
            found = {name: difference(one[name], other[name]) for name in sorted(set(one) & set(other))}
            levels = {"constant": means(other), "searched": means(one)}
        better = bool(found) and found[self.proxy].better
        if better and "kl" in found:  # a head may not care for what the feature gains
            better = found["kl"].mean <= 0.0
        return Outcome(constant, searched, found, better, tuple(self.trials if trials is None else trials), levels)

    # ---- candidates --------------------------------------------------------------------------------------------------

    def _children(self, limit: float, number: int, seen: set[str]) -> list[Candidate]:
        """New candidates; they depend on the seed and on what was found, and on nothing else."""
        found: list[Candidate] = []
        if self.space.size < 2:
            return found
        proposals = self.strategy.propose(self.space, self._told(), self.seed)
        for source, point in islice(proposals, TRIES * number):
            candidate = self._candidate(point, limit, source, seen)
            if candidate is not None:
                found.append(candidate)
            if len(found) == number:
                break
        return found

    def _told(self) -> list[Told]:
        """The trials as a strategy sees them. What one that stopped would have come to is estimated from its
        differences to the best trial on the images that both saw."""
        best = min((trial for trial in self.trials if self._full(trial)), key=self._score)
        whole = self._seen[best.number]
        mean = float(whole.mean(dtype=np.float64))
        told = []
        for trial, own in zip(self.trials, self._seen, strict=True):
            full = self._full(trial)
            gap = float((own - whole[: len(own)]).mean(dtype=np.float64))
            told.append(Told(trial.point, trial.config, self._score(trial) if full else mean + gap, full))
        return told

    def _full(self, trial: Trial) -> bool:
        return trial.images == self.measured.images("search")

    def _candidate(self, point: Point, limit: float, source: str, seen: set[str]) -> Candidate | None:
        """The setting of a point within the limit, unless there is none or it was there before."""
        config = within(self.space, point, self.cost, limit)
        if config is None or self.space.key(config) in seen:
            return None
        seen.add(self.space.key(config))
        return Candidate(config, point, source)

    # ---- scores ------------------------------------------------------------------------------------------------------

    def _race(self, candidates: Sequence[Candidate], best: Trial | None) -> Trial:
        """Score candidates on more and more images; those worse than the best beyond noise stop. Returns the best."""
        alive = list(range(len(candidates)))
        scores: list[dict[str, NDArray[np.float32]]] = [{} for _ in candidates]
        start = 0
        for stop in self.measured.rounds():
            new = self.measured.piece([candidates[place].config for place in alive], "search", start, stop)
            for place, found in zip(alive, new, strict=True):
                scores[place] = joined(scores[place], found)
            start = stop
            alive = self._survivors(alive, scores, best)
        for place, candidate in enumerate(candidates):
            trial = self._finish(candidate, scores[place])
            if best is None or (self._full(trial) and self._score(trial) < self._score(best)):
                best = trial
        assert best is not None
        return best

    def _survivors(
        self, alive: list[int], scores: Sequence[Mapping[str, NDArray[np.float32]]], best: Trial | None
    ) -> list[int]:
        """The candidates that may still win. Without a best trial they are compared with the first."""
        first = scores[0][self.proxy] if best is None else self._seen[best.number]
        kept = []
        for place in alive:
            own = scores[place][self.proxy]
            if (best is None and place == 0) or not difference(own, first[: len(own)]).worse:
                kept.append(place)
        return kept

    def _finish(self, candidate: Candidate, scores: Mapping[str, NDArray[np.float32]]) -> Trial:
        share, images, number = self.cost.share(candidate.config), len(scores[self.proxy]), len(self.trials)
        trial = Trial(number, candidate.config, candidate.point, share, candidate.source, images, means(scores))
        self.trials.append(trial)
        self._seen.append(scores[self.proxy])
        self.measured.study.note(
            trial=number, method=trial.config.describe(), share=share, source=trial.source, images=images,
            scores=dict(trial.scores),
        )  # fmt: skip
        if self.on_trial is not None:
            self.on_trial(trial)
        return trial

    def _finalists(self) -> list[Trial]:
        """The trials that did best in the search and the constant one; the best on the selection images first."""
        ranked = sorted((trial for trial in self.trials[1:] if self._full(trial)), key=self._score)
        finalists = [self.trials[0], *ranked[: FINALISTS - 1]]
        if len(finalists) == 1:
            return finalists
        scores = self.measured.whole([trial.config for trial in finalists], "selection")
        order = np.argsort([self.measured.mean(one) for one in scores], kind="stable")
        return [finalists[place] for place in order]

    def _proved(self, ranked: Sequence[Trial], limit: float) -> Trial:
        """The first of ``ranked`` whose cost is within the limit where it is measured, up to the error of predictions.

        The first few and the constant trial are measured; if none of the first few is within, the cheapest is taken.
        """
        first = [trial.number for trial in ranked[:TIMED]]
        timed = first if 0 in first else [*first, 0]
        shares = self.cost.measured([self.trials[number].config for number in timed])
        if shares is None:
            return ranked[0]
        real = dict(zip(timed, shares, strict=True))
        for number, share in real.items():
            self.trials[number] = replace(self.trials[number], measured=share)
        near = limit * (1.0 + self.cost.error)
        cheapest_first = sorted(first, key=real.__getitem__)
        return self.trials[next((number for number in first if real[number] <= near), cheapest_first[0])]

    def _score(self, trial: Trial) -> float:
        return trial.scores[self.proxy]
