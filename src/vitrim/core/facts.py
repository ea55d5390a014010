"""The facts vitrim needs about the geometry of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Head = Literal["class token", "patches", "no class token"]
"""The tokens a head reads: class (and other prefix) tokens only, patches too, or patches without a class token."""


@dataclass(frozen=True)
class HostFacts:
    """Geometry of one model.

    Attributes:
        dim: channels C.
        num_heads: attention heads H.
        num_classes: classes of the head, 0 without one.
        num_prefix: tokens in front of the patches (class, distillation, registers).
        has_class_token: token 0 is a class token.
        grid_size: rows and columns of patches at the model's own image size.
        head_rows: the head reads only so many leading tokens (1: class token, 2: and distillation), None: patches too.
        input_size: channels, height and width of the images the model takes.
        takes_maximum: a head that reads patches takes a maximum over those it gets: merging does not change it.
    """

    dim: int
    num_heads: int
    num_classes: int
    num_prefix: int
    has_class_token: bool
    grid_size: tuple[int, int]
    head_rows: int | None
    input_size: tuple[int, int, int]
    takes_maximum: bool = False

    @property
    def averages_patches(self) -> bool:
        """Tell whether the head weighs patches against each other, and so must know how many each token stands for."""
        return self.head_rows is None and not self.takes_maximum

    @property
    def head(self) -> Head:
        """The kind of head, one of three: it decides which methods fit."""
        if not self.averages_patches:
            return "class token"
        return "patches" if self.has_class_token else "no class token"
