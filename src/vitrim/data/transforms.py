"""What is done to an image before a model sees it, as the model says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from vitrim.data.errors import DataError
from vitrim.errors import first_line

if TYPE_CHECKING:
    from PIL import Image

    from vitrim.data.decoding import Transform


INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "lanczos", "box", "hamming", "random")
"""timm's."""


def eval_transform(model: nn.Module) -> Transform:
    """The preprocessing a model was evaluated with: timm's at the input size the model has now, that of the image
    processor saved with a Hugging Face model, or what the model has as ``eval_transform`` (from a PIL image).

    A timm model with one input channel gets grey images, normalised with the average over the channels of its mean and
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
    own = getattr(model, "eval_transform", None)
    if own is not None:
        return _Converted("RGB", own)
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    if isinstance(source, str):
        return _Converted("RGB", _Processed(source))
    if not is_timm(model):
        raise DataError(
            f"{type(model).__name__} is not a timm model and does not say how its images are prepared: set the "
            "dataset's transform, for example to torchvision's weights.transforms() or a transformers image processor"
        )
    from timm.data.transforms_factory import create_transform

    channels = input_channels(model)
    if channels not in (1, 3):
        raise DataError(f"the model takes {channels} channels; an image has 1 or 3")
    config = timm_config(model)
    config["input_size"] = (channels, *input_size(model, config["input_size"]))
    if channels == 1:  # three means would silently broadcast one channel to three
        config["mean"] = (float(np.mean(config["mean"])),)
        config["std"] = (float(np.mean(config["std"])),)
    return _Converted("L" if channels == 1 else "RGB", create_transform(**config))


class _Converted:
    """A transform that converts the mode first, so that the dataset need not know what the model wants."""

    def __init__(self, mode: str, transform: Transform) -> None:
        self.mode = mode
        self.transform = transform

    def __call__(self, image: Image.Image) -> Tensor:
        return self.transform(image.convert(self.mode))


class _Processed:
    """The image processor saved in a folder, or on the Hub, next to a Hugging Face model."""

    def __init__(self, source: str) -> None:
        from transformers import AutoImageProcessor

        try:
            self.processor = AutoImageProcessor.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise DataError(
                f"cannot read how images are prepared from '{source}' (preprocessor_config.json): {first_line(error)}"
            ) from error

    def __call__(self, image: Image.Image) -> Tensor:
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def normalisation(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation that `eval_transform` normalises with where that is not timm's: those of the image
    processor saved with a Hugging Face model, or of the model's own ``eval_transform``; None where neither says."""
    own: Any = getattr(model, "eval_transform", None)
    if own is not None:
        return (tuple(own.mean), tuple(own.std)) if hasattr(own, "mean") and hasattr(own, "std") else None
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not isinstance(source, str) or not source:
        return None
    processor = _Processed(source).processor
    return tuple(processor.image_mean), tuple(processor.image_std)


def is_timm(model: nn.Module) -> bool:
    """Whether a model is of timm, or says as timm's do what its images are."""
    # pretrained_cfg is set by create_model, also on models of our own; classes called directly do not have it
    inherited = any(kind.__module__.startswith("timm.") for kind in type(model).__mro__)
    return inherited or hasattr(model, "pretrained_cfg")


def timm_config(model: nn.Module) -> dict[str, Any]:
    """How the images of a model of timm's kind are prepared, which a user may have written (pretrained_cfg_overlay).

    Raises:
        DataError: a mean or standard deviation that is not one number per channel, the second above 0, or an
            interpolation that timm does not have.
    """
    from timm.data.config import resolve_data_config

    config: dict[str, Any] = resolve_data_config({}, model=model)
    counts = {3, input_channels(model)}  # three are averaged where the images are grey
    for name, lowest in (("mean", -np.inf), ("std", 0.0)):
        value = config[name]
        numbers = isinstance(value, tuple | list) and len(value) in counts
        if not numbers or not all(isinstance(one, int | float) and lowest < one < np.inf for one in value):
            above = "" if name == "mean" else " above 0"
            wanted = f"{' or '.join(map(str, sorted(counts)))} numbers{above}, one per channel"
            raise DataError(f"pretrained_cfg: {name} is {wanted}, not {value!r:.80}")
    if config["interpolation"] not in INTERPOLATIONS:
        valid = ", ".join(INTERPOLATIONS)
        raise DataError(f"pretrained_cfg: unknown interpolation {config['interpolation']!r:.80}; valid: {valid}")
    return config


def input_channels(model: nn.Module) -> int:
    """Channels of the images a model takes, 3 where nothing says otherwise."""
    # pretrained_cfg says 3 whatever in_chans was
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels


def input_size(model: nn.Module, configured: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of the images a timm model takes, in pixels, from what its ``pretrained_cfg`` says."""
    # pretrained_cfg keeps the size of training whatever img_size was
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = configured[-2:] if size is None else (size, size) if isinstance(size, int) else size
    return int(height), int(width)
