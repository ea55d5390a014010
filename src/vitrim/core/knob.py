"""The one option of a method that a slider or a search moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Knob:
    """An option that says how much is removed, and its range. The more ``strength``, the fewer tokens are left.

    Attributes:
        option: its name.
        mildest: the value that removes the least, for which ``strength`` is 0.
        strongest: the value that removes the most; None for a count of patches: half of those the model has.
        digits: of the value behind the point; 0 for whole numbers.
        similarity: the value is a cosine: tokens that are more alike merge.
        fixed: other options, without which the knob does not mean one amount for all layers.

    Example:
        >>> Knob("keep_rate", 1.0, 0.05, digits=3).value(0.5, patches=196)
        0.525
        >>> Knob("r", 0, None).value(0.25, patches=196)
        24
    """

    option: str
    mildest: float
    strongest: float | None
    digits: int = 0
    similarity: bool = False
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def end(self, patches: int) -> float:
        """The value that removes the most from a model of so many patches."""
        return max(patches // 2, 1) if self.strongest is None else self.strongest

    def value(self, strength: float, patches: int) -> int | float:
        """The option's value at a strength in [0, 1], which is clipped to that range."""
        share = min(max(strength, 0.0), 1.0)
        value = self.mildest + share * (self.end(patches) - self.mildest)
        return round(value, self.digits) if self.digits else round(value)

    def removing(self, share: float, patches: int) -> int | float:
        """The value that removes a share in [0, 1] of the patches, of an option that counts patches or is a share kept.

        Example:
            >>> Knob("r", 0, None).removing(0.25, patches=64), Knob("keep_rate", 1.0, 0.05, digits=3).removing(0.25, 64)
            (16, 0.75)
        """
        return round(share * patches) if self.strongest is None else 1.0 - share

    def strength(self, value: float, patches: int) -> float:
        """The strength of a value, in [0, 1].

        Example:
            >>> Knob("r", 0, None).strength(49, patches=196)
            0.5
        """
        share = (value - self.mildest) / (self.end(patches) - self.mildest)
        return min(max(share, 0.0), 1.0)
