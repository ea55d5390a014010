"""Joint transforms of an image and its mask or boxes, built on torchvision's v2. All draw from torch's global stream.

Masks are resized to the nearest pixel, boxes are clipped to the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from vitrim.data.dense import IGNORED

if TYPE_CHECKING:
    from PIL import Image

    from vitrim.data.objects import Objects
    from vitrim.data.transforms import Geometry
    from vitrim.tasks.options import DenseAugment

LongOrShort = Literal["long", "short"]
LONGEST = 4.0
"""Limit of the long side over the drawn short side: 2048 of 512, as published."""


def resized_to(
    size: tuple[int, int], side: LongOrShort, pixels: float, *, longest: float | None = None
) -> tuple[int, int]:
    """The height and width of the same ratio whose ``side`` has ``pixels``, rounded; the long one at most ``longest``.

    Example:
        >>> resized_to((360, 480), "long", 240), resized_to((360, 480), "short", 180)
        ((180, 240), (180, 240))
    """
    # One factor for both sides keeps the ratio.
    scale = pixels / (max(size) if side == "long" else min(size))
    if longest is not None:
        scale = min(scale, longest / max(size))
    height, width = (max(1, int(length * scale + 0.5)) for length in size)
    return height, width


def fitted(size: tuple[int, int], within: tuple[int, int]) -> tuple[int, int]:
    """Return the largest size of the same ratio that fits within another.

    Example:
        >>> fitted((480, 640), (160, 224)), fitted((480, 640), (224, 160))
        ((160, 213), (120, 160))
    """
    scale = min(most / length for length, most in zip(size, within, strict=True))
    height, width = (max(1, min(most, round(length * scale))) for length, most in zip(size, within, strict=True))
    return height, width


class Change(v2.Transform):
    """A transform by one function of torchvision, whose arguments `make_params` draws."""

    function: ClassVar[Any]

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(self.function, inpt, **params)


class ResizeRange(Change):
    """Resize in the same ratio, so that one ``side`` has a number of pixels drawn uniformly from ``low`` to ``high``.

    With `side="short"` the long side is at most `LONGEST` times the draw.
    """

    function = staticmethod(F.resize)

    def __init__(self, side: LongOrShort, low: float, high: float) -> None:
        super().__init__()
        self.side, self.low, self.high = side, low, high

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        pixels = self.low + (self.high - self.low) * torch.rand(()).item()
        longest = None if self.side == "long" else LONGEST * pixels
        size = resized_to(size_of(flat_inputs), self.side, pixels, longest=longest)
        return {"size": list(size), "antialias": True}


class ScaleJitter(Change):
    """Resize to a random factor (``low`` to ``high``) times the largest size of the same ratio that fits ``size``.

    torchvision's transform of this name swaps height and width where they differ.
    """

    function = staticmethod(F.resize)

    def __init__(self, size: tuple[int, int], low: float = 0.1, high: float = 2.0) -> None:
        super().__init__()
        self.size, self.low, self.high = size, low, high

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        factor = self.low + (self.high - self.low) * torch.rand(()).item()
        height, width = (max(1, round(length * factor)) for length in fitted(size_of(flat_inputs), self.size))
        return {"size": [height, width], "antialias": True}


class CropUnderShare(Change):
    """Crop a random window, again while one class covers too much of it.

    As published: at most ``share`` of the pixels that are not ignored have one class, and there are at least two
    classes; the last of ``tries`` further windows is accepted. An image smaller than the window keeps its size in that
    direction; `PadTo` pads it. Without a mask, or with a share of 1, the first window is used.
    """

    function = staticmethod(F.crop)

    def __init__(self, size: tuple[int, int], share: float = 0.75, tries: int = 10) -> None:
        super().__init__()
        self.size, self.share, self.tries = size, share, tries

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        masks = [each for each in flat_inputs if isinstance(each, tv_tensors.Mask) and each.ndim == 2]
        height, width = size_of(flat_inputs)
        tall, wide = min(height, self.size[0]), min(width, self.size[1])
        tries = self.tries if masks and self.share < 1 else 0
        while True:
            top = int(torch.randint(height - tall + 1, ()))
            left = int(torch.randint(width - wide + 1, ()))
            if not tries:
                break
            part = plain_tensor(masks[0])[top : top + tall, left : left + wide]
            # Ignored pixels are no class, and do not count as one that fills the window.
            counts = part[part != IGNORED].unique(return_counts=True)[1]
            if len(counts) > 1 and int(counts.max()) < self.share * int(counts.sum()):
                break
            tries -= 1
        return {"top": top, "left": left, "height": tall, "width": wide}


class PhotometricDistort(v2.Transform):
    """Distort brightness, contrast, saturation and hue at random, each with probability 1/2.

    As published for segmentation: a brightness offset of up to 32/255; contrast and saturation times 0.5 to 1.5; a hue
    rotation of up to 18 degrees; contrast before or after saturation and hue. Values are clipped after each.
    (torchvision's transform of a similar name multiplies the brightness, and blends with grey.) Grey images get
    brightness and contrast only. Needs float images in [0, 1].
    """

    _transformed_types = (tv_tensors.Image,)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        # All numbers are drawn, whichever apply: a change of one chance does not shift the draws of others.
        chances = torch.rand(5).tolist()
        ranges = {"brightness": (-32 / 255, 32 / 255), "contrast": (0.5, 1.5), "saturation": (0.5, 1.5)}
        ranges["hue"] = (-18 / 360, 18 / 360)
        drawn = torch.rand(4).tolist()
        values = {
            name: low + (high - low) * part for (name, (low, high)), part in zip(ranges.items(), drawn, strict=True)
        }
        order = ["brightness", "contrast", "saturation", "hue"]
        if chances[4] < 0.5:
            order = ["brightness", "saturation", "hue", "contrast"]
        chosen = {name for name, chance in zip(ranges, chances, strict=False) if chance < 0.5}
        return {"changes": [(name, values[name]) for name in order if name in chosen]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        image = inpt.as_subclass(Tensor)
        for name, value in params["changes"]:
            image = distorted(image, name, value)
        return tv_tensors.wrap(image, like=inpt)


def distorted(image: Tensor, name: str, value: float) -> Tensor:
    """Change one property of an image (C, H, W) in [0, 1], of 1 or 3 channels, as `PhotometricDistort` does.

    ``value`` is an offset in brightness, a factor on contrast or saturation, or a share of the hue circle.

    Example:
        >>> distorted(torch.tensor([0.5, 0.25, 0.0]).view(3, 1, 1), "saturation", 0.5).flatten().tolist()
        [0.5, 0.375, 0.25]
    """
    if name == "brightness":
        return (image + value).clamp(0, 1)
    if name == "contrast":
        return (image * value).clamp(0, 1)
    if len(image) == 1:
        return image
    if name == "hue":
        return cast(Tensor, F.adjust_hue(image, value))
    # HSV saturation is (most - least) / most: rgb moves away from the largest channel until one is 0
    most, least = image.amax(dim=0), image.amin(dim=0)
    factor = torch.minimum(torch.full_like(most, value), most / (most - least).clamp(min=1e-12))
    return most - (most - image) * factor


class PadTo(v2.Transform):
    """Pad at right and bottom to ``size``: images with 0, masks of labels with `IGNORED`, others with 0."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = size_of(flat_inputs)
        return {"padding": [0, 0, max(0, self.size[1] - width), max(0, self.size[0] - height)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        fill = IGNORED if isinstance(inpt, tv_tensors.Mask) and inpt.ndim == 2 else 0
        return self._call_kernel(F.pad, inpt, padding=params["padding"], fill=fill)


def size_of(flat_inputs: Sequence[Any]) -> tuple[int, int]:
    """Return height and width of the first image, mask or boxes."""
    kinds = (tv_tensors.Image, tv_tensors.Mask, tv_tensors.BoundingBoxes)
    found = next(each for each in flat_inputs if isinstance(each, kinds))
    height, width = F.get_size(found)
    return height, width


class DenseTrainTransform:
    """Random joint transform of a PIL image of any mode and its target.

    Random size, random window, mirroring, photometric distortion, normalisation, and padding at right and bottom to the
    model's size. Padding is 0 after normalisation, as published.

    Args:
        augment: `scaled` draws the long or short side from ``range`` times that of the model, then crops a window that
            no class fills; `jitter` draws a factor on the largest size that fits the model (LSJ).
    """

    def __init__(self, geometry: Geometry, augment: DenseAugment) -> None:
        self.mode = "L" if len(geometry.mean) == 1 else "RGB"
        low, high = augment.range or ((0.1, 2.0) if augment.crop == "jitter" else (0.5, 2.0))
        steps: list[Any]
        if augment.crop == "jitter":
            steps = [ScaleJitter(geometry.size, low, high), CropUnderShare(geometry.size, share=1.0)]
        else:
            pixels = max(geometry.size) if augment.side == "long" else min(geometry.size)
            window = CropUnderShare(geometry.size, augment.cat_max_share)
            steps = [ResizeRange(augment.side, low * pixels, high * pixels), window]
        if augment.hflip:
            steps.append(v2.RandomHorizontalFlip(augment.hflip))
        if augment.vflip:
            steps.append(v2.RandomVerticalFlip(augment.vflip))
        steps.append(v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True))
        if augment.photometric:
            steps.append(PhotometricDistort())
        self.change = v2.Compose(steps)
        self.finish = v2.Compose([v2.Normalize(list(geometry.mean), list(geometry.std)), PadTo(geometry.size)])
        self.sanitize = v2.SanitizeBoundingBoxes(min_size=1)

    def __call__(self, image: Image.Image, target: Any) -> tuple[Tensor, Any]:
        """Return the image (C, H, W) float32, and its target: a mask (H, W) int64, or objects without crowds."""
        pixels = v2.functional.to_image(image.convert(self.mode))
        if not isinstance(target, dict):
            pixels, mask = self.finish(*self.change(pixels, target))
            return plain_tensor(pixels), plain_tensor(mask).long()
        # Crowds are no objects to learn: their boxes surround many.
        alone = target["iscrowd"] == 0
        names = [name for name in ("boxes", "labels", "masks") if name in target]
        objects = {name: tv_tensors.wrap(target[name][alone], like=target[name]) for name in names if name != "labels"}
        pixels, objects = self.sanitize(*self.change(pixels, {**objects, "labels": target["labels"][alone]}))
        # The size before padding: losses and scores of a padded image must know where it ends.
        size = torch.tensor(F.get_size(pixels))
        pixels, objects = self.finish(pixels, objects)
        return plain_tensor(pixels), {**plain_objects(objects), "size": size}


class DenseEvalTransform:
    """Joint transform of a PIL image of any mode and its target for evaluation, normalised.

    With a mask an image keeps its size: the `Protocol` resizes it and its logits, so that every pixel of the mask is
    scored. With objects it is resized to fit the model's size and padded; objects stay in the pixels of the stored
    image, which are scored, and `size` and `original` convert predictions to them.

    Args:
        padded: pad images with objects to the model's size; otherwise they keep their shape, and upright ones fit the
            model's size turned upright.
    """

    def __init__(self, geometry: Geometry, *, padded: bool = True) -> None:
        self.mode = "L" if len(geometry.mean) == 1 else "RGB"
        self.size, self.padded = geometry.size, padded
        to_float = v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)
        self.finish = v2.Compose([to_float, v2.Normalize(list(geometry.mean), list(geometry.std))])
        self.pad = PadTo(geometry.size)

    def __call__(self, image: Image.Image, target: Any) -> tuple[Tensor, Any]:
        """Return the image (C, H, W) float32, and its mask (H, W) int64, or its objects, crowds included."""
        pixels = v2.functional.to_image(image.convert(self.mode))
        if not isinstance(target, dict):
            return plain_tensor(self.finish(pixels)), plain_tensor(target).long()
        turned = not self.padded and (image.height > image.width) != (self.size[0] > self.size[1])
        size = fitted((image.height, image.width), self.size[::-1] if turned else self.size)
        pixels = self.finish(F.resize(pixels, list(size), antialias=True))
        sizes = {"size": torch.tensor(size), "original": torch.tensor((image.height, image.width))}
        return plain_tensor(self.pad(pixels) if self.padded else pixels), {**plain_objects(target), **sizes}


def plain_tensor(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor)


def plain_objects(objects: Objects) -> Objects:
    """Return objects as plain tensors, masks as booleans."""
    plain = {name: plain_tensor(value) for name, value in objects.items()}
    return {**plain, "masks": plain["masks"].bool()} if "masks" in plain else plain
