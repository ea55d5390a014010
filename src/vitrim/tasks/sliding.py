"""Put an image of any size through a model that returns a map: complete or by windows, scaled, mirrored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrim.errors import VitrimError
from vitrim.tasks.options import Protocol
from vitrim.tasks.transforms_dense import resized_to

ModelFunction = Callable[[Tensor], Tensor]


def predict(model_fn: ModelFunction, image: Tensor, protocol: Protocol, most: int | None = None) -> Tensor:
    """Predict the map (K, H, W) of one image (C, H, W): logits, or probabilities if the protocol averages these.

    The image is resized for each scale, mirrored, and put through the model complete or by windows, whose logits are
    averaged where they overlap; the logits are resized to the image, and averaged over scales and mirrorings
    (Segmenter, Strudel et al., 2021). The windows of an image form one batch, on which batch-dependent methods decide.

    Args:
        model_fn: from images (B, C, h, w) to logits (B, K, h, w).
        most: most windows at once; None: all.

    Raises:
        VitrimError: the windows do not fit into memory, or the model returns a map of another size.

    Example:
        >>> image = torch.rand(3, 20, 30)
        >>> double = lambda images: 2 * images
        >>> torch.allclose(predict(double, image, Protocol(mode="slide", window=16, stride=8)), 2 * image)
        True
    """
    total: Tensor | None = None
    size = (image.shape[-2], image.shape[-1])
    # Without a size in the protocol, scales are of the image as it is.
    now = max(size) if protocol.side == "long" else min(size)
    for scale in protocol.scales:
        # the protocol's size; the short side fills at least one window
        wanted = resized_to(size, protocol.side, scale * (protocol.size or now))
        if protocol.mode == "slide" and protocol.window is not None and min(wanted) < protocol.window:
            wanted = resized_to(size, "short", protocol.window)
        resized = image
        if wanted != size:
            how: dict[str, Any] = {"mode": "bilinear", "align_corners": False, "antialias": True}
            resized = F.interpolate(image[None], size=wanted, **how)[0]
        for mirrored in (False, True) if protocol.flip else (False,):
            given = resized.flip(-1) if mirrored else resized
            if protocol.mode == "whole":
                side, (height, width) = protocol.window or 0, given.shape[-2:]
                padded = F.pad(given, (0, max(0, side - width), 0, max(0, side - height)))
                logits = _forward(model_fn, padded[None], protocol)[0, :, :height, :width]
            else:
                logits = _slide(model_fn, given, protocol, most)
            logits = logits.flip(-1) if mirrored else logits
            if logits.shape[-2:] != image.shape[-2:]:
                logits = F.interpolate(logits[None], size=size, mode="bilinear", align_corners=False)[0]
            # Resized first: the mean is over predictions for the same pixels.
            result = logits.softmax(dim=0) if protocol.average == "probabilities" else logits
            total = result if total is None else total + result
    assert total is not None
    return total / (len(protocol.scales) * (1 + protocol.flip))


def window_places(length: int, window: int, stride: int) -> list[int]:
    """Return the first pixels of the windows along one side: every `stride` pixels, and the last window at the border.

    Example:
        >>> window_places(20, 8, 6), window_places(20, 8, 5), window_places(8, 8, 8), window_places(5, 8, 8)
        ([0, 6, 12], [0, 5, 10, 12], [0], [0])
    """
    last = max(length - window, 0)
    return [*range(0, last, stride), last]


def _slide(model_fn: ModelFunction, image: Tensor, protocol: Protocol, most: int | None) -> Tensor:
    assert protocol.window is not None
    window, stride = protocol.window, protocol.stride or protocol.window
    height, width = image.shape[-2:]
    places = [(y, x) for y in window_places(height, window, stride) for x in window_places(width, window, stride)]
    crops = torch.stack([image[:, y : y + window, x : x + window] for y, x in places])
    # At most `most` crops at once bound the memory of large images.
    logits = torch.cat([_forward(model_fn, part, protocol) for part in crops.split(most or len(crops))])
    total = logits.new_zeros(logits.shape[1], height, width)
    count = logits.new_zeros(height, width)
    for (y, x), part in zip(places, logits, strict=True):
        total[:, y : y + window, x : x + window] += part
        # Windows overlap: a pixel's sum is divided by how many saw it.
        count[y : y + window, x : x + window] += 1
    return total / count


def _forward(model_fn: ModelFunction, images: Tensor, protocol: Protocol) -> Tensor:
    try:
        logits = model_fn(images)
    except torch.OutOfMemoryError as error:
        raise VitrimError(
            f"{len(images)} images of {images.shape[-2]} x {images.shape[-1]} pixels do not fit into memory: lower "
            f"protocol.window (now {protocol.window}) or protocol.size (now {protocol.size})"
        ) from error
    if logits.ndim != 4 or logits.shape[-2:] != images.shape[-2:]:
        expected = f"(B, K, {images.shape[-2]}, {images.shape[-1]})"
        raise VitrimError(f"the model gives a map of shape {tuple(logits.shape)}; expected {expected}")
    return logits
