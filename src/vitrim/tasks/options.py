"""The parts of a recipe that tasks read: mixing of images, loss, and evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from vitrim.checked import Checked


class Mix(Checked):
    """Mixing of the images of a batch, and of their labels."""

    mixup: float = Field(0.0, ge=0, description="alpha of mixup, 0 for none")
    cutmix: float = Field(0.0, ge=0, description="alpha of cutmix, 0 for none")
    probability: float = Field(1.0, ge=0, le=1, description="of mixing a batch at all")
    switch: float = Field(0.5, ge=0, le=1, description="probability of cutmix where both are given")

    @property
    def on(self) -> bool:
        """True if images are mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)


class DenseAugment(Checked):
    """Changes to a training image and its mask or boxes. Sizes, mean and standard deviation are the model's."""

    crop: Literal["scaled", "jitter"] = Field(
        "scaled",
        description="scaled: a random size, then a window that no class fills; jitter: a random factor on the size "
        "that fits, then a window (LSJ)",
    )
    side: Literal["long", "short"] = Field("long", description="scaled: the side whose length is drawn")
    range: tuple[float, float] | None = Field(
        None, description="of the size drawn, as a share of the model's; null: 0.5 to 2 scaled, 0.1 to 2 with jitter"
    )
    cat_max_share: float = Field(0.75, gt=0, le=1, description="scaled: most of a window that one class may cover")
    hflip: float = Field(0.5, ge=0, le=1, description="probability of mirroring left and right")
    vflip: float = Field(0.0, ge=0, le=1, description="probability of mirroring top and bottom")
    photometric: bool = Field(False, description="distort brightness, contrast, saturation and hue")

    def faults(self) -> Iterator[str]:
        if self.range is not None and not 0 < self.range[0] <= self.range[1]:
            low, high = self.range
            yield f"range is from low to high above 0, not {low:g} to {high:g}"


class Loss(Checked):
    """The loss of the task."""

    name: Literal["cross_entropy", "bce", "asl", "pixel_cross_entropy", "rcnn"] = Field(
        "cross_entropy",
        description="cross_entropy also takes mixed labels; bce and asl for several labels per image; "
        "pixel_cross_entropy for masks; rcnn, the losses of a detector, for boxes and outlines",
    )
    smoothing: float = Field(
        0.0, ge=0, lt=1, description="label smoothing of cross_entropy, bce and pixel_cross_entropy"
    )
    gamma_neg: float = Field(4.0, ge=0, description="asl: focus of the negatives")
    gamma_pos: float = Field(0.0, ge=0, description="asl: focus of the positives")
    clip: float = Field(0.05, ge=0, lt=1, description="asl: margin of the negatives' probability")
    sum_classes: bool = Field(False, description="bce: add up the losses of the classes of an image, not their mean")


class Protocol(Checked):
    """Evaluation of images by a dense task.

    Example:
        >>> Protocol(mode="slide", window=512, stride=384, size=512).side
        'short'
    """

    mode: Literal["whole", "slide"] = Field("whole", description="whole: one forward per image; slide: by windows")
    size: int | None = Field(None, ge=1, description="pixels that `side` is resized to; null: as the image is")
    side: Literal["long", "short"] = Field("short", description="the side that is resized to `size`")
    window: int | None = Field(
        None, ge=1, description="side of the windows; whole: smaller images are padded to a square of it"
    )
    stride: int | None = Field(None, ge=1, description="slide: pixels from one window to the next; null: the window")
    scales: tuple[float, ...] = Field((1.0,), min_length=1, description="factors on the size, averaged over")
    flip: bool = Field(False, description="average with the result of the mirrored image")
    average: Literal["logits", "probabilities"] = Field(
        "logits", description="what is averaged over scales and flips, and returned"
    )

    def faults(self) -> Iterator[str]:
        if self.mode == "slide" and self.window is None:
            yield "mode slide needs a window"
        if self.window is not None and self.stride is not None and self.stride > self.window:
            yield f"stride {self.stride} leaves gaps between windows of {self.window}"
        if any(scale <= 0 for scale in self.scales):
            yield "scales are factors above 0"

    @property
    def plain(self) -> bool:
        """True if an image goes through the model once, unchanged."""
        once = self.scales == (1.0,) and not self.flip and self.average == "logits"
        return once and self.mode == "whole" and self.size is None and self.window is None


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted name."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def short(value: object, most: int = 100) -> str:
    """Return a value in one line of at most ``most`` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[:most]}..."
