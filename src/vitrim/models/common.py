"""Whole patches, convolutional stems, registration, positions and checkpoints of the models in this folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers.format import Format, nchw_to
from timm.layers.patch_embed import PatchEmbed
from timm.models import build_model_with_cfg
from torch import Tensor, nn

from vitrim.errors import VitrimError

Model = TypeVar("Model", bound=nn.Module)
Grid = tuple[int, int]

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys under which checkpoints keep their weights, in the order in which timm looks."""


def padded(images: Tensor, patch_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Pad images (B, 3, H, W) with zeros at their right and bottom to whole patches.

    Returns:
        The images, themselves where nothing is missing, and the rows and columns of their patches.

    Example:
        >>> whole, grid = padded(torch.ones(1, 3, 30, 32), (16, 16))
        >>> whole.shape, grid
        (torch.Size([1, 3, 32, 32]), (2, 2))
    """
    down, right = -images.shape[2] % patch_size[0], -images.shape[3] % patch_size[1]
    whole = F.pad(images, (0, right, 0, down)) if down or right else images
    return whole, (whole.shape[2] // patch_size[0], whole.shape[3] // patch_size[1])


def patch_map(tokens: Tensor, num_prefix: int, grid: tuple[int, int]) -> Tensor:
    """The tokens (B, P, C) of the patches, in raster order, out of all tokens (B, N, C), prefix in front.

    Raises:
        VitrimError: there is not one token for every patch of the ``grid``: the backbone alone was reduced by a method
            that prunes, or drops patches in training.

    Example:
        >>> patch_map(torch.zeros(1, 7, 4), 1, (2, 3)).shape
        torch.Size([1, 6, 4])
    """
    rows, columns = grid
    if tokens.shape[1] != num_prefix + rows * columns:
        raise VitrimError(
            f"a dense head needs the {rows * columns} patches of {rows} x {columns}, and the backbone hands out "
            f"{tokens.shape[1] - num_prefix}: reduce the whole model instead of its backbone, and drop no patches"
        )
    return tokens[:, num_prefix:]


class Stem(PatchEmbed):
    """timm's `PatchEmbed` with more than one convolution: subclasses implement `feature_map`.

    Image sizes, padding and output format are as in timm. The patch size is fixed at construction.
    """

    def __init__(self, img_size: int | tuple[int, int], patch_size: int, in_chans: int, embed_dim: int, **kwargs: Any):
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs)
        del self.proj  # subclasses have their own layers

    def feature_map(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to features (B, C, H/p, W/p), for patches of p pixels."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to tokens (B, P, C), or to the ``output_fmt`` given at construction.

        Raises:
            VitrimError: the model does not accept images of this size.
        """
        size = (images.shape[2], images.shape[3])
        if self.img_size is not None and self.strict_img_size and size != tuple(self.img_size):
            raise VitrimError(f"images are {_by(size)}, this model takes {_by(self.img_size)}; see set_input_size")
        whole, _ = padded(images, self.patch_size)
        if whole is not images and not self.dynamic_img_pad:
            raise VitrimError(f"images are {_by(size)}, not a multiple of the patch size {_by(self.patch_size)}")
        x = self.feature_map(whole)
        if self.flatten:
            x = x.flatten(2).transpose(1, 2)
        elif self.output_fmt != Format.NCHW:
            x = nchw_to(x, self.output_fmt)
        return self.norm(x)  # type: ignore[no-any-return]

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Accept images of another size from now on.

        Raises:
            VitrimError: the patch size is to change.
        """
        if patch_size is not None and patch_size not in (self.patch_size, self.patch_size[0]):
            raise VitrimError(f"the patch size of this stem is fixed to {_by(self.patch_size)}")
        super().set_input_size(img_size=img_size)


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def pretrained_cfg(**changes: Any) -> dict[str, Any]:
    """Describe a checkpoint for timm: ImageNet-1k at 224 pixels, no download address, and ``changes``."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "classifier": "head",
        **changes,
    }


def create(
    kind: type[Model],
    filter_fn: Callable[[Mapping[str, Any], Model], dict[str, Tensor]],
    variant: str,
    pretrained: bool,
    kwargs: Mapping[str, Any],
    *,
    out_indices: Any = 3,
    **geometry: Any,
) -> Model:
    """Build a registered model with timm.

    Args:
        kind: its class.
        filter_fn: brings a checkpoint under the names and to the grid of a model.
        variant: its registered name.
        pretrained: load weights.
        kwargs: what the caller of timm's ``create_model`` gives; takes precedence over ``geometry``.
        out_indices: layers that give maps under ``features_only``, unless the caller says; an int: the last so many.
        geometry: the arguments of ``kind`` that make this variant.
    """
    model: Model = build_model_with_cfg(
        kind,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **{**geometry, **kwargs},
    )
    return model


def unwrapped(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take the weights out of a checkpoint (``state_dict_ema`` and the like), and ``module.`` off their names.

    Example:
        >>> unwrapped({"state_dict": {"module.head.bias": torch.zeros(2)}, "epoch": 3})
        {'head.bias': tensor([0., 0.])}
    """
    for wrapper in WRAPPERS:
        if checkpoint.get(wrapper) is not None:
            checkpoint = checkpoint[wrapper]
            break
    return {name.removeprefix("module."): value for name, value in checkpoint.items()}


def renamed(state: Mapping[str, Tensor], rules: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Rename all weights of ``state`` by the ``rules``, pairs of pattern and replacement for `re.sub`, in turn.

    Example:
        >>> renamed({"layers.3.ln1.bias": torch.zeros(1)}, [("^layers[.]", "blocks."), ("[.]ln1[.]", ".norm1.")])
        {'blocks.3.norm1.bias': tensor([0.])}
    """
    out = {}
    for name, value in state.items():
        for pattern, ours in rules:
            name = re.sub(pattern, ours, name)
        out[name] = value
    return out


def resample_positions(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resample a table of learned positions to another grid, bicubic and antialiased.

    As `timm.layers.resample_abs_pos_embed`, but in the precision of the table where that is more than float32.

    Args:
        table: (1, H * W, C), rows first, without prefix tokens.
        old: rows and columns (H, W) of the table.
        new: rows and columns (H', W') wanted.

    Returns:
        (1, H' * W', C); the table itself where the grids are equal.

    Example:
        >>> resample_positions(torch.ones(1, 4, 8), (2, 2), (3, 5)).shape
        torch.Size([1, 15, 8])
    """
    if old == new:
        return table
    grid = table.to(torch.promote_types(table.dtype, torch.float32)).unflatten(1, old).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True, align_corners=False)
    return grid.flatten(2).transpose(1, 2).to(table.dtype)


def fit_positions(state: dict[str, Tensor], name: str, grid: Grid, num_prefix: int = 0) -> None:
    """Resample the position table ``name`` of a checkpoint, if there is one, to ``grid``, in place.

    The table must be one of a square grid behind ``num_prefix`` rows, which are kept.

    Example:
        >>> state = {"pos_embed": torch.ones(1, 1 + 4, 8)}
        >>> fit_positions(state, "pos_embed", (3, 5), num_prefix=1)
        >>> state["pos_embed"].shape
        torch.Size([1, 16, 8])
    """
    if name in state and state[name].shape[1] != num_prefix + grid[0] * grid[1]:
        table = state[name]
        side = round((table.shape[1] - num_prefix) ** 0.5)
        resampled = resample_positions(table[:, num_prefix:], (side, side), grid)
        state[name] = torch.cat((table[:, :num_prefix], resampled), dim=1)
