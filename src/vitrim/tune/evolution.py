"""The built-in search: evolution under a limit of cost, racing on paired differences.

Candidates meet the limit by construction, so every forward is spent on their damage. They are scored on more and more
images, and stop where they are worse than the best one beyond noise. The winner is chosen on other images than those it
was searched on, and compared with the constant setting on a third set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitrim.core.config import MethodConfig
from vitrim.errors import VitrimError
from vitrim.tune.cost import Cost, cheapest, within
from vitrim.tune.proxy import Part, Proxy, Scorer, Scores
from vitrim.tune.space import Point, Space
from vitrim.tune.study import Study
from vitrim.tune.verdict import Difference, difference

CHILDREN = 4
PARENTS = 4
FINALISTS = 8
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
        source: how it was found: constant, start, mutation or crossover.
        images: images of the search part it was scored on.
        scores: means over them, by proxy; less is better.
    """

    number: int
    config: MethodConfig
    point: Point
    share: float
    source: str
    images: int
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """The findings of a search.

    Attributes:
        constant: the trial with one value for all blocks.
        searched: the trial that won on the selection images, which may be the constant one.
        check: searched minus constant on the check images, by proxy; empty where they are the same.
        better: whether the searched one beats the constant one beyond noise on the check images.
        trials: all, in their order.
    """

    constant: Trial
    searched: Trial
    check: Mapping[str, Difference]
    better: bool
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial to use: the constant one unless the searched one is better beyond noise."""
        return self.searched if self.better else self.constant


class Evolution:
    """A search for the least damage at a limited cost.

    Args:
        space: of the method.
        cost: what is limited.
        scorer: gives the damage of settings.
        study: keeps what was measured.
        proxy: the score that is minimised.
        seed: of the candidates that are drawn.
        on_trial: called with every finished trial.
    """

    def __init__(
        self,
        space: Space,
        cost: Cost,
        scorer: Scorer,
        study: Study,
        *,
        proxy: Proxy = "feature",
        seed: int = 0,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self.space, self.cost, self.scorer, self.study = space, cost, scorer, study
        self.proxy: Proxy = proxy
        self.seed, self.on_trial = seed, on_trial
        self.trials: list[Trial] = []
        self._full: dict[int, NDArray[np.float32]] = {}  # the scores of trials that saw all images, by number

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def run(self, limit: float, evaluations: int) -> Outcome:
        """Search at a cost of at most ``limit``, a share of the dense model's, with so many trials at most.

        Raises:
            VitrimError: the limit is out of reach, or the model has no such score.
        """
        return self.check(*self.explore(limit, evaluations))

    def explore(self, limit: float, evaluations: int) -> tuple[Trial, Trial]:
        """Search, and choose on the selection images; the constant trial and the chosen one, which may be the same."""
        self.trials, self._full = [], {}
        seen: set[str] = set()
        best = self._race(self._starts(limit, evaluations, seen), None)
        while len(self.trials) < evaluations:
            children = self._children(limit, min(CHILDREN, evaluations - len(self.trials)), seen)
            if not children:
                break
            best = self._race(children, best)
        return self.trials[0], self._select()

    def reaches(self, limit: float) -> bool:
        """Tell whether the constant setting can be so cheap."""
        return within(self.space, None, self.cost, limit) is not None

    def agreement(self, trial: Trial) -> float:
        """The agreement with the dense model on the selection images.

        Raises:
            VitrimError: the model's predictions do not agree or disagree image by image.
        """
        scores = self._scores([trial], "selection")[0]
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
        if searched is not constant:
            one, other = self._scores([searched, constant], "check")
            found = {name: difference(one[name], other[name]) for name in sorted(set(one) & set(other))}
        better = bool(found) and found[self.proxy].better
        if better and "kl" in found:  # a head may not care for what the feature gains
            better = found["kl"].mean <= 0.0
        return Outcome(constant, searched, found, better, tuple(self.trials if trials is None else trials))

    # ---- candidates --------------------------------------------------------------------------------------------------

    def _starts(self, limit: float, evaluations: int, seen: set[str]) -> list[_Candidate]:
        constant = within(self.space, None, self.cost, limit)
        if constant is None:
            least = cheapest(self.space, self.cost)
            raise VitrimError(
                f"{self.space.base.name} cannot go below {least:.0%} of the dense model's {self.cost.unit} here, and "
                f"{limit:.1%} are asked for"
            )
        found = [_Candidate(constant, self.space.point(constant), "constant")]
        seen.add(self.space.key(constant))
        level: Point = (1.0,) * self.space.size
        for point in [level, *self.space.slopes()] if self.space.size > 1 else []:
            candidate = self._candidate(point, limit, "start", seen)
            if candidate is not None and len(found) < evaluations:
                found.append(candidate)
        return found

    def _children(self, limit: float, number: int, seen: set[str]) -> list[_Candidate]:
        """New candidates from the best trials; they depend on the seed and on what was found, and on nothing else."""
        random = np.random.default_rng((self.seed, len(self.trials)))
        parents = sorted((self.trials[one] for one in self._full), key=self._score)[:PARENTS]
        found: list[_Candidate] = []
        if self.space.size < 2:
            return found
        for _ in range(TRIES * number):
            one, other = (parents[place] for place in random.integers(len(parents), size=2))
            if one is not other and random.random() < 0.3:
                source, point = "crossover", self.space.cross(one.point, other.point, random)
            else:
                source, point = "mutation", self.space.mutate(one.config, random)
            candidate = self._candidate(point, limit, source, seen)
            if candidate is not None:
                found.append(candidate)
            if len(found) == number:
                break
        return found

    def _candidate(self, point: Point, limit: float, source: str, seen: set[str]) -> _Candidate | None:
        """The setting of a point within the limit, unless there is none or it was there before."""
        config = within(self.space, point, self.cost, limit)
        if config is None or self.space.key(config) in seen:
            return None
        seen.add(self.space.key(config))
        return _Candidate(config, point, source)

    # ---- scores ------------------------------------------------------------------------------------------------------

    def _race(self, candidates: Sequence[_Candidate], best: Trial | None) -> Trial:
        """Score candidates on more and more images; those worse than the best beyond noise stop. Returns the best."""
        alive = list(range(len(candidates)))
        scores: list[dict[str, NDArray[np.float32]]] = [{} for _ in candidates]
        start = 0
        for stop in self._rungs():
            new = self._measured([candidates[place].config for place in alive], "search", start, stop)
            for place, found in zip(alive, new, strict=True):
                scores[place] = _joined(scores[place], found)
            start = stop
            alive = self._survivors(alive, scores, best)
        for place, candidate in enumerate(candidates):
            trial = self._finish(candidate, scores[place])
            if best is None or (trial.number in self._full and self._score(trial) < self._score(best)):
                best = trial
        assert best is not None
        return best

    def _survivors(
        self, alive: list[int], scores: Sequence[Mapping[str, NDArray[np.float32]]], best: Trial | None
    ) -> list[int]:
        """The candidates that may still win. Without a best trial they are compared with the first."""
        first = scores[0][self.proxy] if best is None else self._full[best.number]
        kept = []
        for place in alive:
            own = scores[place][self.proxy]
            if (best is None and place == 0) or not difference(own, first[: len(own)]).worse:
                kept.append(place)
        return kept

    def _finish(self, candidate: _Candidate, scores: Mapping[str, NDArray[np.float32]]) -> Trial:
        images = len(scores[self.proxy])
        means = {name: float(values.mean(dtype=np.float64)) for name, values in sorted(scores.items())}
        share = self.cost.share(candidate.config)
        trial = Trial(len(self.trials), candidate.config, candidate.point, share, candidate.source, images, means)
        self.trials.append(trial)
        if images == self.scorer.images("search"):
            self._full[trial.number] = scores[self.proxy]
        self.study.note(
            trial=trial.number, method=trial.config.describe(), share=share, source=trial.source, images=images,
            scores=means,
        )  # fmt: skip
        if self.on_trial is not None:
            self.on_trial(trial)
        return trial

    def _select(self) -> Trial:
        """The best on the selection images of the trials that did best in the search, the constant one among them."""
        ranked = sorted((self.trials[number] for number in self._full if number), key=self._score)
        finalists = [self.trials[0], *ranked[: FINALISTS - 1]]
        if len(finalists) == 1:
            return finalists[0]
        means = [scores[self.proxy].mean(dtype=np.float64) for scores in self._scores(finalists, "selection")]
        return finalists[int(np.argmin(means))]

    def _scores(self, trials: Sequence[Trial], part: Part) -> list[Scores]:
        return self._measured([trial.config for trial in trials], part, 0, self.scorer.images(part))

    def _measured(self, configs: Sequence[MethodConfig], part: Part, start: int, stop: int) -> list[Scores]:
        """Scores of all proxies on a piece of the images, from the study or by running the models."""

        def measure(places: Sequence[int]) -> Sequence[Scores]:
            return self.scorer([configs[place] for place in places], part, start, stop)

        texts = [config.describe() for config in configs]
        found = self.study.scores(f"{part} {start}-{stop}", texts, measure)
        for text, scores in zip(texts, found, strict=True):
            if self.proxy not in scores:
                raise VitrimError(f"{text}: this model has no {self.proxy} per image; it has: {', '.join(scores)}")
        return found

    def _score(self, trial: Trial) -> float:
        return trial.scores[self.proxy]

    def _rungs(self) -> list[int]:
        """The numbers of images after which candidates are compared: about an eighth, a half, all."""
        count, size = self.scorer.images("search"), self.scorer.batch_size
        pieces = (-(-count // (share * size)) * size for share in (8, 2, 1))
        return sorted({min(piece, count) for piece in pieces})


@dataclass(frozen=True)
class _Candidate:
    config: MethodConfig
    point: Point
    source: str


def _joined(before: Mapping[str, NDArray[np.float32]], new: Scores) -> dict[str, NDArray[np.float32]]:
    return {name: np.concatenate([before[name], new[name]]) if before else new[name] for name in new}
