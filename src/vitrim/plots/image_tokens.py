"""Pictures of the image tokens that a language model receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from vitrim.core.method import MethodConfig
from vitrim.core.reduce import handle_of, reduced_parts
from vitrim.core.registry import ask
from vitrim.engines.copies import reduced_copy
from vitrim.engines.prefill import Prefill
from vitrim.plots.charts import short
from vitrim.plots.images import unnormalised
from vitrim.plots.patches import HATCH_GROUND, HATCH_LINE, OUTLINE_COLOUR, draw_kept, in_colour
from vitrim.style import TEXT, TITLE, below, panels

if TYPE_CHECKING:
    from vitrim.data.decoding import Transform

ACROSS, SIDE = 4, 2.0
"""Pictures in a row, and the side of a picture in inches."""
LARGE = 336
"""Narrower images are enlarged, so that outlines are thin."""


class ImageTokensRow(NamedTuple):
    """One method and one image: the patch of the token that holds each of P patches, -1 for none, in ``sources`` (P,),
    and those whose token the selector ``made`` (P,) from several.
    """

    name: str
    text: str
    sources: NDArray[np.int64]
    made: NDArray[np.bool_]


def copies(prefill: Prefill, configs: Sequence[MethodConfig]) -> dict[str, nn.Module]:
    """Reduced copies of a model by method name, with the selector appended."""
    behind = "" if prefill.select is None else f" + {prefill.select.describe()}"
    return {config.describe() + behind: reduced_copy(prefill, config).eval() for config in configs}


@torch.no_grad()
def image_token_rows(prefill: Prefill, models: Mapping[str, nn.Module], image: Tensor) -> list[ImageTokensRow]:
    """The tokens of one ``image`` (C, H, W) that every model from `copies` passes to its language model."""
    like = next(prefill.parameters())
    rows = []
    for name, model in models.items():
        assert isinstance(model, Prefill)
        model(image[None, None].to(like.device, like.dtype))
        reduction = handle_of(reduced_parts(model.model)[0][1])
        # One image, so one entry each.
        (held,), (own,) = model.family.held(model.model), reduction.image_places
        front = len(held) - isqrt(len(held)) ** 2  # class tokens that are passed on precede the square grid
        sources = torch.where(held >= 0, held - front, -1)[front:].numpy()
        text = f"{own.number} of {len(held)} image tokens"
        rows.append(ImageTokensRow(name, text, sources, own.merged[front:].numpy()))
    return rows


def draw_image_tokens(image: NDArray[Any], rows: Sequence[ImageTokensRow], *, title: str = "") -> Any:
    """A figure of the ``image`` in [0, 1] and, for every method, the tokens that the language model receives.

    Example:
        >>> row = ImageTokensRow("divprune", "1 of 4 image tokens", np.array([0, -1, -1, -1]), np.zeros(4, bool))
        >>> [axis.get_title() for axis in draw_image_tokens(np.zeros((8, 8)), [row]).axes]
        ['image', 'divprune\\n1 of 4 image tokens']
    """
    from matplotlib.patches import Patch

    height = SIDE * image.shape[0] / image.shape[1] + 0.5
    figure, axes = panels(1 + len(rows), across=ACROSS, size=(SIDE, height), above=0.4 + 0.3 * bool(title))
    scale = -(-LARGE // int(image.shape[1]))
    drawn = [(in_colour(image), "image")]
    for row in rows:
        side = isqrt(len(row.sources))
        picture = draw_kept(image, row.sources, (side, side), scale=scale, made=row.made)
        drawn.append((picture, "\n".join([*map(short, row.name.split(" + ")), row.text])))
    for axis, (picture, name) in zip(axes, drawn, strict=True):
        axis.imshow(picture, interpolation="antialiased", vmin=0, vmax=1)
        axis.set_title(name, fontsize=TEXT)
        axis.set_axis_off()
    gone = Patch(facecolor=HATCH_GROUND, edgecolor=HATCH_LINE, hatch="////", label="left out")
    merged = Patch(facecolor="white", edgecolor=OUTLINE_COLOUR, label="made of several")
    below(figure, [gone, merged])
    if title:
        figure.suptitle(title, fontsize=TITLE + 1)
    return figure


def preparing(prefill: Prefill) -> tuple[Callable[[], Transform], Callable[[Tensor], NDArray[Any]]]:
    """Factory of the transform from Pillow images to the model's input, if it is known, and its inverse."""
    preprocessing = ask(prefill.model).preprocessing(prefill.model)
    mean, std = preprocessing.mean or IMAGENET_DEFAULT_MEAN, preprocessing.std or IMAGENET_DEFAULT_STD

    def made() -> Transform:
        from timm.data.transforms_factory import create_transform

        channels, height, width = prefill.shape[1:]
        size = (channels, height, width)
        found: Transform = create_transform(input_size=size, interpolation="bicubic", mean=mean, std=std, crop_pct=1.0)
        return found

    return made, partial(unnormalised, mean=mean, std=std)
