"""Augmentation of training images, and their order.

All randomness follows from the recipe's seed and a place in the run, not from earlier draws: the order from (seed,
epoch), the augmentation of an image from (seed, epoch, position in the epoch). So a run sees the same images after it
is resumed, and with any number of processes and workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_interp_mode, str_to_pil_interp
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from vitrim.data.streaming import ImageStream
from vitrim.data.transforms import Geometry
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from PIL import Image

    from vitrim.training.recipe import Augment

REPEATED_ROUND = 256
"""Repeated augmentation cuts an epoch to a multiple of this number of images, as in DeiT."""


class TrainTransform:
    """Transform of a PIL image of any mode to (C, H, W) float32: random augmentation, then normalisation.

    Example:
        >>> from PIL import Image
        >>> from vitrim.training.recipe import Augment
        >>> transform = TrainTransform(Geometry((32, 32), (0.5,) * 3, (0.5,) * 3), Augment(crop="padded"))
        >>> transform(Image.new("L", (40, 30))).shape
        torch.Size([3, 32, 32])
    """

    def __init__(self, geometry: Geometry, augment: Augment) -> None:
        self.mode = "L" if geometry.channels == 1 else "RGB"
        steps: list[Any] = []
        if augment.crop == "resized":
            area = (augment.scale, augment.ratio)
            steps.append(RandomResizedCropAndInterpolation(geometry.size, *area, augment.interpolation))
        else:
            how = "bicubic" if augment.interpolation == "random" else augment.interpolation
            steps.append(transforms.Resize(geometry.size, str_to_interp_mode(how)))
        if augment.crop == "padded" and augment.padding:
            height, width = geometry.size
            most = min(height, width) - 1
            if augment.padding > most:
                raise VitrimError(
                    f"augment.padding={augment.padding} is a reflection of the image, which has {height} x {width} "
                    f"pixels: at most {most}"
                )
            steps.append(transforms.RandomCrop(geometry.size, padding=augment.padding, padding_mode="reflect"))
        if augment.hflip:
            steps.append(transforms.RandomHorizontalFlip(augment.hflip))
        if augment.cutout:
            steps.append(Cutout(augment.cutout))
        if augment.auto is not None:
            steps.append(_policy(augment, geometry))
        elif augment.color_jitter:
            steps.append(transforms.ColorJitter(*(augment.color_jitter,) * 3))
        steps += [transforms.ToTensor(), transforms.Normalize(geometry.mean, geometry.std)]
        if augment.erase:
            steps.append(RandomErasing(augment.erase, mode="pixel", max_count=1, num_splits=0, device="cpu"))
        self.transform = transforms.Compose(steps)

    def __call__(self, image: Image.Image) -> Tensor:
        """Augment an image; (C, H, W) float32."""
        return cast(Tensor, self.transform(image.convert(self.mode)))


def _policy(augment: Augment, geometry: Geometry) -> Any:
    """timm's policy ``augment.auto``, with the options of timm's own training script.

    Posterising keeps at least one bit: timm's largest magnitude keeps none, which Pillow 13 refuses, and
    `rand-m9-mstd0.5-inc1` draws it for one image in three hundred.
    """
    name = str(augment.auto)
    hparams: dict[str, Any] = {
        "translate_const": int(min(geometry.size) * 0.45),
        "img_mean": tuple(round(255 * mean) for mean in geometry.mean),
    }
    if augment.interpolation != "random":
        hparams["interpolation"] = str_to_pil_interp(augment.interpolation)
    try:
        if name.startswith("augmix"):
            policy: Any = augment_and_mix_transform(name, {**hparams, "translate_pct": 0.3})
        elif name.startswith("rand"):
            policy = rand_augment_transform(name, hparams)
        else:
            policy = auto_augment_transform(name, hparams)
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise VitrimError(
            f"augment.auto={name} is no policy of timm ({error}); valid: e.g. rand-m9-mstd0.5-inc1, augmix-m3-w3, "
            "original, v0, 3a"
        ) from None
    for op in (op for group in getattr(policy, "policy", None) or [policy.ops] for op in group):
        if op.name.startswith("Posterize"):
            op.level_fn = partial(_at_least_one_bit, op.level_fn)
    return policy


def _at_least_one_bit(level_fn: Callable[..., tuple[int]], level: float, hparams: dict[str, Any]) -> tuple[int]:
    return (max(level_fn(level, hparams)[0], 1),)


@dataclass(frozen=True)
class Cutout:
    """Fill a random rectangle of half the height and half the width of an image with one random colour.

    As in the code of "Asymmetric Loss", with which the comparative study trains COCO and NUS-WIDE; the rectangle is
    clipped to the image. ``probability`` is in [0, 1].
    """

    probability: float

    def __call__(self, image: Image.Image) -> Image.Image:
        """The image, or a copy with a rectangle."""
        if random.random() >= self.probability:
            return image
        width, height = image.size
        half_width, half_height = width // 2, height // 2
        centre_x, centre_y = random.randrange(width), random.randrange(height)
        left, top = centre_x - half_width // 2, centre_y - half_height // 2
        box = (max(left, 0), max(top, 0), min(left + half_width, width), min(top + half_height, height))
        filled = image.copy()
        colour = tuple(random.randrange(256) for _ in image.getbands())
        filled.paste(colour if len(colour) > 1 else colour[0], box)
        return filled


# ---- order -----------------------------------------------------------------------------------------------------------


def epoch_order(count: int, epoch: int, *, seed: int = 0, repeats: int = 1, shuffle: bool = True) -> list[int]:
    """The indices of one epoch's images, in order.

    With ``repeats``, each image comes that many times in a row, for DeiT's repeated augmentation: neighbours go to
    different processes, and the epoch is cut to ``count`` rounded down to a multiple of 256 (from 256 images on).
    Without ``shuffle`` every epoch has the order of the dataset; with ``repeats``, its last images then never come.
    """
    # A prime above usual numbers of epochs: the next seed does not repeat this one's orders.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
    if repeats == 1:
        return order.tolist()
    length = epoch_length(count, repeats)
    # Rounded up: as many images as the cut epoch shows, each of them `repeats` times.
    seen = order[: -(-length // repeats)]  # the rest would be cut off
    return seen.repeat_interleave(min(repeats, length))[:length].tolist()


def epoch_length(count: int, repeats: int = 1) -> int:
    """The number of images in an epoch, without the remainder that repeated augmentation cuts off.

    Example:
        >>> epoch_length(1000), epoch_length(1000, repeats=3)
        (1000, 768)
    """
    if repeats == 1 or count < REPEATED_ROUND:
        return count
    return count // REPEATED_ROUND * REPEATED_ROUND


class ImagePlace(NamedTuple):
    """An image, or encoded row of a stream, and its position in the run."""

    image: Any
    epoch: int
    position: int


class TrainOrder:
    """The batches of one process, from any update on: an iterable of lists of `ImagePlace`, for a loader.

    One update takes ``batch_size`` images of the epoch's order, of which process ``rank`` takes every
    ``world_size``-th. An incomplete batch at the end of an epoch is dropped.

    Args:
        images: maps an epoch and a position in it to an iterator over its images from there on; None for `epoch_order`.
        batch_size: images of an update, over all processes.
        micro_batch: images at once in this process; divides ``batch_size / world_size``.
        start, stop: first update, and one beyond the last.

    Raises:
        VitrimError: fewer images than an update takes, or a batch that cannot be divided evenly.

    Example:
        >>> [[place.position for place in batch] for batch in TrainOrder(5, batch_size=2, start=0, stop=3)]
        [[0, 1], [2, 3], [0, 1]]
    """

    def __init__(
        self,
        count: int,
        images: Callable[[int, int], Iterator[Any]] | None = None,
        *,
        batch_size: int,
        start: int,
        stop: int,
        micro_batch: int | None = None,
        seed: int = 0,
        repeats: int = 1,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.updates_per_epoch = updates_per_epoch(count, batch_size, repeats)
        if batch_size % world_size:
            raise VitrimError(f"a batch of {batch_size} cannot be shared evenly by {world_size} processes")
        share = batch_size // world_size
        self.micro_batch = share if micro_batch is None else micro_batch
        if share % self.micro_batch:
            raise VitrimError(
                f"a process takes {share} of {batch_size} images of an update: micro_batch must divide it, not be "
                f"{self.micro_batch}"
            )
        self.images = images or (
            lambda epoch, first: iter(epoch_order(count, epoch, seed=seed, repeats=repeats, shuffle=shuffle)[first:])
        )
        self.batch_size, self.start, self.stop = batch_size, start, stop
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return (self.stop - self.start) * (self.batch_size // self.world_size // self.micro_batch)

    def __iter__(self) -> Iterator[list[ImagePlace]]:
        """Yield micro-batches, in order; `VitrimError` if a stream is shorter than its metadata say."""
        epoch = -1
        images: Iterator[Any] = iter(())
        for update in range(self.start, self.stop):
            # A resumed run enters an epoch in its middle: `first` images of it are behind.
            first = update % self.updates_per_epoch * self.batch_size
            if update // self.updates_per_epoch != epoch:
                epoch = update // self.updates_per_epoch
                images = self.images(epoch, first)
            batch = [ImagePlace(image, epoch, first + i) for i, image in enumerate(islice(images, self.batch_size))]
            if len(batch) < self.batch_size:
                raise VitrimError(f"epoch {epoch} of the training data ended after {first + len(batch)} images")
            # Every process walks the whole batch and keeps its own: neighbours, such as repeats, go to different ones.
            mine = batch[self.rank :: self.world_size]
            for begin in range(0, len(mine), self.micro_batch):
                yield mine[begin : begin + self.micro_batch]


def updates_per_epoch(count: int, batch_size: int, repeats: int = 1) -> int:
    """The number of complete batches in an epoch; `VitrimError` if there is none."""
    images = epoch_length(count, repeats)
    if images < batch_size:
        raise VitrimError(f"an epoch has {images} images, fewer than the {batch_size} of one update: lower batch_size")
    return images // batch_size


@dataclass(frozen=True, eq=False)
class Seeded(Dataset[Any]):
    """A dataset whose random augmentation depends only on the position in the run.

    It is map-style, or a stream, for which an `ImagePlace` holds a row; its transform may draw from the global
    generators of `random`, numpy and torch.
    """

    dataset: Dataset[Any]
    seed: int

    def __getitem__(self, place: ImagePlace) -> Any:
        """The image at ``place``, with the augmentation of that place."""
        seed_cpu(self.seed, 0, place.epoch, place.position)
        if isinstance(self.dataset, ImageStream):
            return self.dataset.decode(place.image, place.position)
        return self.dataset[place.image]


# ---- seeds -----------------------------------------------------------------------------------------------------------


def seed_all(*numbers: int) -> None:
    """Seed the global generators of `random`, numpy and torch, on all devices, from ``numbers``."""
    torch.manual_seed(seed_cpu(*numbers))


def seed_cpu(*numbers: int) -> int:
    """Seed the global CPU generators from ``numbers``, by numpy's hash; return torch's seed.

    Fast enough for every image, unlike `torch.manual_seed`, which queues a call for every device.
    """
    first, second = (int(word) for word in np.random.SeedSequence(numbers).generate_state(2))
    random.seed(first)
    np.random.seed(second)
    # Two words of 32 bits as one seed of 63.
    seed = (first << 31) ^ second
    torch.default_generator.manual_seed(seed)
    return seed
