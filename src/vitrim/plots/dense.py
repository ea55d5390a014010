"""Pictures of dense predictions: masks and boxes over the image, beside the tokens that were kept.

`draw_mask`, `draw_boxes` and `patches.draw_kept` are pure functions of an image in [0, 1]; `compare` joins results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrim.core.library import Size
from vitrim.core.registry import ask
from vitrim.data.dense import IGNORED
from vitrim.engines.machine import seeded_draws
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.plots.patches import Image, draw_kept, enlarged, groups_of, in_colour, sources_of
from vitrim.style import sheet
from vitrim.tasks.detection import SURE, Detection, in_stored_pixels
from vitrim.tasks.segmentation import Segmentation
from vitrim.tasks.transforms_dense import resized_to

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    from vitrim.tasks.base import Task


COLOURS = (
    *((86, 180, 233), (255, 136, 17), (85, 68, 51), (238, 221, 187), (102, 34, 255), (136, 0, 119)),
    *((136, 153, 153), (170, 136, 85), (170, 238, 119), (153, 51, 204), (221, 0, 0), (0, 238, 238)),
    *((187, 85, 170), (204, 51, 102), (187, 119, 255), (204, 238, 17), (153, 0, 0), (119, 187, 136)),
    *((102, 34, 153), (136, 85, 51), (102, 17, 204), (51, 119, 102), (68, 204, 51), (255, 170, 204)),
)
"""Chosen one by one, each as far as possible from its predecessors in CIELAB for normal, protanopic, deuteranopic and
tritanopic vision. The first 11 are at least 24 apart, all are at least 14.
"""
LegendEntry = tuple[str, tuple[float, float, float]]
"""A class in the legend: its name and colour."""
LEVELS = (1.0, 0.6, 1.4)
"""Luminance of the first cycle of colours, and of the next two: darker, then lighter."""
OPACITY = 0.65
SLIDE = (13.3, 7.5)
"""Largest width and height of a figure in inches: a 16:9 slide."""
LETTERS, LINES = 40, 240
"""Font size and line width as fractions of the image's width, legible on a slide."""


class Column(NamedTuple):
    """One model of a figure: pictures (H, W, 3) of its prediction and its tokens, which a dense model has not.

    ``note`` is the second line of the title, ``kept_note`` the title above ``kept``.
    """

    title: str
    prediction: Image
    kept: Image | None = None
    note: str = ""
    kept_note: str = "tokens kept"


def palette(num_classes: int) -> Image:
    """The colours of classes 0 to K - 1, (K, 3) in [0, 1]: after 24 darker, then lighter; they recur after 72."""
    base = np.array(COLOURS) / 255
    cycles = [base * level if level <= 1 else 1 - (1 - base) * (2 - level) for level in LEVELS]
    every = np.concatenate(cycles).astype(np.float32)
    return every[np.arange(num_classes) % len(every)]


def draw_mask(image: NDArray[Any], classes: NDArray[Any], colours: NDArray[Any]) -> Image:
    """Overlay the image with the colours of its pixels' classes: (H, W, 3) float32 in [0, 1].

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        classes: (H, W) integers in [0, K), or `IGNORED` for pixels without an overlay.
        colours: (K, 3), see `palette`; `VitrimError` if a class has none.
    """
    drawn = in_colour(image)
    if drawn.shape[:2] != classes.shape:
        height, width = drawn.shape[:2]
        raise VitrimError(f"classes of shape {classes.shape} do not fit an image of {height} x {width}")
    known = classes != IGNORED
    chosen = classes[known]
    wrong = chosen[(chosen < 0) | (chosen >= len(colours))]
    if wrong.size:
        raise VitrimError(f"class {wrong[0]} has no colour; there are {len(colours)}, for 0 to {len(colours) - 1}")
    drawn[known] = (1 - OPACITY) * drawn[known] + OPACITY * np.asarray(colours, np.float32)[chosen]
    return drawn


