"""Answers of a host about dense models: what they predict, of what classes, and how a task reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

Size = tuple[int, int]
"""Height and width in pixels."""


class DenseAnswers:
    """The questions about segmentation and detection; the defaults are those of a model that is for labels of images.

    Class methods only, as `vitrim.core.host.Host`, which inherits them.
    """

    @classmethod
    def task(cls, model: nn.Module) -> str | None:
        """The task ``model`` is made for, by name; None: labels of whole images, one or several."""
        return None

    @classmethod
    def tasks(cls, model: nn.Module) -> tuple[str, ...]:
        """All tasks that ``model`` can be evaluated in, the one it is made for first; empty where `task` is None."""
        made_for = cls.task(model)
        return () if made_for is None else (made_for,)

    @classmethod
    def learns(cls, model: nn.Module) -> bool:
        """Tell whether ``model`` can be trained on its `task` here, and not only by its library."""
        return True

    @classmethod
    def class_names(cls, model: nn.Module) -> Sequence[str] | None:
        """The names of the classes that ``model`` predicts, in order; None where it does not say.

        A model of a run has them as its ``class_names``.
        """
        return getattr(model, "class_names", None)

    @classmethod
    def takes_one_size(cls, model: nn.Module) -> bool:
        """Tell whether ``model`` takes images of its own size only, which a larger image must be cut into."""
        return False

    @classmethod
    def sees_unpadded(cls, model: nn.Module) -> bool:
        """Tell whether a detector takes images of any size and shape, one by one, and was trained without padding."""
        return False

    @classmethod
    def pixel_scores(cls, model: nn.Module, images: Tensor) -> Tensor:
        """Class scores (B, K, H, W) of every pixel of ``images`` (B, C, H, W)."""
        return cls.logits(model(images))

    @classmethod
    def detections(
        cls, model: nn.Module, images: Tensor, sizes: Sequence[Size] | None = None
    ) -> list[dict[str, Tensor]]:
        """The objects in ``images`` (B, C, H, W), per image as `vitrim.models.vitdet.Detector` gives them.

        ``sizes`` are those of each image in its top left corner, where the rest is padding.
        """
        found: list[dict[str, Tensor]] = model(images) if sizes is None else model(images, sizes)
        return found

    @classmethod
    def front_name(cls, model: nn.Module) -> str | None:
        """The name of what runs in front of the heads of a dense model, `front`; None: it is measured as a whole."""
        return None

    @classmethod
    def front(cls, model: nn.Module, images: Tensor) -> Any:
        """The part of the forward on ``images`` (B, C, H, W) in front of the heads: what a reduction makes faster."""
        raise NotImplementedError

    @classmethod
    def logits(cls, output: Any) -> Tensor:
        """Logits from the output of the model."""
        raise NotImplementedError
