"""Messages between the page and the process that runs models. Plain data: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_BESIDE = 3
"""Methods beside the first one, at most."""


@dataclass(frozen=True)
class Limits:
    """The files that are accepted.

    Attributes:
        megabytes: of a file, at most (1 MB is 10**6 bytes).
        megapixels: of an image, at most; read from its header.
        side: pixels of the shorter side, at least.
        aspect: longer side over the shorter one, at most, since a model's input keeps that ratio until it is cropped.
    """

    megabytes: float = 5.0
    megapixels: float = 40.0
    side: int = 8
    aspect: float = 20.0


@dataclass(frozen=True)
class ModelSource:
    """A model that the page offers, and its weights, as `vitrim.loading.create_model` takes them.

    Attributes:
        weights: in words; "random" for none that were trained.
    """

    name: str
    weights: str = "random"
    pretrained: bool = False
    checkpoint: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Slide:
    """A slider, as gradio takes it.

    Attributes:
        label: the option in words, and its name.
        info: the ends, in words.
        minimum, maximum, step: of the values.
        value: at the start.
    """

    label: str
    info: str
    minimum: float
    maximum: float
    step: float
    value: float


@dataclass(frozen=True)
class Offer:
    """The facts known of a model before anything runs.

    Attributes:
        slides: of the methods that fit it and need no training, by name.
        examples: names of images in `vitrim.app.photographs` that it knows, best first.
    """

    name: str
    weights: str
    slides: Mapping[str, Slide]
    examples: Sequence[str]


@dataclass(frozen=True)
class Settings:
    """The choices of a user.

    Attributes:
        value: of the slider.
        more: further options, ``key=value,key=value``.
        beside: further methods to show, each at the MACs of the first.
    """

    model: str
    method: str
    value: float
    more: str = ""
    beside: Sequence[str] = ()


@dataclass(frozen=True)
class BlockPicture:
    """The image after a block (-1: before the first), as WebP, and the same in words."""

    block: int
    webp: bytes
    words: str


@dataclass(frozen=True)
class Side:
    """The predictions and the cost of one model, dense or reduced.

    Attributes:
        best: classes and probabilities in [0, 1], or of embeddings examples and cosines, best first.
        gmacs: multiply-accumulates of this image in units of 10^9.
        tokens: after each block, prefix included.
    """

    best: Sequence[tuple[str, float]]
    gmacs: float
    tokens: Sequence[int]


@dataclass(frozen=True)
class Timing:
    """Milliseconds at batch 1 and the speed-up within rounds, each as median, lower and upper quartile."""

    dense_ms: tuple[float, float, float]
    reduced_ms: tuple[float, float, float]
    speedup: tuple[float, float, float]
    rounds: int
    threads: int

    @property
    def words(self) -> str:
        """The speed in words; no difference where the quartiles have 1 between them.

        Example:
            >>> def said(*speedup): return Timing((1, 1, 1), (1, 1, 1), speedup, 5, 1).words
            >>> said(0.84, 0.8, 0.9), said(1.1, 0.9, 1.3), said(1.25, 1.2, 1.3), said(2.31, 2.2, 2.4)
            ('16 % slower here', 'about as fast here', '25 % faster here', '2.3 times as fast here')
        """
        median, low, high = self.speedup
        percent = round(100 * abs(median - 1))
        if low <= 1 <= high or not percent:
            return "about as fast here"
        if median >= 2:
            return f"{median:.1f} times as fast here"
        return f"{percent} % {'faster' if median > 1 else 'slower'} here"


@dataclass(frozen=True)
class Reduced:
    """The model under one method.

    Attributes:
        method: its text, as on the command line.
        pictures: after each block.
        same: it chooses the class, or of embeddings the example, that the dense model chooses.
        cosine: of its embedding to the dense model's; None where the model is a classifier.
        saved: share of the dense model's MACs that is saved.
        timing: None where it would have taken too long; a note says so.
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
        """The method without its options."""
        return self.method.partition(":")[0]


@dataclass(frozen=True)
class Reply:
    """The result of one job, as the page shows it.

    Attributes:
        embeds: the model gives embeddings, which are compared with those that the dense model gives of the examples.
        checkpoint: the weights are of a file, which the page does not name.
        options: of the model.
        notes: what was changed or done otherwise than asked, a line each.
        image: as the model gets it.
        reduced: one per method, the first of which the user has set.
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
    """A setting of the front.

    Attributes:
        share: its cost as a share of the dense model's.
        score: see `FrontFile.measure`.
        on_front: no other point is as cheap and has as good a score.
        returned: it is the search's result for its target.
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
    """The points of a file.

    Attributes:
        about: what the searches follow from, in one line.
        cost: what the shares are of.
        measure: what the scores are.
        png: the picture.
        words: the picture in one sentence.
    """

    about: str
    cost: str
    measure: str
    points: Sequence[PlottedPoint]
    png: bytes
    words: str
