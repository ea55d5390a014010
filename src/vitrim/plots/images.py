"""The images that `vitrim.show` draws: where they are from, and their pixels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitrim.core.registry import ask
from vitrim.data import ImageDataset, spread
from vitrim.data.folders import loose_images
from vitrim.errors import VitrimError
from vitrim.measure.inputs import DataSpec, open_data
from vitrim.plots.patches import Image, in_colour
from vitrim.tasks.classes import Name

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    from vitrim.data.decoding import Transform


@dataclass(frozen=True)
class Pictured:
    """The images to draw: a dataset, or a list of Pillow images and tensors, of which ``limit`` are spread evenly.

    ``loose``: image files, whose labels are dummies.
    """

    dataset: Any
    limit: int | None
    loose: bool = False

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the classes, if the dataset has any."""
        return getattr(self.dataset, "class_names", None)

    def each(self, make: Callable[[], Transform], shape: Sequence[int]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield file name, title and model input (C, H, W) of every image; ``make`` gives the transform."""
        from vitrim.measure.decisions import file_name  # imports torchmetrics

        dataset, places = self.dataset, [int(place) for place in spread(len(self.dataset), self.limit)]
        if isinstance(dataset, list | tuple):
            for place in places:
                yield f"image_{place}", f"image {place}", _input(dataset[place], make, shape)
            return
        dataset.transform = make()
        taken: set[str] = set()
        for place in places:
            image = dataset.read_image(place)
            if not self.loose:
                labels = getattr(dataset, "labels", None)
                names = [Name.of(name).words for name in dataset.class_names or ()] or None
                label = "" if labels is None else f": {labels[place] if names is None else names[labels[place]]}"
                yield f"image_{place}", f"image {place}{label}", image
                continue
            path = dataset.images[place]
            # The name becomes a file of the pictures' folder.
            stem = file_name(path.stem)
            # Two folders may have files of one name: further ones get a number.
            stems = chain([stem], (f"{stem}_{number}" for number in count(2)))
            name = next(one for one in stems if one not in taken)
            taken.add(name)
            yield name, path.name, image


def from_source(data: DataSpec) -> Pictured:
    """The dataset of a source, or a copy of a dataset, whose transform may be replaced."""
    if not data.by_name:
        if any(data.columns.values()) or data.options:
            raise VitrimError("split, columns and options say how to read a source, and a dataset is given")
        return Pictured(copy.copy(data.source), data.limit)
    return Pictured(open_data(data.source, **data.columns, options=data.options), data.limit)


def given_images(data: DataSpec) -> Pictured:
    """Image files and folders, as a dataset with dummy labels; or the images or tensors themselves."""
    images: Any = data.source
    if images is not None and not isinstance(images, list | tuple):
        images = list(images) if isinstance(images, Tensor) and images.ndim == 4 else [images]
    if not images:
        raise VitrimError("give the images to show: files or folders, or a dataset as data; not both")
    name = next((name for name, value in {**data.columns, "data_options": data.options}.items() if value), None)
    if name is not None:
        raise VitrimError(f"{name} says how to read a dataset: give its source as data")
    if not any(isinstance(one, str | Path) for one in images):
        return Pictured(images, data.limit, loose=True)
    if not all(isinstance(one, str | Path) for one in images):
        raise VitrimError("files and images that are read already do not mix: give either")
    found = loose_images(Path(one) for one in images)
    return Pictured(ImageDataset(found, [0] * len(found), source="the images"), data.limit, loose=True)


def _input(image: Tensor | PillowImage, make: Callable[[], Transform], taken: Sequence[int]) -> Tensor:
    """The model's input (C, H, W) for a Pillow image or a tensor; other types and shapes are refused."""
    if isinstance(image, Tensor):
        if tuple(image.shape) != tuple(taken):
            wrong = tuple(image.shape)
            raise VitrimError(
                f"an image is a tensor (C, H, W) as the model takes it, {tuple(taken)}, not one of {wrong}"
            )
        return image
    if not hasattr(image, "convert"):
        raise VitrimError(f"an image is a file, an image of Pillow or a tensor (C, H, W), not {type(image).__name__}")
    return make()(image)


def pixels_of(model: nn.Module, image: Tensor) -> Image:
    """The picture (H, W, 3) in [0, 1] of a preprocessed image (C, H, W), by the model's normalisation or its range."""
    how = ask(model).preprocessing(model)
    if how.mean and how.std and len(how.mean) == len(how.std):
        return unnormalised(image, how.mean, how.std)
    pixels = image.detach().float().cpu()
    return unnormalised((pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-12), (0.0,), (1.0,))


def unnormalised(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Image:
    """The picture (H, W, 3) in [0, 1] of an image (C, H, W) that was normalised by these means and deviations."""
    pixels = image.detach().float().cpu()
    # (C, 1, 1), as the image is channels first.
    means, deviations = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (mean, std))
    # A grey image was normalised by the mean over the channels.
    if len(pixels) == 1:
        means, deviations = means.mean(0, keepdim=True), deviations.mean(0, keepdim=True)
    return in_colour((pixels * deviations + means).clamp(0, 1).permute(1, 2, 0).numpy())
