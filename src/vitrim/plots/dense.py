"""Pictures of dense predictions: masks and boxes over the image, side by side with the tokens that were kept.

The `draw_*` functions, here and in `kept.py`, are pure: from an image (H, W, 3) in [0, 1] to another. `compare` puts
their results into one figure; `compared.py` makes them from models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrim.data.dense import IGNORED
from vitrim.errors import VitrimError
from vitrim.plots.kept import Image, enlarged, in_colour
from vitrim.plots.style import sheet

COLOURS = (
    *((86, 180, 233), (255, 136, 17), (85, 68, 51), (238, 221, 187), (102, 34, 255), (136, 0, 119)),
    *((136, 153, 153), (170, 136, 85), (170, 238, 119), (153, 51, 204), (221, 0, 0), (0, 238, 238)),
    *((187, 85, 170), (204, 51, 102), (187, 119, 255), (204, 238, 17), (153, 0, 0), (119, 187, 136)),
    *((102, 34, 153), (136, 85, 51), (102, 17, 204), (51, 119, 102), (68, 204, 51), (255, 170, 204)),
)
"""Chosen one after the other, each as far as can be from those before it in CIELAB, as seen with normal and with
protanopic, deuteranopic and tritanopic sight; the least of the four counts. The first 11 are 24 apart, all are 14."""
Entry = tuple[str, tuple[float, float, float]]
"""A class in the legend: its name and colour."""
LEVELS = (1.0, 0.6, 1.4)
"""Luminance of the first cycle of colours, and of those that follow: darker, then lighter."""
OPACITY = 0.65
SURE = 0.5
"""Least score of the objects that are drawn."""
SLIDE = (13.3, 7.5)
"""Most width and height of a figure in inches: those of a slide of 16 to 9."""
LETTERS, LINES = 40, 240
"""Letters and lines are this share of an image's width, as they must be read on a slide."""


class Column(NamedTuple):
    """One model of a figure: its picture, and that of its tokens.

    Attributes:
        title: above the picture.
        prediction: (H, W, 3), as `draw_mask` or `draw_boxes` gives it.
        kept: (H, W, 3), as `draw_kept` gives it; None for a dense model.
        note: below the title, in small letters.
        kept_note: above ``kept``.
    """

    title: str
    prediction: Image
    kept: Image | None = None
    note: str = ""
    kept_note: str = "tokens kept"


def palette(num_classes: int) -> Image:
    """The colours of classes 0 to K - 1, (K, 3) in [0, 1]: always the same for the same class.

    After 24 classes the colours come again darker, then lighter; 72 classes apart they are the same.

    Example:
        >>> (255 * palette(2)).round().tolist()
        [[86.0, 180.0, 233.0], [255.0, 136.0, 17.0]]
    """
    base = np.array(COLOURS) / 255
    cycles = [base * level if level <= 1 else 1 - (1 - base) * (2 - level) for level in LEVELS]
    every = np.concatenate(cycles).astype(np.float32)
    return every[np.arange(num_classes) % len(every)]


def draw_mask(
    image: NDArray[Any],
    classes: NDArray[Any],
    colours: NDArray[Any],
    *,
    opacity: float = OPACITY,
    ignored: int = IGNORED,
) -> Image:
    """The image under the colours of its pixels' classes.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        classes: (H, W) integers in [0, K), or ``ignored``.
        colours: (K, 3), one for each class (`palette`).
        opacity: share of the colour, in [0, 1]; the rest is the image.
        ignored: the value of pixels that stay as they are.

    Returns:
        (H, W, 3) float32 in [0, 1].

    Raises:
        VitrimError: image and classes differ in size, or a class has no colour.

    Example:
        >>> drawn = draw_mask(np.zeros((1, 2)), np.array([[1, 255]]), palette(2), opacity=1.0)
        >>> (255 * drawn).round().tolist()
        [[[255.0, 136.0, 17.0], [0.0, 0.0, 0.0]]]
    """
    drawn = in_colour(image)
    if drawn.shape[:2] != classes.shape:
        height, width = drawn.shape[:2]
        raise VitrimError(f"classes of shape {classes.shape} do not fit an image of {height} x {width}")
    known = classes != ignored
    chosen = classes[known]
    wrong = chosen[(chosen < 0) | (chosen >= len(colours))]
    if wrong.size:
        raise VitrimError(f"class {wrong[0]} has no colour; there are {len(colours)}, for 0 to {len(colours) - 1}")
    drawn[known] = (1 - opacity) * drawn[known] + opacity * np.asarray(colours, np.float32)[chosen]
    return drawn


