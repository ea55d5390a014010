"""Pictures of what models predict for an image and of the tokens they kept: dense beside reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrim.core.registry import ask
from vitrim.errors import VitrimError
from vitrim.measure.contestants import Contestant, Output
from vitrim.measure.machine import drawing
from vitrim.plots.dense import Column, Entry, above, compare, draw_boxes, draw_mask, legend, palette
from vitrim.plots.kept import draw_kept, groups_of, in_colour, sources_of
from vitrim.tasks.detection import SURE, Detection, in_stored_pixels
from vitrim.tasks.segmentation import Segmentation
from vitrim.tasks.transforms_dense import resized_to

if TYPE_CHECKING:
    from PIL import Image

    from vitrim.tasks.base import Task

Size = tuple[int, int]
SMALL = 400
"""Images narrower than this are enlarged, so that outlines and letters are thin."""


class Scene(NamedTuple):
    """One image as it is stored, with its target.

    Attributes:
        image: (H, W, 3) float32 in [0, 1].
        pixels: (C, h, w), as the task's transform makes it.
        target: of the transform.
        stored: the target in the pixels of ``image``.
    """

    image: NDArray[np.float32]
    pixels: Tensor
    target: Any
    stored: Any


def scene(image: Image.Image, target: Any, transform: Callable[[Any, Any], tuple[Tensor, Any]]) -> Scene:
    """Prepare an image and its target, as a dataset reads them, by the transform of an evaluation.

    Args:
        image: of any mode.
        target: a mask (H, W), or objects.
        transform: `Task.eval_transform`.
    """
    picture = in_colour(np.asarray(image.convert("RGB")) / 255)
    pixels, changed = transform(image, target)
    return Scene(picture, pixels, changed, target)


def check_drawable(task: Task) -> None:
    """Refuse what has no picture.

    Raises:
        VitrimError: the task is not a dense one, or a model sees an image more than once.
    """
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
) -> Any:
    """A figure of one image under every model: predictions, tokens that were kept, the truth.

    Args:
        models: of `vitrim.measure.contestants.contestants`, the dense one first.
        task: of the models.
        shown: of `scene`.
        class_names: for the legend; default: numbers.
        title: above the figure.
        seed: of methods that draw at random; the global generators stay as they were.

    Returns:
        A matplotlib figure, see `vitrim.plots.dense.compare`.

    Raises:
        VitrimError: as `check_drawable`; or outputs that are not finite.
    """
    check_drawable(task)
    like = next(models[0].forward.parameters())
    images, targets = task.collate([(shown.pixels, shown.target)])
    images, targets = images.to(like.device, like.dtype), targets.to(like.device)
    draw = _Drawing(task, shown, class_names)
    columns, dense = [], None
    for model in models:
        with torch.no_grad(), drawing(like.device, seed), _input_sizes(model) as sizes:
            output = model.run(images, targets, count=True)
        dense = dense or output
        agreement = task.agreement(output.prediction, dense.prediction, targets)
        picture = draw.prediction(output.prediction)
        note = _note(task, output, dense, agreement) if model.reduction is not None else "every token"
        kept, kept_note = draw.kept(model, sizes[-1]) if model.reduction is not None else (None, "")
        columns.append(Column(model.name, picture, kept, note, kept_note))
    truth = draw.truth()
    return compare(draw.background, columns, truth=truth, classes=draw.legend(), title=title)


def _note(task: Task, output: Output, dense: Output, agreement: Tensor) -> str:
    """The cost of a reduced model, and the share of the dense prediction that it keeps."""
    macs, full = (sum((one.macs or {}).values()) for one in (output, dense))
    share = f"{100 * macs / full:.0f}% of the MACs" if full else ""
    kept = agreement.mean().item() if len(agreement) else 0.0
    same = f"{100 * kept:.1f}% as dense" if isinstance(task, Segmentation) else f"mean IoU {kept:.2f} with dense"
    return ", ".join(part for part in (share, same if len(agreement) else "") if part)


class _Drawing:
    """Draws predictions, truth and tokens of one scene, and gathers the classes that occur."""

    def __init__(self, task: Task, shown: Scene, class_names: Sequence[str] | None) -> None:
        self.task, self.shown, self.names = task, shown, class_names
        self.colours = palette(task.num_classes)
        self.size: Size = (shown.image.shape[0], shown.image.shape[1])
        self.scale = max(1, -(-SMALL // self.size[1]))
        self.background = shown.image
        self.seen: list[Any] = []

    def prediction(self, prediction: Any) -> NDArray[np.float32]:
        """The prediction of a batch of this one image."""
        if isinstance(self.task, Segmentation):
            return self._mask(prediction[0].argmax(0).cpu().numpy())
        return self._boxes(in_stored_pixels(prediction[0], self.shown.target))

    def truth(self) -> NDArray[np.float32]:
        """The truth, as the data has it."""
        stored = self.shown.stored
        if isinstance(self.task, Segmentation):
            return self._mask(np.asarray(stored))
        return self._boxes({name: torch.as_tensor(value) for name, value in stored.items()})

    def _mask(self, classes: NDArray[Any]) -> NDArray[np.float32]:
        self.seen.append(classes)
        return draw_mask(self.shown.image, classes, self.colours)

    def _boxes(self, objects: Any) -> NDArray[np.float32]:
        self.seen.append(above(objects, SURE)["labels"])
        return draw_boxes(self.shown.image, objects, colours=self.colours, least=SURE, scale=self.scale)

    def legend(self) -> list[Entry]:
        """The classes of all that was drawn."""
        return legend(self.seen, self.colours, self.names)

    def kept(self, model: Contestant, size: Size) -> tuple[NDArray[np.float32], str]:
        """The tokens of the last forward, of an input of this size, and how many there are."""
        assert model.reduction is not None
        sources = sources_of(model.reduction.states[1:])
        reduced = model.reduction.model
        patch = ask(reduced).layout(reduced).patch_size
        rows, columns = (-(-length // side) for length, side in zip(size, patch, strict=True))
        inside = self._inside()  # one pixel of it is so many of the stored image
        covered = (rows * patch[0] * self.size[0] / inside[0], columns * patch[1] * self.size[1] / inside[1])
        groups = groups_of(sources)
        count, pruned = len(np.unique(groups[groups >= 0])), int((groups < 0).sum())
        note = f"{count} of {groups.size} tokens kept" + (f", {pruned} pruned" if pruned else "")
        return draw_kept(self.shown.image, sources, (rows, columns), covered=covered, scale=self.scale), note

    def _inside(self) -> Size:
        """Height and width of the image within the model's input."""
        if isinstance(self.task, Segmentation):
            protocol = self.task.protocol
            now = max(self.size) if protocol.side == "long" else min(self.size)
            return resized_to(self.size, protocol.side, protocol.scales[0] * (protocol.size or now))
        height, width = self.shown.target["size"].tolist()
        return height, width


@contextmanager
def _input_sizes(model: Contestant) -> Iterator[list[Size]]:
    """The heights and widths of what the model's forwards within are given."""
    sizes: list[Size] = []
    module = model.forward.model
    handle = module.register_forward_pre_hook(lambda _, args: sizes.append((args[0].shape[-2], args[0].shape[-1])))
    try:
        yield sizes
    finally:
        handle.remove()
