"""Several methods against each other: a race on few images, a search of those that are left, one that is proved.

What methods are compared by is the best of what their searches start from. A method leaves the race where it is worse
than the leading one by more than three standard errors of the paired differences, and by more than that on few images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.tuning.proxy import Scores
from vitrim.tuning.result import Difference, Raced, Result, Trial, difference
from vitrim.tuning.search import Candidate, Search
from vitrim.tuning.study import Evaluator, joined

ERRORS = 3.0
"""Standard errors behind the leader at which a method is out: of many methods one is often 2 behind by chance."""

SURVIVORS = 3
"""Methods that are searched, at most."""


@dataclass(eq=False)
class Runner:
    """A method in the race: its search, the best of what that starts from, and the scores of this one so far.

    Attributes:
        search: of the method.
        best: the best start on the first images.
        scores: of the best start.
        behind: the difference to the leader of the last round; None for the leader.
    """

    search: Search
    best: Candidate
    scores: Scores
    behind: Difference | None = None

    def row(self, state: Literal["searched", "dropped"], config: MethodConfig, score: float) -> Raced:
        """The row of the method, with its setting and the score of that."""
        share, images = self.search.cost.share(config), len(self.scores[self.search.proxy])
        return Raced(self.search.space.base.describe(), state, config, share, images, score, self.behind)


def race(searches: Sequence[Search], evaluations: int) -> Result:
    """Race methods, search the best of them, and compare the winner with the best constant setting.

    Args:
        searches: one for each method, all of one target and with one evaluator.
        evaluations: most settings that the searches try together.

    Returns:
        The result, in which the constant trial is the best constant setting of all methods searched, with a row for
        every method, best first.

    Raises:
        VitrimError: no method reaches the target.
    """
    evaluator, limit = searches[0].evaluator, searches[0].target.limit
    able = [search for search in searches if search.reaches(limit)]
    far = [
        Raced(search.space.base.describe(), "out of reach", note=search.out_of_reach(limit))
        for search in searches
        if search not in able
    ]
    if not able:
        raise VitrimError("; ".join(row.note for row in far))
    survivors, dropped = survivors_of(able, evaluator, limit)
    for row in dropped:
        evaluator.study.note(dropped=row.method, images=row.images, score=row.score)
    pairs = [one.search.explore(limit, max(evaluations // len(survivors), 1)) for one in survivors]

    def best(trials: Sequence[Trial]) -> int:
        scores = evaluator.whole([trial.config for trial in trials], "selection")
        return int(np.argmin([evaluator.mean(one) for one in scores]))

    chosen, constant = best([pair[1] for pair in pairs]), best([pair[0] for pair in pairs])
    every = [trial for one in survivors for trial in one.search.trials]
    trials = [replace(trial, number=number) for number, trial in enumerate(every)]
    result = survivors[chosen].search.check(pairs[constant][0], pairs[chosen][1], trials)
    searched = []
    for one, (_, trial) in zip(survivors, pairs, strict=True):
        score = evaluator.mean(evaluator.whole([trial.config], "selection")[0])
        searched.append(one.row("searched", trial.config, score))
    searched.sort(key=lambda row: row.score or 0.0)
    return replace(result, race=(*searched, *dropped, *far))


def survivors_of(searches: Sequence[Search], evaluator: Evaluator, limit: float) -> tuple[list[Runner], list[Raced]]:
    """The methods that are left after all rounds, best first, and rows of the others, the last to leave first."""
    runners: list[Runner] = []
    dropped: list[Raced] = []

    def rows(out: Sequence[Runner]) -> list[Raced]:
        return [one.row("dropped", one.best.config, evaluator.mean(one.scores)) for one in out]

    start = 0
    for stop in evaluator.rounds():
        if start == 0:
            for search in searches:
                starts = search.starts(limit)
                scores = evaluator.piece([one.config for one in starts], "search", 0, stop)
                best = int(np.argmin([evaluator.mean(one) for one in scores]))
                runners.append(Runner(search, starts[best], scores[best]))
        else:
            for one in runners:
                new = evaluator.piece([one.best.config], "search", start, stop)[0]
                one.scores = joined(one.scores, new)
        start = stop
        runners.sort(key=lambda one: evaluator.mean(one.scores))
        leader = runners[0].scores[evaluator.proxy]
        runners[0].behind = None
        for one in runners[1:]:
            one.behind = difference(one.scores[evaluator.proxy], leader)
        out = [one for one in runners if one.behind and one.behind.mean > _bar(stop) * one.behind.error]
        dropped = [*rows(out), *dropped]
        runners = [one for one in runners if one not in out]
    return runners[:SURVIVORS], [*rows(runners[SURVIVORS:]), *dropped]


def _bar(images: int) -> float:
    """Standard errors behind which a method is out, as unlikely on few images as `ERRORS` are on many.

    Student's quantile with ``images - 1`` degrees of freedom, expanded at the normal one (Abramowitz and Stegun,
    26.7.5): on 8 images a method that is as good as the leader is 3 errors behind in 1 of 100 cases, not in 1 of 700.

    Example:
        >>> [round(_bar(images), 1) for images in (8, 32, 256, 2048)]
        [4.5, 3.3, 3.0, 3.0]
    """
    z, degrees = ERRORS, images - 1
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
