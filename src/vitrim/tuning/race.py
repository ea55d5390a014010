"""Several methods against each other: a race on few images, a search of those that are left, one that is proved.

What methods are compared by is the best of what their searches start from. A method leaves the race where it is worse
than the leading one by more than three standard errors of the paired differences, and by more than that on few images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.tuning.cost import Cost
from vitrim.tuning.finder import Candidate, Finder, Outcome, Trial
from vitrim.tuning.measured import Measured, joined
from vitrim.tuning.verdict import Difference, difference

ERRORS = 3.0
"""Standard errors behind the leader at which a method is out: of many methods one is often 2 behind by chance."""

SURVIVORS = 3
"""Methods that are searched, at most."""

State = Literal["searched", "dropped", "out of reach"]


@dataclass(frozen=True)
class Raced:
    """The course of one method in a race.

    Attributes:
        method: as it was given.
        state: searched; dropped in the race; or unable to reach the target.
        config: the best setting of the race, of a search the one it chose; None where the target is out of reach.
        share: its cost as a share of the dense model's.
        images: search images that it was raced on.
        score: mean of the proxy over these, and for those that were searched over the selection images.
        behind: its difference to the leader at the end of its race; None for the leader.
        note: why the target is out of reach.
    """

    method: str
    state: State
    config: MethodConfig | None = None
    share: float | None = None
    images: int = 0
    score: float | None = None
    behind: Difference | None = None
    note: str = ""


@dataclass(eq=False)
class _Runner:
    finder: Finder
    starts: list[Candidate]
    best: Candidate
    scores: dict[str, NDArray[np.float32]]
    behind: Difference | None = None
    """To the leader of the last round."""


def race(
    finders: Sequence[Finder], measured: Measured, limit: float, evaluations: int
) -> tuple[Outcome, tuple[Raced, ...], Cost]:
    """Race methods, search the best of them, and compare the winner with the best constant setting.

    Args:
        finders: one for each method.
        measured: of all of them.
        limit: share of the dense model's cost.
        evaluations: most settings that the searches try together.

    Returns:
        The outcome, in which the constant trial is the best constant setting of all methods searched; a row for every
        method, best first; and the cost of the winner.

    Raises:
        VitrimError: no method reaches the limit.
    """
    able = [finder for finder in finders if finder.reaches(limit)]
    far = [
        Raced(finder.space.base.describe(), "out of reach", note=finder.out_of_reach(limit))
        for finder in finders
        if finder not in able
    ]
    if not able:
        raise VitrimError("; ".join(row.note for row in far))
    survivors, dropped = _raced(able, measured, limit)
    for row in dropped:
        measured.study.note(dropped=row.method, images=row.images, score=row.score)
    pairs = [one.finder.explore(limit, max(evaluations // len(survivors), 1)) for one in survivors]
    chosen = _best([pair[1] for pair in pairs], measured)
    constant = _best([pair[0] for pair in pairs], measured)
    finder = survivors[chosen].finder
    trials = tuple(
        replace(trial, number=number) for number, trial in enumerate(t for one in survivors for t in one.finder.trials)
    )
    outcome = finder.check(pairs[constant][0], pairs[chosen][1], trials)
    searched = [_searched(one, pair[1], measured) for one, pair in zip(survivors, pairs, strict=True)]
    rows = [*sorted(searched, key=lambda row: row.score or 0.0), *dropped, *far]
    return outcome, tuple(rows), finder.cost


def _raced(finders: Sequence[Finder], measured: Measured, limit: float) -> tuple[list[_Runner], list[Raced]]:
    """The methods that are left after all rounds, best first, and rows of the others, the last to leave first."""
    runners: list[_Runner] = []
    dropped: list[Raced] = []
    start = 0
    for stop in measured.rounds():
        if start == 0:
            runners = [_start(finder, measured, limit, stop) for finder in finders]
        else:
            for one in runners:
                new = measured.piece([one.best.config], "search", start, stop)[0]
                one.scores = joined(one.scores, new)
        start = stop
        runners.sort(key=lambda one: measured.mean(one.scores))
        leader = runners[0].scores[measured.proxy]
        for one in runners[1:]:
            one.behind = difference(one.scores[measured.proxy], leader)
        runners[0].behind = None
        out = [one for one in runners if one.behind and one.behind.mean > _bar(stop) * one.behind.error]
        dropped = [*(_dropped(one, measured) for one in out), *dropped]
        runners = [one for one in runners if one not in out]
    last = [_dropped(one, measured) for one in runners[SURVIVORS:]]
    return runners[:SURVIVORS], [*last, *dropped]


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


def _start(finder: Finder, measured: Measured, limit: float, stop: int) -> _Runner:
    """A method with the best of its starts on the first images."""
    starts = finder.starts(limit)
    scores = measured.piece([one.config for one in starts], "search", 0, stop)
    best = int(np.argmin([measured.mean(one) for one in scores]))
    return _Runner(finder, starts, starts[best], dict(scores[best]))


def _dropped(one: _Runner, measured: Measured) -> Raced:
    config, images = one.best.config, len(one.scores[measured.proxy])
    score, share = measured.mean(one.scores), one.finder.cost.share(config)
    return Raced(one.finder.space.base.describe(), "dropped", config, share, images, score, one.behind)


def _searched(one: _Runner, chosen: Trial, measured: Measured) -> Raced:
    score = measured.mean(measured.whole([chosen.config], "selection")[0])
    images = len(one.scores[measured.proxy])
    return Raced(one.finder.space.base.describe(), "searched", chosen.config, chosen.share, images, score, one.behind)


def _best(trials: Sequence[Trial], measured: Measured) -> int:
    """The place of the best trial on the selection images."""
    scores = measured.whole([trial.config for trial in trials], "selection")
    return int(np.argmin([measured.mean(one) for one in scores]))