def draw_boxes(
    image: NDArray[Any],
    objects: Mapping[str, Tensor],
    class_names: Sequence[str] | None = None,
    *,
    colours: NDArray[Any] | None = None,
    least: float = SURE,
    scale: int = 1,
    width: int | None = None,
    font_size: int | None = None,
    opacity: float = 0.5,
) -> Image:
    """The image with boxes around its objects in the colours of their classes, and over their masks if there are any.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        objects: ``boxes`` (n, 4), x1 y1 x2 y2 in pixels of the image, and ``labels`` (n,), a prediction or the truth;
            if there are ``scores`` (n,) they are written beside the box, and if there are ``masks`` (n, H, W), truths
            or probabilities, they are filled.
        class_names: written beside the boxes; None: only scores are.
        colours: (K, 3), one for each class; default: `palette`.
        least: objects with a lower score are not drawn.
        scale: enlarge the image by this whole factor first, so that lines and letters are thin next to small objects.
        width: of the lines in pixels of the result; default: by its width.
        font_size: of what is written, in pixels of the result; default: by its width; 0 for no text.
        opacity: of the masks.

    Returns:
        (H * scale, W * scale, 3) float32 in [0, 1].

    Raises:
        VitrimError: a label without a name or a colour, or masks of another size than the image.

    Example:
        >>> objects = {"boxes": torch.tensor([[2.0, 2, 8, 6]]), "labels": torch.tensor([0])}
        >>> drawn = draw_boxes(np.zeros((10, 10)), objects, width=1)
        >>> (255 * drawn[2, 4]).round().tolist(), drawn[0, 0].tolist()
        ([86.0, 180.0, 233.0], [0.0, 0.0, 0.0])
    """
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    shown = above(objects, least)
    boxes, labels = shown["boxes"], shown["labels"].tolist()
    every = palette(max(labels, default=0) + 1) if colours is None else np.asarray(colours)
    limit = len(every) if class_names is None else min(len(every), len(class_names))
    wrong = [label for label in labels if not 0 <= label < limit]
    if wrong:
        raise VitrimError(f"label {wrong[0]} has no name or colour; there are {limit}, for 0 to {limit - 1}")
    large = enlarged(in_colour(image), scale)
    if not labels:
        return large
    font_size = max(9, large.shape[1] // LETTERS) if font_size is None else font_size
    width = max(1, round(large.shape[1] / LINES)) if width is None else width
    pixels = torch.from_numpy((large * 255).round().astype(np.uint8)).permute(2, 0, 1)
    chosen: list[Any] = [tuple(int(part) for part in (every[label] * 255).round()) for label in labels]
    if "masks" in shown:
        masks = (shown["masks"] > 0.5).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
        if masks.shape[1:] != pixels.shape[1:]:
            (tall, wide), (height, length) = shown["masks"].shape[1:], image.shape[:2]
            raise VitrimError(f"masks of {tall} x {wide} do not fit an image of {height} x {length}")
        pixels = draw_segmentation_masks(pixels, masks, alpha=opacity, colors=chosen)
    texts = _texts(shown, class_names) if font_size else None
    font = {} if texts is None else {"font": _font(), "font_size": font_size, "label_colors": _readable(chosen)}
    drawn = draw_bounding_boxes(
        pixels, boxes * scale, texts, colors=chosen, width=width, fill_labels=texts is not None, **font
    )
    return np.asarray(drawn.permute(1, 2, 0).numpy() / 255, dtype=np.float32)


def above(objects: Mapping[str, Tensor], least: float) -> dict[str, Tensor]:
    """The objects with at least this score, on the CPU; all of them where there are no scores.

    Example:
        >>> above({"labels": torch.tensor([0, 1]), "scores": torch.tensor([0.4, 0.6])}, 0.5)["labels"].tolist()
        [1]
    """
    names = [name for name in ("boxes", "labels", "scores", "masks") if name in objects]
    found = {name: objects[name].detach().cpu() for name in names}
    return {name: value[found["scores"] >= least] for name, value in found.items()} if "scores" in found else found


def _texts(objects: Mapping[str, Tensor], class_names: Sequence[str] | None) -> list[str] | None:
    """The name and the score of each object; None where there is neither."""
    labels = objects["labels"].tolist()
    names = [""] * len(labels) if class_names is None else [str(class_names[label]) for label in labels]
    if "scores" in objects:
        names = [f"{name} {score:.2f}".strip() for name, score in zip(names, objects["scores"].tolist(), strict=True)]
    return names if any(names) else None


def _font() -> str:
    """The file of a font that comes with matplotlib."""
    from matplotlib import font_manager

    return str(font_manager.findfont("DejaVu Sans"))


def _readable(colours: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Black or white, whichever is read more easily on each colour."""
    light = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in colours]
    return [(0, 0, 0) if value > 127 else (255, 255, 255) for value in light]


# ---- the figure ------------------------------------------------------------------------------------------------------


def legend(
    labels: Iterable[NDArray[Any] | Tensor],
    colours: NDArray[Any],
    class_names: Sequence[str] | None = None,
    *,
    ignored: int = IGNORED,
) -> list[Entry]:
    """The names and colours of the classes that occur, in their order.

    Args:
        labels: maps of classes, or lists of labels, of any shapes.
        colours: (K, 3).
        class_names: default: the numbers.
        ignored: no class.

    Example:
        >>> [name for name, _ in legend([np.array([[2, 0], [2, 255]])], palette(3), ["sky", "tree", "road"])]
        ['sky', 'road']
    """
    found = sorted({int(label) for each in labels for label in np.unique(np.asarray(each))} - {ignored})
    names = [str(label) if class_names is None else class_names[label] for label in found]
    shades = np.asarray(colours, dtype=np.float64).tolist()
    return [
        (name, (shades[label][0], shades[label][1], shades[label][2])) for name, label in zip(names, found, strict=True)
    ]


def compare(
    image: NDArray[Any],
    columns: Sequence[Column],
    *,
    truth: NDArray[Any] | None = None,
    classes: Sequence[Entry] = (),
    title: str = "",
) -> Any:
    """A figure of one image: image and truth, then one column per model, prediction above tokens.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        columns: the dense model first, as a rule; at least one.
        truth: (H, W, 3), drawn as the predictions are; None where it is not known.
        classes: names and colours of the legend (`legend`).
        title: above the figure.

    Returns:
        A matplotlib figure that fills a slide or the width of one: ``compare(...).savefig("picture.png")``.

    Raises:
        VitrimError: there is no column.
    """
    if not columns:
        raise VitrimError("a comparison needs at least one column")
    cells = [(("image", "", image), None if truth is None else ("truth", "", truth))]
    for one in columns:
        kept = None if one.kept is None else (one.kept_note, "", one.kept)
        cells.append(((one.title, one.note, one.prediction), kept))
    rows = 2 if any(below is not None for _, below in cells) else 1
    height, width = in_colour(image).shape[:2]
    around = 0.35 * rows + 0.25 + (0.35 if title else 0) + (0.5 if rows == 1 else 0)  # titles and legend
    panel = min(SLIDE[0] / len(cells), (SLIDE[1] - around) / rows * width / height)
    size = (panel * len(cells), rows * panel * height / width + around)
    figure = sheet(*size)
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.07, wspace=0.01, hspace=0.02)
    axes = figure.subplots(rows, len(cells), squeeze=False)
    empty = []
    for number, cell in enumerate(cells):
        for axis, shown in zip(axes[:, number], cell, strict=False):
            axis.set_axis_off()
            if shown is None:
                empty.append(axis)
            else:
                _show(axis, *shown)
    _legend(figure, empty, classes)
    if title:
        figure.suptitle(title, fontsize=14)
    return figure


def _show(axis: Any, title: str, note: str, picture: NDArray[Any]) -> None:
    axis.imshow(in_colour(picture), interpolation="antialiased")
    axis.set_title(f"{title}\n{note}" if note else title, fontsize=11)


def _legend(figure: Any, empty: Sequence[Any], classes: Sequence[Entry]) -> None:
    """Write the legend into the last cell that is free, or below the figure."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, edgecolor="black", linewidth=0.5, label=name) for name, colour in classes]
    if not patches:
        return
    if empty:
        empty[-1].legend(handles=patches, loc="center", ncols=1 + len(patches) // 9, fontsize=11, frameon=False)
    else:
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 10), fontsize=11)
