"""Common parts of the models: padding, convolutional stems, registration, positions and checkpoints."""

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

from vitrim.core.plan import Grid
from vitrim.core.registry import ask
from vitrim.errors import VitrimError

Model = TypeVar("Model", bound=nn.Module)
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Keys under which checkpoints keep their weights, in timm's order."""


def padded(images: Tensor, patch_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Pad images (B, 3, H, W) with zeros at right and bottom to full patches; return them and their grid of patches."""
    # The remainder to the next multiple: -H % p is 0 where p divides H.
    down, right = -images.shape[2] % patch_size[0], -images.shape[3] % patch_size[1]
    whole = F.pad(images, (0, right, 0, down)) if down or right else images
    return whole, (whole.shape[2] // patch_size[0], whole.shape[3] // patch_size[1])


def patch_map(tokens: Tensor, num_prefix: int, grid: tuple[int, int]) -> Tensor:
    """The patches (B, P, C), in raster order, of all tokens (B, N, C), prefix first.

    A `VitrimError` if there is not one token per patch of the ``grid``: a method that prunes reduced the backbone
    alone, or the backbone drops patches in training.
    """
    rows, columns = grid
    if tokens.shape[1] != num_prefix + rows * columns:
        raise VitrimError(
            f"a dense head needs the {rows * columns} patches of {rows} x {columns}, and the backbone hands out "
            f"{tokens.shape[1] - num_prefix}: reduce the whole model instead of its backbone, and drop no patches"
        )
    return tokens[:, num_prefix:]


class DenseModel(nn.Module):
    """Base class of dense models: a head for K classes on the tokens of a backbone.

    `VitrimError` for a backbone whose tokens `vitrim.core.library.Library.tokens` cannot return.
    """

    def __init__(self, backbone: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.library = ask(backbone)
        self.layout = self.library.layout(backbone)
        self.backbone = backbone
        self.num_classes = num_classes

    def tokens(self, images: Tensor) -> tuple[Tensor, Grid]:
        """The tokens (B, P, C) of all patches, in raster order, and their grid; `VitrimError` as of `patch_map`."""
        whole, grid = padded(images, self.layout.patch_size)
        return patch_map(self.library.tokens(self.backbone, whole), self.layout.num_prefix, grid), grid


class Stem(PatchEmbed):
    """timm's `PatchEmbed` with more than one convolution: subclasses implement `feature_map`. The patch
    size is fixed.
    """

    def __init__(self, img_size: int | tuple[int, int], patch_size: int, in_chans: int, embed_dim: int, **kwargs: Any):
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs)
        del self.proj  # subclasses have their own layers

    def feature_map(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to features (B, C, H/p, W/p), for patches of p pixels."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W), of an accepted size, to tokens (B, P, C), or to ``output_fmt``."""
        size = (images.shape[2], images.shape[3])
        # As timm's: a table of positions fits one size, unless the model resamples it.
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
        """Accept images of another size from now on; `VitrimError` for another patch size."""
        if patch_size is not None and patch_size not in (self.patch_size, self.patch_size[0]):
            raise VitrimError(f"the patch size of this stem is fixed to {_by(self.patch_size)}")
        super().set_input_size(img_size=img_size)


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def pretrained_cfg(**changes: Any) -> dict[str, Any]:
    """Describe a checkpoint for timm: ImageNet-1k at 224 pixels, without a download address, and ``changes``."""
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
    """Build a registered model with timm; ``kwargs`` of timm's ``create_model`` take precedence over the ``geometry``.

    Args:
        filter_fn: renames a checkpoint's weights and resamples them to the grid of a model.
        out_indices: default layers of ``features_only``; an int n for the last n.
        geometry: arguments of ``kind`` that make this variant.
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
    """Return the weights of a checkpoint (from ``state_dict_ema`` and the like), without ``module.`` in their names."""
    for wrapper in WRAPPERS:
        if checkpoint.get(wrapper) is not None:
            checkpoint = checkpoint[wrapper]
            break
    return {name.removeprefix("module."): value for name, value in checkpoint.items()}


def renamed(state: Mapping[str, Tensor], rules: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Rename all weights of ``state`` by ``rules``, pairs of pattern and replacement for `re.sub`, in turn."""
    out = {}
    for name, value in state.items():
        for pattern, ours in rules:
            name = re.sub(pattern, ours, name)
        out[name] = value
    return out


def resample_positions(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """Resample a table (1, H * W, C) of learned positions from the grid ``old`` to ``new``, bicubic and antialiased.

    As `timm.layers.resample_abs_pos_embed`, but in the precision of the table where that exceeds float32.
    """
    if old == new:
        return table
    grid = table.to(torch.promote_types(table.dtype, torch.float32)).unflatten(1, old).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=True, align_corners=False)
    return grid.flatten(2).transpose(1, 2).to(table.dtype)


def fit_positions(state: dict[str, Tensor], name: str, grid: Grid, num_prefix: int = 0) -> None:
    """Resample the position table ``name`` of a checkpoint, if it has one, to ``grid``, in place.

    The table must be that of a square grid after ``num_prefix`` rows, which are kept.
    """
    if name in state and state[name].shape[1] != num_prefix + grid[0] * grid[1]:
        table = state[name]
        # Checkpoints do not record their grid: those that are published are square.
        side = round((table.shape[1] - num_prefix) ** 0.5)
        resampled = resample_positions(table[:, num_prefix:], (side, side), grid)
        state[name] = torch.cat((table[:, :num_prefix], resampled), dim=1)
