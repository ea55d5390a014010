"""The parts of a recipe that tasks read: how images are mixed, and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NUMBERS = (int, float, int | None, float | None)


class Section(BaseModel):
    """A part of a recipe: frozen, with no keys but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_truths(cls, values: Any) -> Any:
        """Refuse booleans for numbers: pydantic takes true for 1."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation in NUMBERS:
                raise ValueError(f"{name} is a number, not {str(value).lower()}")
        return values


class Mix(Section):
    """Mixing of the images of a batch, and of their labels."""

    mixup: float = Field(0.0, ge=0, description="alpha of mixup, 0 for none")
    cutmix: float = Field(0.0, ge=0, description="alpha of cutmix, 0 for none")
    probability: float = Field(1.0, ge=0, le=1, description="of mixing a batch at all")
    switch: float = Field(0.5, ge=0, le=1, description="probability of cutmix where both are given")

    @property
    def on(self) -> bool:
        """Tell whether anything is mixed."""
        return self.probability > 0 and (self.mixup > 0 or self.cutmix > 0)


class Loss(Section):
    """The loss of the task."""

    name: Literal["cross_entropy", "bce", "asl"] = Field(
        "cross_entropy", description="cross_entropy also takes mixed labels; bce and asl for several labels per image"
    )
    smoothing: float = Field(0.0, ge=0, lt=1, description="label smoothing of cross_entropy and bce")
    gamma_neg: float = Field(4.0, ge=0, description="asl: focus of the negatives")
    gamma_pos: float = Field(0.0, ge=0, description="asl: focus of the positives")
    clip: float = Field(0.05, ge=0, lt=1, description="asl: margin of the negatives' probability")
    sum_classes: bool = Field(False, description="bce: add up the losses of the classes of an image, not their mean")
