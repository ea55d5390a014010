"""Pictures of the patches of an image that a language model gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from vitrim.measure.copies import reduced_copy
from vitrim.measure.prefill import Prefill
from vitrim.plots.charts import short
from vitrim.plots.patches import HATCH_GROUND, HATCH_LINE, OUTLINE_COLOUR, draw_kept, in_colour
from vitrim.plots.style import TEXT, TITLE, below, panels

if TYPE_CHECKING:
    from vitrim.data.decoding import Transform

ACROSS, SIDE = 4, 2.0
"""Pictures in a row, and inches of one."""
LARGE = 336
"""Images narrower than this are enlarged, so that outlines are thin."""


class HandedRow(NamedTuple):
    """One method and one image.

    Attributes:
        name: of the method, and the selector behind it.
        text: how many tokens go on.
        sources: (P,) for every place of the image that of the token that stands for it, -1: none.
        made: (P,) places whose token the selector made of several.
    """

    name: str
    text: str
    sources: NDArray[np.int64]
    made: NDArray[np.bool_]


def copies(prefill: Prefill, configs: Sequence[MethodConfig]) -> dict[str, nn.Module]:
    """Reduced copies of a model, by the names of the methods with the selector behind them.

    Raises:
        VitrimError: a method or the selector does not fit.
    """
    behind = "" if prefill.select is None else f" + {prefill.select.describe()}"
    return {config.describe() + behind: reduced_copy(prefill, config).eval() for config in configs}


@torch.no_grad()
def handed_rows(prefill: Prefill, models: Mapping[str, nn.Module], image: Tensor) -> list[HandedRow]:
    """The tokens of one image that every model hands on.

    Args:
        prefill: dense.
        models: of `copies`.
        image: (C, H, W), as the model takes it.
    """
    like = next(prefill.parameters())
    rows = []
    for name, model in models.items():
        assert isinstance(model, Prefill)
        model(image[None, None].to(like.device, like.dtype))
        reduction = handle_of(reduced_parts(model.model)[0][1])
        (held,), (own,) = model.family.held(model.model), reduction.image_places
        front = len(held) - isqrt(len(held)) ** 2  # a class token that goes on stands in front of a square
        sources = torch.where(held >= 0, held - front, -1)[front:].numpy()
        text = f"{own.number} of {len(held)} image tokens"
        rows.append(HandedRow(name, text, sources, own.merged[front:].numpy()))
    return rows


def draw_handed(image: NDArray[Any], rows: Sequence[HandedRow], *, title: str = "") -> Any:
    """A figure: the image, and for every method what the language model gets of it.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        rows: of `handed_rows`.

    Example:
        >>> row = HandedRow("divprune", "1 of 4 image tokens", np.array([0, -1, -1, -1]), np.zeros(4, bool))
        >>> [axis.get_title() for axis in draw_handed(np.zeros((8, 8)), [row]).axes]
        ['image', 'divprune\\n1 of 4 image tokens']
    """
    from matplotlib.patches import Patch

    height = SIDE * image.shape[0] / image.shape[1] + 0.5
    figure, axes = panels(1 + len(rows), across=ACROSS, size=(SIDE, height), above=0.4 + 0.3 * bool(title))
    scale = max(1, -(-LARGE // int(image.shape[1])))
    drawn = [(in_colour(image), "image")]
    for row in rows:
        side = isqrt(len(row.sources))
        picture = draw_kept(image, row.sources, (side, side), scale=scale, made=row.made)
        drawn.append((picture, "\n".join([*map(short, row.name.split(" + ")), row.text])))
    for axis, (picture, name) in zip(axes, drawn, strict=True):
        axis.imshow(picture, interpolation="antialiased", vmin=0, vmax=1)
        axis.set_title(name, fontsize=TEXT)
        axis.set_axis_off()
    gone = Patch(facecolor=HATCH_GROUND, edgecolor=HATCH_LINE, hatch="////", label="not handed on")
    merged = Patch(facecolor="white", edgecolor=OUTLINE_COLOUR, label="made of several")
    below(figure, [gone, merged])
    if title:
        figure.suptitle(title, fontsize=TITLE + 1)
    return figure


def preparing(prefill: Prefill) -> tuple[Callable[[], Transform], Callable[[Tensor], NDArray[Any]]]:
    """The function that prepares images of Pillow for a model, at the size that is measured, and its inverse.

    Raises:
        VitrimError: what the model says of its images cannot be read.
    """
    told = ask(prefill.model).preprocessing(prefill.model)
    mean, std = told.mean or IMAGENET_DEFAULT_MEAN, told.std or IMAGENET_DEFAULT_STD

    def made() -> Transform:
        from timm.data.transforms_factory import create_transform

        channels, height, width = prefill.shape[1:]
        size = (channels, height, width)
        found: Transform = create_transform(input_size=size, interpolation="bicubic", mean=mean, std=std, crop_pct=1.0)
        return found

    def pixels(image: Tensor) -> NDArray[Any]:
        factors = (torch.tensor(values)[:, None, None] for values in (std, mean))
        found = image.detach().float().cpu() * next(factors) + next(factors)
        return in_colour(found.clamp(0, 1).permute(1, 2, 0).numpy())

    return made, pixels
