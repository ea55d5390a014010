"""The plan of a method over a model: what a host says of the model, and one `Layer` per block that follows."""

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
"""The tokens a head reads: class (and other prefix) tokens only, patches too, patches without a class token, or every
patch at its place."""

Grid = tuple[int, int]
"""Rows and columns of patches."""

Purpose = Literal[
    "images", "images and text", "vision-language models", "segmentation, detection, poses, depth", "video and audio"
]
"""The use that people make of the models of a family: groups of `vitrim list hosts`."""

Part = Literal["head", "positions", "stem", "tokens", "trunk", "method"]
"""The part of a model that a parameter belongs to: the classifiers and what only they read, the position tables, the
module that makes patches, the class token and its like, the rest of the host, or what a method brought."""


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
        dense: the head reads every patch at its place (segmentation, detection).
        windows: of an image of the model's own size, which are reduced apart (`vitrim.hosts.shared.windows`);
            ``grid_size`` and ``num_prefix`` are those of one.
        across_windows: there are several, and some blocks attend across them.
        cell: patches a side of the squares that stay together, since what follows joins them (`vitrim.core.cells`).
        cell_by_cell: the patches of a cell come one after the other; otherwise in raster order of a square image.
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

    def __post_init__(self) -> None:
        """Refuse a class token without a place, which a host of one's own may state.

        Raises:
            VitrimError: naming the fields.
        """
        if self.has_class_token and self.num_prefix < 1:
            raise VitrimError(f"a host says has_class_token=True and num_prefix={self.num_prefix}: it counts as one")

    @property
    def units(self) -> tuple[int, int]:
        """Rows and columns of what a method decides about: patches, or cells of them."""
        return self.grid_size[0] // self.cell, self.grid_size[1] // self.cell

    @property
    def averages_patches(self) -> bool:
        """True if the head weighs patches against each other, and so must know how many each token stands for."""
        return self.head_rows is None and not self.takes_maximum

    @property
    def head(self) -> Head:
        """The kind of head, one of four: it decides which methods fit."""
        if self.dense:
            return "grid"
        if not self.averages_patches:
            return "class token"
        return "patches" if self.has_class_token else "no class token"


class Layout(NamedTuple):
    """The tokens that a model without its head hands out (`Host.tokens`).

    Attributes:
        dim: channels C of a token.
        num_prefix: tokens in front of the patches.
        patch_size: height and width of a patch in pixels.
    """

    dim: int
    num_prefix: int
    patch_size: tuple[int, int]


class Role(NamedTuple):
    """The role of one parameter in training.

    Attributes:
        part: a new task brings its own head, positions and stem; the backbone is tokens and trunk.
        layer: 0 in front of the blocks, 1 to L in them, L + 1 the head; None if the model does not name its layers.
        decays: False where the model itself says that weight decay leaves the parameter alone.
    """

    part: Part
    layer: int | None = None
    decays: bool = True


class Starting(NamedTuple):
    """The weights that a scheme of initialisation sets (`vitrim.training.build`): views, to be written in place.

    Attributes:
        attention: of every block, (query, key, value, output), (C, C) each, as linear layers have them.
        positions: (P, C) of the patches, row by row.
    """

    attention: tuple[tuple[Tensor, Tensor, Tensor, Tensor], ...]
    positions: Tensor


@dataclass(frozen=True)
class Preprocessing:
    """The processing of an image before a model sees it; None where the model does not say.

    Attributes:
        channels: 1 for grey images, 3 for colour.
        size: height and width in pixels.
        mean: of the pixels in [0, 1], one number per channel.
        std: their standard deviation, likewise.
        interpolation: by which images are resized: bicubic, bilinear, ...
        crop_share: the side of the crop over the side of the resized image.
        crop_mode: center, border or squash.
        transform: the model's own, from a PIL image in RGB to (C, H, W); it goes before resizing and cropping by the
            numbers above.
    """

    channels: int
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    crop_share: float | None = None
    crop_mode: str = "center"
    transform: Callable[[Any], Tensor] | None = None

    @property
    def resize(self) -> tuple[int, int] | None:
        """Height and width in pixels before the crop, as timm rounds them: 248 for a side of 224 and a share of 0.9.

        With `crop_mode` center and a square size, the shorter side of the image gets this length.

        Example:
            >>> Preprocessing(3, (224, 224), crop_share=0.9).resize
            (248, 248)
        """
        if self.size is None or self.crop_share is None:
            return None
        return floor(self.size[0] / self.crop_share), floor(self.size[1] / self.crop_share)


@dataclass(frozen=True)
class Layer:
    """One block of a plan: where it stands, what the model is like, and how much is reduced there.

    Attributes:
        depth: 0-based index of the block.
        num_layers: number of blocks.
        dim: channels C.
        num_heads: attention heads H.
        num_classes: classes of the host's head (0 without one).
        num_prefix: protected tokens at the front.
        has_class_token: whether token 0 is a class token.
        grid_size: rows and columns of patches, or of cells of them, at the model's own image size.
        amounts: the amounts of all blocks, None where the method does not act.
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
        """The number of patch tokens that this block keeps of ``current`` ones, ``initial`` at first, on a ``grid``.

        Remembered, as it is asked for several times in every forward; ``config`` is always that of the plan.
        """
        # a compiler would compile again when something new is remembered
        compiling = torch.compiler.is_compiling()
        if not compiling and (initial, current, grid) in self._kept:
            return self._kept[initial, current, grid]
        amount = self.amount
        kept = current if amount is None else effective_keep(amount, config.least_kept(current), initial, current, grid)
        if not compiling:
            self._kept[initial, current, grid] = kept
        return kept

    @property
    def amount(self) -> Amount | None:
        """The amount of patch tokens this block keeps; None where nothing is planned."""
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
    """Plan ``config`` for a model: one `Layer` per block. The amounts are evaluated here and nowhere else.

    Raises:
        VitrimError: the options do not fit a model of ``num_layers`` blocks.

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
