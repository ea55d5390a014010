"""The search of one method: candidates under a limit of cost, racing on paired differences.

Candidates meet the limit by construction, so every forward is spent on their damage. They are scored on more and more
images, and stop where they are worse than the best one beyond noise. The winner is chosen on other images than those it
was searched on, and compared with the constant setting on a third set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.tuning.cost import Cost, within
from vitrim.tuning.proxy import Scores
from vitrim.tuning.result import Difference, Result, Target, Trial, difference
from vitrim.tuning.space import Point, Space
from vitrim.tuning.strategy import Evolution, Observation, Strategy
from vitrim.tuning.study import Evaluator, joined, means

FINALISTS = 8
"""Trials that are compared on the selection images."""

TIMED = 4
"""Finalists that are timed where the cost is a latency that the search only predicts."""

TRIES = 30
"""Draws for a child that was not there before; where none is found, the space is known well enough."""

HALVINGS = 5
"""Searches at other costs until the cheapest one that agrees enough is known well enough."""


@dataclass(frozen=True)
class Candidate:
    """A setting that is to be scored: where it is from, and the point it is of."""

    config: MethodConfig
    point: Point
    source: str


class Search:
    """A search for the least damage that one method does at the cost of a target.

    Args:
        space: of the method.
        cost: what is limited.
        evaluator: gives the damage of settings.
        target: what is asked for.
        strategy: proposes candidates; default evolution.
        seed: of the candidates that are drawn.
        stops: asked before new candidates are proposed; True ends the search.
        on_trial: called with every finished trial.

    Attributes:
        trials: of the last exploration, in their order; the first is the constant setting.
    """

    def __init__(
        self,
        space: Space,
        cost: Cost,
        evaluator: Evaluator,
        target: Target,
        *,
        strategy: Strategy | None = None,
        seed: int = 0,
        stops: Callable[[], bool] = bool,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self.space, self.cost, self.evaluator, self.target = space, cost, evaluator, target
        self.strategy, self.seed, self.stops, self.on_trial = strategy or Evolution(), seed, stops, on_trial
        self.proxy = evaluator.proxy
        self.trials: list[Trial] = []
        self._seen: list[NDArray[np.float32]] = []  # the scores of the trials

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def run(self, evaluations: int) -> Result:
        """Search for the target with so many trials at most; for ``agree`` at every cost of a bisection, with its share
        of the trials.

        Raises:
            VitrimError: the target is out of reach, or the model has no such score.
        """
        if self.target.kind != "agree":
            return self.check(*self.explore(self.target.limit, evaluations))
        low, high, best = 0.0, 1.0, None
        trials: list[Trial] = []
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self.reaches(middle):
                pair = self.explore(middle, max(evaluations // HALVINGS, 1))
                trials += self.trials
                if self.agreement(pair[1]) >= self.target.value:
                    best, high = pair, middle
                    continue
            low = middle
        if best is None:
            raise VitrimError(
                f"{self.space.base.name} does not agree with the dense model in {self.target.value:.1%} of the "
                f"selection images at {low:.0%} of its MACs: ask for less"
            )
        result = self.check(*best, trials)
        if result.better or self.agreement(result.constant) >= self.target.value:
            return result
        # the cheapest constant setting that agrees enough costs more than what was searched, so it is the answer
        # whatever their difference
        low, high = high, 1.0
        constant, _ = self.explore(high, 1)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            trial, _ = self.explore(middle, 1)
            if self.agreement(trial) >= self.target.value:
                constant, high = trial, middle
            else:
                low = middle
        return replace(self.check(constant, result.searched, trials), better=False)

    def explore(self, limit: float, evaluations: int) -> tuple[Trial, Trial]:
        """Search at a cost of at most ``limit``, a share of the dense model's, and choose on the selection images.

        Returns:
            The constant trial and the chosen one, which may be the same.
        """
        self.trials, self._seen = [], []
        starts = self.starts(limit)[:evaluations]
        seen = {self.space.key(start.config) for start in starts}
        best = self._race(starts, None)
        while len(self.trials) < evaluations and not self.stops():
            children = self._children(limit, min(self.strategy.children, evaluations - len(self.trials)), seen)
            if not children:
                break
            best = self._race(children, best)
        ranked = sorted((trial for trial in self.trials[1:] if self._full(trial)), key=self._score)
        finalists = [self.trials[0], *ranked[: FINALISTS - 1]]
        if len(finalists) > 1:
            scores = self.evaluator.whole([trial.config for trial in finalists], "selection")
            order = np.argsort([self.evaluator.mean(one) for one in scores], kind="stable")
            finalists = [finalists[place] for place in order]
        chosen = self._first_within(finalists, limit)
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
        for point in self.strategy.starts(self.space):
            candidate = self._candidate(point, limit, "start", seen)
            found += [] if candidate is None else [candidate]
        return found

    def out_of_reach(self, limit: float) -> str:
        """The reason why no setting is so cheap."""
        least = self.cost.share(self.space.constant(1.0))
        return (
            f"{self.space.base.name} cannot go below {least:.0%} of the dense model's {self.cost.unit} here, and "
            f"{limit:.1%} are asked for"
        )

    def reaches(self, limit: float) -> bool:
        """Whether the constant setting can be so cheap."""
        return within(self.space, None, self.cost, limit) is not None

    def agreement(self, trial: Trial) -> float:
        """The agreement with the dense model on the selection images.

        Raises:
            VitrimError: the model's predictions do not agree or disagree image by image.
        """
        scores = self.evaluator.whole([trial.config], "selection")[0]
        if "agree" not in scores:
            raise VitrimError("this model's predictions do not agree or disagree image by image: give another target")
        return 1.0 - float(scores["agree"].mean(dtype=np.float64))

    def check(self, constant: Trial, searched: Trial, trials: Sequence[Trial] | None = None) -> Result:
        """Compare the chosen trial with the constant one on images that neither was chosen by.

        Args:
            constant, searched: as `explore` gives them.
            trials: all that led to them; by default those of the last `explore`.
        """
        found: dict[str, Difference] = {}
        levels: dict[str, dict[str, float]] = {}
        if searched is not constant:
            one, other = self.evaluator.whole([searched.config, constant.config], "check")
            found = {name: difference(one[name], other[name]) for name in sorted(set(one) & set(other))}
            levels = {"constant": means(other), "searched": means(one)}
        better = bool(found) and found[self.proxy].better
        if better and "kl" in found:  # a head may not care for what the feature gains
            better = found["kl"].mean <= 0.0
        every = tuple(self.trials if trials is None else trials)
        return Result(constant, searched, found, better, every, levels, self.proxy, self.target, self.cost)

    # ---- candidates --------------------------------------------------------------------------------------------------

    def _children(self, limit: float, number: int, seen: set[str]) -> list[Candidate]:
        """New candidates; they depend on the seed and on what was found, and on nothing else."""
        found: list[Candidate] = []
        if self.space.size < 2:
            return found
        proposals = self.strategy.propose(self.space, self._observations(), self.seed)
        for source, point in islice(proposals, TRIES * number):
            candidate = self._candidate(point, limit, source, seen)
            if candidate is not None:
                found.append(candidate)
            if len(found) == number:
                break
        return found

    def _observations(self) -> list[Observation]:
        """The trials as a strategy sees them. What one that stopped would have come to is estimated from its
        differences to the best trial on the images that both saw."""
        best = min((trial for trial in self.trials if self._full(trial)), key=self._score)
        whole = self._seen[best.number]
        mean = float(whole.mean(dtype=np.float64))
        found = []
        for trial, own in zip(self.trials, self._seen, strict=True):
            full = self._full(trial)
            gap = float((own - whole[: len(own)]).mean(dtype=np.float64))
            found.append(Observation(trial.point, trial.config, self._score(trial) if full else mean + gap, full))
        return found

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
        scores: list[Scores] = [{} for _ in candidates]
        start = 0
        for stop in self.evaluator.rounds():
            new = self.evaluator.piece([candidates[place].config for place in alive], "search", start, stop)
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

    def _survivors(self, alive: list[int], scores: Sequence[Scores], best: Trial | None) -> list[int]:
        """The candidates that may still win. Without a best trial they are compared with the first."""
        first = scores[0][self.proxy] if best is None else self._seen[best.number]
        kept = []
        for place in alive:
            own = scores[place][self.proxy]
            if (best is None and place == 0) or not difference(own, first[: len(own)]).worse:
                kept.append(place)
        return kept

    def _finish(self, candidate: Candidate, scores: Scores) -> Trial:
        share, images, number = self.cost.share(candidate.config), len(scores[self.proxy]), len(self.trials)
        trial = Trial(number, candidate.config, candidate.point, share, candidate.source, images, means(scores))
        self.trials.append(trial)
        self._seen.append(scores[self.proxy])
        self.evaluator.study.note(
            trial=number, method=trial.config.describe(), share=share, source=trial.source, images=images,
            scores=dict(trial.scores),
        )  # fmt: skip
        if self.on_trial is not None:
            self.on_trial(trial)
        return trial

    def _first_within(self, ranked: Sequence[Trial], limit: float) -> Trial:
        """The first of ``ranked`` whose cost is within the limit where it is measured, up to the error of predictions.

        The first few and the constant trial are measured; if none of the first few is within, the cheapest is taken.
        """
        first = [trial.number for trial in ranked[:TIMED]]
        timed = first if 0 in first else [*first, 0]
        shares = self.cost.measure([self.trials[number].config for number in timed])
        if shares is None:
            return ranked[0]
        real = dict(zip(timed, shares, strict=True))
        for number, share in real.items():
            self.trials[number] = replace(self.trials[number], measured=share)
        near = limit * (1.0 + self.cost.error)
        cheapest_first = sorted(first, key=real.__getitem__)
        return self.trials[next((number for number in first if real[number] <= near), cheapest_first[0])]

    def _full(self, trial: Trial) -> bool:
        return trial.images == self.evaluator.images("search")

    def _score(self, trial: Trial) -> float:
        return trial.scores[self.proxy]
