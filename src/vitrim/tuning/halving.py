"""Successive halving: settings are scored on more and more images, and those clearly behind the best drop out."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.measure.store import Store
from vitrim.report import Pace
from vitrim.tuning.proxy import ModelScorer, Scores, Third

ROUNDS = (8, 2, 1)
"""Rounds end after an eighth of the images, a half, and all."""

ERRORS = 2.0
"""Standard errors beyond which a difference is more than noise."""

FEW = 3.5
"""Over the number of images, standard errors more at which a setting drops out: on few images, the error is itself
uncertain. As unlikely as `ERRORS` on many images by Student's t are 2.4 on 8, and 2.1 on 32."""


# ---- comparisons -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and its standard error.

    Attributes:
        mean: mean of first minus second; negative if the first is better.
    """

    mean: float
    error: float
    images: int

    @property
    def better(self) -> bool:
        """True if the first is significantly better."""
        return self.mean < 0.0 and self.mean < -ERRORS * self.error

    @property
    def far_behind(self) -> bool:
        """True if the first is so much worse that a race goes on without it."""
        return self.mean > 0.0 and self.mean > (ERRORS + FEW / self.images) * self.error


def difference(one: ArrayLike, other: ArrayLike) -> Difference:
    """Compare scores (N,) of the same images, N at least 2; less is better.

    Raises:
        VitrimError: fewer than two images.

    Example:
        >>> difference([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.5])
        Difference(mean=-1.125, error=0.125, images=4)
    """
    pairs = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    if len(pairs) < 2:
        raise VitrimError(f"{len(pairs)} images say nothing about noise: give at least 2 to every comparison")
    return Difference(float(pairs.mean()), float(pairs.std(ddof=1) / np.sqrt(len(pairs))), len(pairs))


# ---- scores ----------------------------------------------------------------------------------------------------------


class Evaluator:
    """Scores of settings on pieces of the images, from the store or by running the models, each once.

    ``proxy`` is the score to minimise; ``tell`` hears after every batch how much of a piece is scored.
    """

    def __init__(
        self,
        scorer: ModelScorer,
        store: Store,
        proxy: str = "feature",
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.scorer, self.store, self.proxy, self.tell = scorer, store, proxy, tell

    def images(self, part: Third) -> int:
        return self.scorer.images(part)

    def rounds(self) -> list[int]:
        """The numbers of search images after which settings are compared: about an eighth, a half, all."""
        count, size = self.scorer.images("search"), self.scorer.batch_size
        pieces = (-(-count // (share * size)) * size for share in ROUNDS)
        least = -(-2 // size) * size  # estimating noise needs at least two images
        return sorted({min(max(piece, least), count) for piece in pieces})

    def piece(self, configs: Sequence[MethodConfig], part: Third, start: int, stop: int) -> list[Scores]:
        """Scores of all proxies on images ``start`` to ``stop`` of a part.

        Raises:
            VitrimError: the model does not have the proxy.
        """
        pace, count = Pace(), stop - start

        def measure(places: Sequence[int]) -> list[dict[str, str]]:
            def seen(images: int) -> None:
                left = pace.left(places[0] * count + images * len(places), len(configs) * count, time.monotonic())
                self.tell(f"{places[0]} of {len(configs)} settings scored on {count} images{left}")

            rows = self.scorer([configs[place] for place in places], part, start, stop, seen)
            if rows and self.proxy not in rows[0]:
                raise VitrimError(f"this model has no {self.proxy} per image; it has: {', '.join(rows[0])}")
            return [{name: _text(values) for name, values in row.items()} for row in rows]

        names = [f"{part} {start}-{stop}: {config.describe()}" for config in configs]
        rows = self.store.values(names, measure, together=True)
        return [{name: _numbers(text) for name, text in row.items()} for row in rows]

    def whole(self, configs: Sequence[MethodConfig], part: Third) -> list[Scores]:
        """Scores of all proxies on all images of a part."""
        return self.piece(configs, part, 0, self.images(part))

    def mean(self, scores: Scores) -> float:
        return float(scores[self.proxy].mean(dtype=np.float64))


def _text(values: NDArray[np.float32]) -> str:
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def _numbers(text: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


def means(scores: Scores) -> dict[str, float]:
    """The mean of every proxy, by name.

    Example:
        >>> means({"kl": np.array([1.0, 3.0], dtype=np.float32)})
        {'kl': 2.0}
    """
    return {name: float(values.mean(dtype=np.float64)) for name, values in sorted(scores.items())}


# ---- the race --------------------------------------------------------------------------------------------------------


def halve(
    configs: Sequence[MethodConfig],
    evaluator: Evaluator,
    rival: Scores | None = None,
    *,
    least: int = 0,
    constants: int = 0,
) -> list[Scores]:
    """Score settings on the search images. One that falls far behind gets no more images, so its scores are shorter.

    Args:
        rival: scores on all search images, of the setting to beat; by default the best of ``configs`` in each round.
        least: so many of the best always stay.
        constants: of so many first settings, the best always stays.
    """
    proxy = evaluator.proxy
    scores: list[Scores] = [{} for _ in configs]
    alive = list(range(len(configs)))
    for start, stop in pairwise([0, *evaluator.rounds()]):
        new = evaluator.piece([configs[place] for place in alive], "search", start, stop)
        for place, piece in zip(alive, new, strict=True):
            before = scores[place]
            scores[place] = {name: np.concatenate([*([before[name]] if before else []), piece[name]]) for name in piece}
        ranked = sorted(alive, key=lambda place: evaluator.mean(scores[place]))
        best = scores[ranked[0]] if rival is None else rival
        stay = {*ranked[:least], *[place for place in ranked if place < constants][:1]}
        near = (place for place in alive if not difference(scores[place][proxy], best[proxy][:stop]).far_behind)
        alive = sorted(stay.union(near))
    return scores