def draw_boxes(image: NDArray[Any], objects: Mapping[str, Tensor], *, scale: int = 1) -> Image:
    """Draw boxes around the objects, and overlay their masks if there are any, in the colours of their classes.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        objects: a prediction or the truth: ``boxes`` (n, 4), x1 y1 x2 y2 in pixels of the image, and ``labels`` (n,);
            optionally ``scores`` (n,), written beside the boxes (objects below `vitrim.tasks.detection.SURE` are left
            out), and ``masks`` (n, H, W), binary or probabilities.
        scale: enlarge the image by this integer factor first, so that lines and letters are thin beside small objects.

    Returns:
        (H * scale, W * scale, 3) float32 in [0, 1].
    """
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    shown, large = above(objects, SURE), enlarged(in_colour(image), scale)
    labels = shown["labels"].tolist()
    if not labels:
        return large
    every = (palette(max(labels) + 1) * 255).round().astype(int)
    # Torchvision draws on bytes, channels first.
    pixels = torch.from_numpy((large * 255).round().astype(np.uint8)).permute(2, 0, 1)
    colours: list[Any] = [tuple(every[label].tolist()) for label in labels]
    if "masks" in shown:
        masks = (shown["masks"] > 0.5).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
        if masks.shape[1:] != pixels.shape[1:]:
            (tall, wide), (height, length) = shown["masks"].shape[1:], image.shape[:2]
            raise VitrimError(f"masks of {tall} x {wide} do not fit an image of {height} x {length}")
        pixels = draw_segmentation_masks(pixels, masks, alpha=0.5, colors=colours)
    texts, font = None, {}
    if "scores" in shown:
        texts = [f"{score:.2f}" for score in shown["scores"].tolist()]
        font = {**_font(max(9, large.shape[1] // LETTERS), colours), "fill_labels": True}
    width = max(1, round(large.shape[1] / LINES))
    drawn = draw_bounding_boxes(pixels, shown["boxes"] * scale, texts, colors=colours, width=width, **font)
    return np.asarray(drawn.permute(1, 2, 0).numpy() / 255, dtype=np.float32)


def _font(size: int, grounds: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """The arguments of torchvision for texts on these colours: black or white, whichever contrasts more."""
    from matplotlib import font_manager  # matplotlib ships the font

    # Luminance as the eye weighs the primaries (Rec. 601).
    light = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in grounds]
    ink = [(0, 0, 0) if value > 127 else (255, 255, 255) for value in light]
    return {"font": str(font_manager.findfont("DejaVu Sans")), "font_size": size, "label_colors": ink}


def above(objects: Mapping[str, Tensor], least: float) -> dict[str, Tensor]:
    """The objects with at least this score, on the CPU; all objects if there are no scores."""
    names = [name for name in ("boxes", "labels", "scores", "masks") if name in objects]
    found = {name: objects[name].detach().cpu() for name in names}
    return {name: value[found["scores"] >= least] for name, value in found.items()} if "scores" in found else found


# ---- the figure ------------------------------------------------------------------------------------------------------


def legend(
    labels: Iterable[NDArray[Any] | Tensor],
    colours: NDArray[Any],
    class_names: Sequence[str] | None = None,
) -> list[LegendEntry]:
    """The names and colours of the classes that occur in ``labels`` of any shapes, in order of class."""
    found = sorted({int(label) for each in labels for label in np.unique(np.asarray(each))} - {IGNORED})
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
    classes: Sequence[LegendEntry] = (),
    title: str = "",
) -> Any:
    """A figure of one image: image and truth, then one column per model with the prediction above the tokens.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        columns: at least one, usually with the dense model first.
        truth: (H, W, 3), drawn like the predictions; None if unknown.
        classes: entries of the legend (`legend`).

    Returns:
        A matplotlib figure that fits on a slide: ``compare(...).savefig("picture.png")``.
    """
    from matplotlib.patches import Patch

    if not columns:
        raise VitrimError("a comparison needs at least one column")
    cells = [(("image", "", image), None if truth is None else ("truth", "", truth))]
    for one in columns:
        kept = None if one.kept is None else (one.kept_note, "", one.kept)
        cells.append(((one.title, one.note, one.prediction), kept))
    rows = 2 if any(below is not None for _, below in cells) else 1
    height, width = in_colour(image).shape[:2]
    around = 0.35 * rows + 0.25 + (0.35 if title else 0) + (0.5 if rows == 1 else 0)  # titles and legend
    # As wide as the slide allows, unless the rows of panels and titles would then be too high for it.
    panel = min(SLIDE[0] / len(cells), (SLIDE[1] - around) / rows * width / height)
    # Panels keep the shape of the image, so the height follows from their width.
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
                heading, note, picture = shown
                axis.imshow(in_colour(picture), interpolation="antialiased")
                axis.set_title(f"{heading}\n{note}" if note else heading, fontsize=11)
    # the legend fills the last empty cell, or is below the figure
    patches = [Patch(facecolor=colour, edgecolor="black", linewidth=0.5, label=name) for name, colour in classes]
    if patches and empty:
        empty[-1].legend(handles=patches, loc="center", ncols=1 + len(patches) // 9, fontsize=11, frameon=False)
    elif patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 10), fontsize=11)
    if title:
        figure.suptitle(title, fontsize=14)
    return figure


SMALL = 400
"""Narrower images are enlarged, so that outlines and letters are thin."""


class Scene(NamedTuple):
    """One image (H, W, 3) in [0, 1] with its target, as ``stored``, and both transformed, ``pixels`` (C, h, w)."""

    image: NDArray[np.float32]
    pixels: Tensor
    target: Any
    stored: Any


def scene(image: PillowImage, target: Any, transform: Callable[[Any, Any], tuple[Tensor, Any]]) -> Scene:
    """Transform an image and its target, a mask (H, W) or objects, by `Task.eval_transform`."""
    picture = in_colour(np.asarray(image.convert("RGB")) / 255)
    pixels, changed = transform(image, target)
    return Scene(picture, pixels, changed, target)


def check_drawable(task: Task) -> None:
    """Refuse tasks that are not dense, and protocols that run the model several times per image."""
    if not isinstance(task, Segmentation | Detection):
        raise VitrimError(f"task {task.name} has no map to draw; valid: segmentation, detection, instances")
    if isinstance(task, Segmentation):
        protocol = task.protocol
        if protocol.mode != "whole" or len(protocol.scales) > 1 or protocol.flip:
            raise VitrimError(
                "tokens are drawn for images that go through the model whole and once: set protocol mode=whole, "
                "flip=false and one scale"
            )


def draw_comparison(
    models: Sequence[Contestant],
    task: Task,
    shown: Scene,
    class_names: Sequence[str] | None = None,
    *,
    title: str = "",
    seed: int = 0,
    notes: dict[str, str] | None = None,
) -> Any:
    """A figure of one image under every model: predictions, kept tokens, and the truth; see `compare`.

    Args:
        models: from `vitrim.measure.contestants.contestants`, the dense model first.
        shown: from `scene`.
        class_names: names in the legend; default: numbers.
        seed: seed of methods that draw at random; the global generators do not change.
        notes: receives the note below every prediction, by model name.
    """
    check_drawable(task)
    like = next(models[0].model.parameters())
    images, targets = task.collate([(shown.pixels, shown.target)])
    images, targets = images.to(like.device, like.dtype), targets.to(like.device)
    draw = _BoxDrawing(task, shown)
    columns, dense = [], None
    for model in models:
        with torch.no_grad(), seeded_draws(like.device, seed), _input_sizes(model) as sizes:
            output = model.run(images, targets, count=True)
        dense = dense or output
        agreement = task.agreement(output.prediction, dense.prediction, targets)
        picture = draw.prediction(output.prediction)
        note = _note(task, output, dense, agreement) if model.reduction is not None else "every token"
        if notes is not None:
            notes[model.name] = note
        kept, kept_note = draw.kept(model, sizes[-1]) if model.reduction is not None else (None, "")
        columns.append(Column(model.name, picture, kept, note, kept_note))
    truth = draw.truth()
    classes = legend(draw.seen, draw.colours, class_names)
    return compare(shown.image, columns, truth=truth, classes=classes, title=title)


def _note(task: Task, output: ModelOutput, dense: ModelOutput, agreement: Tensor) -> str:
    """The share of MACs of a reduced model, and its agreement with the dense prediction."""
    macs, full = (sum((one.macs or {}).values()) for one in (output, dense))
    share = f"{100 * macs / full:.0f}% of the MACs" if full else ""
    kept = agreement.mean().item() if len(agreement) else 0.0
    same = f"{100 * kept:.1f}% as dense" if isinstance(task, Segmentation) else f"mean IoU {kept:.2f} with dense"
    return ", ".join(part for part in (share, same if len(agreement) else "") if part)


class _BoxDrawing:
    """Draws predictions, truth and tokens of one scene, and collects the classes that occur."""

    def __init__(self, task: Task, shown: Scene) -> None:
        self.task, self.shown = task, shown
        self.colours = palette(task.num_classes)
        self.size: Size = (shown.image.shape[0], shown.image.shape[1])
        self.scale = -(-SMALL // self.size[1])
        self.seen: list[Any] = []

    def prediction(self, prediction: Any) -> NDArray[np.float32]:
        if isinstance(self.task, Segmentation):
            return self._mask(prediction[0].argmax(0).cpu().numpy())
        return self._boxes(in_stored_pixels(prediction[0], self.shown.target))

    def truth(self) -> NDArray[np.float32]:
        stored = self.shown.stored
        if isinstance(self.task, Segmentation):
            return self._mask(np.asarray(stored))
        return self._boxes({name: torch.as_tensor(value) for name, value in stored.items()})

    def _mask(self, classes: NDArray[Any]) -> NDArray[np.float32]:
        self.seen.append(classes)
        return draw_mask(self.shown.image, classes, self.colours)

    def _boxes(self, objects: Any) -> NDArray[np.float32]:
        self.seen.append(above(objects, SURE)["labels"])
        return draw_boxes(self.shown.image, objects, scale=self.scale)

    def kept(self, model: Contestant, size: Size) -> tuple[NDArray[np.float32], str]:
        """Draw the tokens of the last forward, whose input had this size, with a note on their number."""
        assert model.reduction is not None
        sources = sources_of(model.reduction.states[1:])
        reduced = model.reduction.model
        patch = ask(reduced).layout(reduced).patch_size
        # Whole patches, the last of which may be padding: rounded up.
        # The input may be padded: its size, not the image's, gives the grid.
        rows, columns = (-(-length // side) for length, side in zip(size, patch, strict=True))
        # the image's height and width in the model's input, to convert the grid to pixels of the stored image
        if isinstance(self.task, Segmentation):
            protocol = self.task.protocol
            now = max(self.size) if protocol.side == "long" else min(self.size)
            inside = resized_to(self.size, protocol.side, protocol.scales[0] * (protocol.size or now))
        else:
            inside = tuple(self.shown.target["size"].tolist())
        # The grid covers `inside` and padding: in pixels of the stored image, as much more as the grid is longer.
        covered = (rows * patch[0] * self.size[0] / inside[0], columns * patch[1] * self.size[1] / inside[1])
        groups = groups_of(sources)
        count, pruned = len(np.unique(groups[groups >= 0])), int((groups < 0).sum())
        note = f"{count} of {groups.size} tokens kept" + (f", {pruned} pruned" if pruned else "")
        return draw_kept(self.shown.image, sources, (rows, columns), covered=covered, scale=self.scale), note


@contextmanager
def _input_sizes(model: Contestant) -> Iterator[list[Size]]:
    """Record heights and widths of the model's inputs within the block."""
    sizes: list[Size] = []
    module = model.model
    with module.register_forward_pre_hook(lambda _, args: sizes.append((args[0].shape[-2], args[0].shape[-1]))):
        yield sizes
