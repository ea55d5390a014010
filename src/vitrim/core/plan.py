"""The plan of a method over a model: `HostFacts` describes the model, and each block gets a `Layer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitrim.core.method import MethodConfig
from vitrim.core.schedule import Amount, effective_keep
from vitrim.errors import VitrimError

Head = Literal["class token", "patches", "no class token", "grid"]
"""The tokens a head reads: class token (and other prefix tokens), patches too, or every patch at its place."""

Grid = tuple[int, int]
"""Rows and columns of patches."""

Purpose = Literal[
    "images", "images and text", "vision-language models", "segmentation, detection, poses, depth", "video and audio"
]
"""The use of a family's models: the groups of `vitrim list hosts`."""

Part = Literal["head", "positions", "stem", "tokens", "trunk", "method"]
"""The part of a model that a parameter belongs to; "head" includes what only classifiers read."""


@dataclass(frozen=True)
class HostFacts:
    """Geometry of one model.

    Attributes:
        num_classes: classes of the head, 0 without one.
        num_prefix: tokens in front of the patches (class, distillation, registers).
        has_class_token: token 0 is a class token.
        grid_size: rows and columns of patches at the model's own image size.
        head_rows: leading tokens that the head reads (1: class token, 2: also distillation); None: patches too.
        input_size: channels, height and width of the images.
        any_size: images come in sizes of their own, and ``input_size`` is only the usual or the largest one.
        takes_maximum: the head takes a maximum over the patches it gets, which merging does not change.
        dense: the head reads every patch at its place (segmentation, detection).
        windows: windows per image, reduced separately; ``grid_size`` and ``num_prefix`` are those of one window.
        across_windows: there are several windows, and some blocks attend across them.
        cell: side in patches of the squares that stay together, because the connector joins them (`vitrim.core.cells`).
        cell_by_cell: the patches of a cell are consecutive; otherwise in raster order of a square image.
        own_attention: a function of the user's computes attention, and shows no probabilities (`Attention.own`).
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
    dense: bool = False
    windows: int = 1
    across_windows: bool = False
    cell: int = 1
    cell_by_cell: bool = False
    own_attention: bool = False
    any_size: bool = False

    def __post_init__(self) -> None:
        """Refuse a class token that ``num_prefix`` does not count."""
        if self.has_class_token and self.num_prefix < 1:
            raise VitrimError(f"a host says has_class_token=True and num_prefix={self.num_prefix}: it counts as one")

    @property
    def units(self) -> tuple[int, int]:
        """Rows and columns of what a method decides about: patches, or cells of them."""
        return self.grid_size[0] // self.cell, self.grid_size[1] // self.cell

    @property
    def averages_patches(self) -> bool:
        """True if the head weighs patches against each other, so it must count merged tokens with their sizes."""
        return self.head_rows is None and not self.takes_maximum

    @property
    def head(self) -> Head:
        """The kind of head, which decides which methods fit."""
        if self.dense:
            return "grid"
        if not self.averages_patches:
            return "class token"
        return "patches" if self.has_class_token else "no class token"


class Layout(NamedTuple):
    """The layout of `Library.tokens`: channels, tokens in front of the patches, a patch's height and width."""

    dim: int
    num_prefix: int
    patch_size: tuple[int, int]


class Role(NamedTuple):
    """The role of one parameter in training.

    Attributes:
        part: a new task initialises head, positions and stem; tokens and trunk are the backbone.
        layer: 0 before the blocks, 1 to L in them, L + 1 for the head; None if the model does not name its layers.
        decays: False where the model exempts the parameter from weight decay.
    """

    part: Part
    layer: int | None = None
    decays: bool = True


