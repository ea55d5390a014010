"""The processing of an image before a model sees it, as the model specifies."""

from __future__ import annotations

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


def eval_transform(model: nn.Module) -> Transform:
    """The preprocessing a model was evaluated with (`vitrim.core.library.Library.preprocessing`): at the input size
    that it has now, or by a transform of its own.

    A model with one input channel gets grey images, normalised with the average over the channels of its mean and
    standard deviation (timm sums the weights of the three channels, which has no exact counterpart).

    Args:
        model: the model, also after `reduce_`.

    Returns:
        From a PIL image of any mode and size to (C, H, W) float32, normalised; can be pickled.

    Raises:
        DataError: the model does not say how its images are prepared, or it takes neither one nor three channels.

    Example:
        >>> import timm
        >>> from PIL import Image
        >>> transform = eval_transform(timm.create_model("test_vit", in_chans=1, img_size=64))
        >>> transform(Image.new("RGB", (300, 200))).shape
        torch.Size([1, 64, 64])
    """
    try:
        told = ask(model).preprocessing(model)
    except VitrimError as error:
        raise DataError(str(error)) from error
    if told.transform is not None:
        return _Converted("RGB", told.transform)
    if not (told.size and told.mean and told.std and told.interpolation and told.crop_share):
        missing = [
            name for name in ("size", "mean", "std", "interpolation", "crop_share") if getattr(told, name) is None
        ]
        raise DataError(
            f"{type(model).__name__} does not say how its images are prepared (no {', '.join(missing)}): set its "
            "eval_transform, or the dataset's transform: a function from a PIL image to a tensor (C, H, W), as its "
            "library has for these weights"
        )
    if told.channels not in (1, 3):
        raise DataError(f"the model takes {told.channels} channels; an image has 1 or 3")
    from timm.data.transforms_factory import create_transform

    made = create_transform(
        input_size=(told.channels, *told.size),
        interpolation=told.interpolation,
        mean=told.mean,
        std=told.std,
        crop_pct=told.crop_share,
        crop_mode=told.crop_mode,
    )
    return _Converted("L" if told.channels == 1 else "RGB", made)


class Geometry(NamedTuple):
    """Format of the images a model takes: height and width in pixels, and the normalisation of their channels."""

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """1 for grey images, 3 for colour."""
        return len(self.mean)


def geometry_of(model: nn.Module) -> Geometry:
    """The images ``model`` takes, normalised in training as `eval_transform` does in evaluation.

    Size, mean and standard deviation are those its host says, the last two ImageNet's where nothing does.

    Raises:
        VitrimError: the model does not say what size its images have, or what it says cannot be read.

    Example:
        >>> import timm
        >>> geometry_of(timm.create_model("test_vit", img_size=32)).size
        (32, 32)
    """
    told = ask(model).preprocessing(model)
    if told.size is None:
        raise VitrimError(f"{type(model).__name__} does not say what size its images have")
    mean, std = told.mean or IMAGENET_DEFAULT_MEAN, told.std or IMAGENET_DEFAULT_STD
    if told.channels == 1:
        mean, std = (float(np.mean(mean)),), (float(np.mean(std)),)
    return Geometry(told.size, mean, std)


@dataclass(frozen=True)
class _Converted:
    """Transform that converts the image mode first, so that the dataset need not know which one the model wants."""

    mode: str
    transform: Transform

    def __call__(self, image: Image.Image) -> Tensor:
        return self.transform(image.convert(self.mode))
