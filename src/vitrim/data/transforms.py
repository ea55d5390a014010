"""Preprocessing of images, as a model specifies it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from vitrim.core.registry import ask
from vitrim.errors import DataError, VitrimError

if TYPE_CHECKING:
    from PIL import Image

    from vitrim.data.decoding import Transform


def eval_transform(model: nn.Module, *, in_patches: bool = True) -> Transform:
    """The preprocessing a model was evaluated with (`Library.preprocessing`), at its current input size.

    A model with one input channel gets grey images, normalised by its mean and standard deviation averaged over
    channels. (timm sums the weights of the three channels, which has no exact counterpart.)

    Args:
        in_patches: accept patches (1, N, ...) from a model that takes images of every shape; False: an image of its own
            size.

    Returns:
        A function from a PIL image of any mode and size to (C, H, W) float32, normalised; picklable.

    Raises:
        DataError: the model does not specify its preprocessing, or takes neither one nor three channels.

    Example:
        >>> import timm
        >>> from PIL import Image
        >>> transform = eval_transform(timm.create_model("test_vit", in_chans=1, img_size=64))
        >>> transform(Image.new("RGB", (300, 200))).shape
        torch.Size([1, 64, 64])
    """
    try:
        preprocessing = ask(model).preprocessing(model)
    except VitrimError as error:
        raise DataError(str(error)) from error
    if preprocessing.transform is not None and (in_patches or not preprocessing.in_patches):
        return _Converted("RGB", preprocessing.transform)
    needed = ("size", "mean", "std", "interpolation", "crop_share")
    missing = [name for name in needed if not getattr(preprocessing, name)]
    if missing or preprocessing.size is None:
        raise DataError(
            f"{type(model).__name__} does not say how its images are prepared (no {', '.join(missing)}): set its "
            "eval_transform, or the dataset's transform: a function from a PIL image to a tensor (C, H, W), as its "
            "library has for these weights"
        )
    if preprocessing.channels not in (1, 3):
        raise DataError(f"the model takes {preprocessing.channels} channels; an image has 1 or 3")
    from timm.data.transforms_factory import create_transform

    # timm's evaluation transform, with the resizing and the crop of the published accuracies.
    made = create_transform(
        input_size=(preprocessing.channels, *preprocessing.size),
        crop_pct=preprocessing.crop_share,
        **{name: getattr(preprocessing, name) for name in ("interpolation", "mean", "std", "crop_mode")},
    )
    return _Converted("L" if preprocessing.channels == 1 else "RGB", made)


class Geometry(NamedTuple):
    """Height and width in pixels of the images a model takes, and the normalisation of their channels."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return len(self.mean)


def geometry_of(model: nn.Module) -> Geometry:
    """The format of the images ``model`` takes, normalised in training as `eval_transform` does in evaluation.

    Without a mean and standard deviation from the model, ImageNet's. `VitrimError` if the model has no image size.

    Example:
        >>> import timm
        >>> geometry_of(timm.create_model("test_vit", img_size=32)).size
        (32, 32)
    """
    preprocessing = ask(model).preprocessing(model)
    if preprocessing.size is None:
        raise VitrimError(f"{type(model).__name__} does not say what size its images have")
    mean, std = preprocessing.mean or IMAGENET_DEFAULT_MEAN, preprocessing.std or IMAGENET_DEFAULT_STD
    if preprocessing.channels == 1:
        mean, std = (float(np.mean(mean)),), (float(np.mean(std)),)
    return Geometry(preprocessing.size, mean, std)


@dataclass(frozen=True)
class AtSizes:
    """An image at several sizes: each transform's (C, H, W), by its side in pixels; None for the model's own size."""

    transforms: Mapping[int | None, Transform]

    def __call__(self, image: Image.Image) -> dict[int | None, Tensor]:
        return {size: transform(image) for size, transform in self.transforms.items()}


@dataclass(frozen=True)
class _Converted:
    """Converts an image's mode before the transform, so that the dataset need not know the model's."""

    mode: str
    transform: Transform

    def __call__(self, image: Image.Image) -> Tensor:
        return self.transform(image.convert(self.mode))
