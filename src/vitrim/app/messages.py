"""Messages between the page and the process that runs models. Plain data: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_BESIDE = 3
"""Largest number of methods besides the first."""
NOISY = 0.3
"""Quartiles of a speed-up that are further apart, on both sides of 1, show nothing: not even that both are as fast."""


@dataclass(frozen=True)
class Limits:
    """Limits of uploads.

    Attributes:
        megabytes: largest file (1 MB is 10**6 bytes).
        megapixels: largest image, by its header.
        side, aspect: least pixels of the shorter side; largest ratio of the sides, which resizing keeps until the crop.
    """

    megabytes: float = 5.0
    megapixels: float = 40.0
    side: int = 8
    aspect: float = 20.0


@dataclass(frozen=True)
class ModelSource:
    """A model of the page, with arguments of `vitrim.loading.create_model`; ``weights`` are named as
    `weights_of` does.
    """

    name: str
    weights: str = "random"
    pretrained: bool = False
    checkpoint: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Slide:
    """The arguments of a gradio slider; ``label`` is the option in words, and its name, ``info`` the meaning of both
    ends.
    """

    label: str
    info: str
    minimum: float
    maximum: float
    step: float
    value: float


@dataclass(frozen=True)
class Offer:
    """A model with its methods and example images.

    Attributes:
        slides: by name, of the methods that fit the model and need no training.
        examples: names of images in `vitrim.app.photographs` that it classifies correctly.
    """

    name: str
    weights: str
    slides: Mapping[str, Slide]
    examples: Sequence[str]


@dataclass(frozen=True)
class Settings:
    """The choices of a user: the slider's ``value``, ``more`` options, ``key=value,key=value``, and methods
    ``beside``.
    """

    model: str
    method: str
    value: float
    more: str = ""
    beside: Sequence[str] = ()


@dataclass(frozen=True)
class BlockPicture:
    """The image after a block (-1: before the first), as WebP and in words."""

    block: int
    webp: bytes
    words: str


@dataclass(frozen=True)
class Side:
    """The predictions and the cost of one model, dense or reduced.

    Attributes:
        best: classes and probabilities in [0, 1], best first; for embeddings, examples and cosines.
        gmacs: multiply-accumulates for this image in units of 10^9.
        tokens: after each block, including the prefix.
    """

    best: Sequence[tuple[str, float]]
    gmacs: float
    tokens: Sequence[int]


@dataclass(frozen=True)
class Timing:
    """Median milliseconds at batch 1, and the speed-up within rounds: median, lower and upper quartile."""

    dense_ms: float
    reduced_ms: float
    speedup: tuple[float, float, float]

    @property
    def words(self) -> str:
        """The speed in words; no difference if 1 is between the quartiles, no answer if they are far apart, too.

        Example:
            >>> def said(*speedup): return Timing(1, 1, speedup).words
            >>> said(0.84, 0.8, 0.9), said(1.01, 0.98, 1.03), said(1.25, 1.2, 1.3), said(2.31, 2.2, 2.4)
            ('16 % slower here', 'about as fast here', '25 % faster here', '2.3 times as fast here')
            >>> said(1.5, 0.9, 2.0)
            'too noisy to say here'
        """
        median, low, high = self.speedup
        percent = round(100 * abs(median - 1))
        if low <= 1 <= high or not percent:
            return "about as fast here" if high - low < NOISY else "too noisy to say here"
        if median >= 2:
            return f"{median:.1f} times as fast here"
        return f"{percent} % {'faster' if median > 1 else 'slower'} here"


@dataclass(frozen=True)
class Reduced:
    """The model under one method.

    Attributes:
        same: True if the best class, or for embeddings the best example, is the dense model's.
        cosine: of its embedding to the dense model's; None for a classifier.
        saved: saved share of the dense model's MACs.
        timing: None if timing would take too long; then there is a note.
    """

    method: str
    pictures: Sequence[BlockPicture]
    side: Side
    same: bool
    saved: float
    timing: Timing | None
    cosine: float | None = None

    @property
    def name(self) -> str:
        return self.method.partition(":")[0]


@dataclass(frozen=True)
class Reply:
    """The result of one job.

    Attributes:
        embeds: True if the model gives embeddings, which are compared with dense embeddings of the examples.
        checkpoint: True if the weights are from a file, which the page does not name.
        notes: deviations from the request, a line each.
        reduced: one per method, beginning with the user's.
    """

    model: str
    embeds: bool
    weights: str
    checkpoint: bool
    options: Mapping[str, Any]
    notes: Sequence[str]
    image: BlockPicture
    dense: Side
    reduced: Sequence[Reduced]


@dataclass(frozen=True)
class PlottedPoint:
    """A setting of the front: its cost as a ``share`` of the dense model's, and its score, see `FrontFile.measure`.

    ``on_front``: no other dominates it; ``returned``: it is the search's result for its target.
    """

    target: str
    setting: str
    method: str
    share: float
    score: float
    on_front: bool
    returned: bool


@dataclass(frozen=True)
class FrontFile:
    """The content of a ``front.json``, and its figure.

    Attributes:
        about: the conditions of the searches, in one line.
        cost, measure: the units of the shares and of the scores.
        words: the figure in one sentence.
    """

    about: str
    cost: str
    measure: str
    points: Sequence[PlottedPoint]
    png: bytes
    words: str