class Starting(NamedTuple):
    """The weights that an initialisation scheme sets (`vitrim.training.build`): views, to be written in place.

    Attributes:
        attention: (query, key, value, output) of every block, (C, C) each, as in linear layers.
        positions: (P, C) of the patches, row by row.
    """

    attention: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]
    positions: Tensor


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of the images of a model; None for what is unknown.

    Attributes:
        mean, std: of the pixels in [0, 1], per channel.
        interpolation: for resizing: bicubic, bilinear, ...
        crop_share: side of the crop divided by the side of the resized image.
        crop_mode: center, border or squash.
        transform: the model's own, from a PIL image in RGB to (C, H, W), in place of resizing and cropping.
        in_patches: the transform makes patches (1, N, ...) of an image in its own shape; where an image of ``size`` is
            needed, as in files and pictures, the numbers make one.
    """

    channels: int
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    crop_share: float | None = None
    crop_mode: str = "center"
    transform: Callable[[Any], Tensor] | None = None
    in_patches: bool = False

    @property
    def resize(self) -> tuple[int, int] | None:
        """Height and width in pixels before the crop, rounded as in timm: 248 for a side of 224 and a share of 0.9.

        With `crop_mode` center and a square size, the shorter side of the image gets this length.
        """
        if self.size is None or self.crop_share is None:
            return None
        return floor(self.size[0] / self.crop_share), floor(self.size[1] / self.crop_share)


@dataclass(frozen=True)
class Layer:
    """One block of a plan: its position, the model's geometry (see `HostFacts`), and the amounts.

    ``grid_size`` counts cells where patches stay together; ``amounts`` are of all blocks, None where nothing acts.
    """

    depth: int
    num_layers: int
    dim: int
    num_heads: int
    num_classes: int
    num_prefix: int
    has_class_token: bool
    grid_size: tuple[int, int]
    amounts: tuple[Amount | None, ...] = ()
    _kept: dict[tuple[int, int, Grid | None], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def keep(self, config: MethodConfig, initial: int, current: int, grid: Grid | None = None) -> int:
        """Patch tokens this block keeps of ``current``, of ``initial`` at first, on ``grid``."""
        # Cached, because every forward asks several times; `config` is always that of the plan.
        # a new cache entry would make a compiler compile again
        compiling = torch.compiler.is_compiling()
        if not compiling and (initial, current, grid) in self._kept:
            return self._kept[initial, current, grid]
        amount, kept = self.amount, current
        if amount is not None:
            kept = effective_keep(amount, config.traits.least_kept(current), initial, current, grid)
        if not compiling:
            self._kept[initial, current, grid] = kept
        return kept

    @property
    def amount(self) -> Amount | None:
        """The amount of this block; None where the method does not act."""
        return self.amounts[self.depth] if self.amounts else None

    @property
    def is_last(self) -> bool:
        """True for the last block."""
        return self.depth == self.num_layers - 1

    @property
    def initial_patches(self) -> int:
        """Patch tokens that enter the first block at the model's own image size."""
        return self.grid_size[0] * self.grid_size[1]


def plan(config: MethodConfig, facts: HostFacts, num_layers: int) -> tuple[Layer, ...]:
    """Plan ``config`` for a model: one `Layer` per block; `VitrimError` if the options do not fit.

    Example:
        >>> import timm, vitrim
        >>> from vitrim.core.registry import host_of
        >>> model = timm.create_model("vit_tiny_patch16_224")
        >>> layers = plan(vitrim.ToMe(r=8), host_of(model).facts(model), 12)
        >>> layers[3].amount.keep(196, 172)
        164
    """
    amounts = tuple(config.planned(num_layers, facts.num_prefix))
    if len(amounts) != num_layers or any(amount is not None and not hasattr(amount, "keep") for amount in amounts):
        raise VitrimError(
            f"{config.name}: amounts(num_layers) gives one amount for each of {num_layers} blocks, such as "
            f"vitrim.Remove(8) or vitrim.Keep(0.7), or None, not {list(amounts)!r:.80}"
        )
    return tuple(
        Layer(
            depth=depth,
            num_layers=num_layers,
            dim=facts.dim,
            num_heads=facts.num_heads,
            num_classes=facts.num_classes,
            num_prefix=facts.num_prefix,
            has_class_token=facts.has_class_token,
            grid_size=facts.units,
            amounts=amounts,
        )
        for depth in range(num_layers)
    )
