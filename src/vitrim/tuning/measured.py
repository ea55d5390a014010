"""The scores of settings on pieces of the images, each measured once in a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError
from vitrim.tuning.proxy import Part, Proxy, Scorer, Scores
from vitrim.tuning.study import Study

ROUNDS = (8, 2, 1)
"""The rounds of a race end after an eighth of the images, a half, and all."""


class Measured:
    """Scores from the study, or by running the models; what was measured before is remembered.

    Args:
        scorer: gives the damage of settings.
        study: keeps what was measured.
        proxy: the score that is minimised.
    """

    def __init__(self, scorer: Scorer, study: Study, proxy: Proxy = "feature") -> None:
        self.scorer, self.study = scorer, study
        self.proxy: Proxy = proxy
        self._known: dict[tuple[str, str], Scores] = {}

    def images(self, part: Part) -> int:
        """The number of images in a part."""
        return self.scorer.images(part)

    def rounds(self) -> list[int]:
        """The numbers of search images after which candidates are compared: about an eighth, a half, all."""
        count, size = self.scorer.images("search"), self.scorer.batch_size
        pieces = (-(-count // (share * size)) * size for share in ROUNDS)
        least = -(-2 // size) * size  # a difference between two images or more says something about noise
        return sorted({min(max(piece, least), count) for piece in pieces})

    def piece(self, configs: Sequence[MethodConfig], part: Part, start: int, stop: int) -> list[Scores]:
        """Scores of all proxies on images ``start`` to ``stop`` of a part.

        Raises:
            VitrimError: the model has no such score.
        """
        where, texts = f"{part} {start}-{stop}", [config.describe() for config in configs]
        new = [place for place, text in enumerate(texts) if (where, text) not in self._known]

        def measure(places: Sequence[int]) -> Sequence[Scores]:
            return self.scorer([configs[new[place]] for place in places], part, start, stop)

        for place, scores in zip(new, self.study.scores(where, [texts[one] for one in new], measure), strict=True):
            if self.proxy not in scores:
                raise VitrimError(
                    f"{texts[place]}: this model has no {self.proxy} per image; it has: {', '.join(scores)}"
                )
            self._known[where, texts[place]] = scores
        return [self._known[where, text] for text in texts]

    def whole(self, configs: Sequence[MethodConfig], part: Part) -> list[Scores]:
        """Scores of all proxies on all images of a part."""
        return self.piece(configs, part, 0, self.images(part))

    def mean(self, scores: Scores) -> float:
        """The mean of the proxy that is minimised."""
        return float(scores[self.proxy].mean(dtype=np.float64))


def means(scores: Scores) -> dict[str, float]:
    """The mean of every proxy, by name.

    Example:
        >>> means({"kl": np.array([1.0, 3.0], dtype=np.float32)})
        {'kl': 2.0}
    """
    return {name: float(values.mean(dtype=np.float64)) for name, values in sorted(scores.items())}


def joined(before: Mapping[str, NDArray[np.float32]], new: Scores) -> dict[str, NDArray[np.float32]]:
    """The scores of a piece and those of the next one as those of both."""
    return {name: np.concatenate([before[name], new[name]]) if before else new[name] for name in new}
