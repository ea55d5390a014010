"""Map-style datasets of images, decoded on access, and batches in order."""

from __future__ import annotations

import copy
from collections.abc import Sequence, Sized
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from vitrim.data.decoding import EncodedImages, decode, place, to_tensor
from vitrim.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

    from vitrim.data.decoding import Transform

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class DecodedImages:
    """Base class of all image datasets.

    Attributes:
        images: encoded images: paths, or the bytes of image files.
        class_names: the name of each label; None without names.
        source, split: where the images are from, for messages; the split is None if the source has none.
        transform: maps a PIL image of mode `mode` to a tensor; may be replaced.
        mode: "RGB", or "L" for a transform that needs one channel; may be replaced.
        num_classes: K.
    """

    images: EncodedImages
    _: KW_ONLY
    class_names: Sequence[str] | None = None
    source: str = "memory"
    split: str | None = None
    transform: Transform = to_tensor
    mode: str = "RGB"
    num_classes: int = field(init=False)
    _encoded: ClassVar[Sequence[str]] = ("images",)
    """Attributes with encoded images."""
    _known: ClassVar[Sequence[str]] = ()
    """Attributes with an entry per image, an array or list; None if unknown."""

    def __post_init__(self) -> None:
        if len(self.images) == 0:
            raise DataError(f"no images in {self.source}")
        self.class_names = None if self.class_names is None else list(self.class_names)

    def __len__(self) -> int:
        return len(self.images)

    def read_image(self, index: int) -> Tensor:
        """Read one image through the transform, by default (C, H, W) float32 in [0, 1]; `DataError` if it is
        unreadable.
        """
        return self.transform(self._decoded(index))

    def _decoded(self, index: int) -> Image.Image:
        file = self.images[index]
        return decode(file, place("image", file, index, self.source)).convert(self.mode)

    def part(self, indices: Sequence[int]) -> Self:
        """The dataset of the images at ``indices``, in this order: with the same classes, and its own transform.

        Example:
            >>> part = ImageDataset([b"a", b"b", b"c"], [0, 1, 2]).part([2, 0])
            >>> part.labels.tolist(), part.images[0], part.num_classes
            ([2, 0], b'c', 3)
        """
        if len(indices) == 0:
            raise DataError(f"no images in this part of {self.source}")
        # A copy, not a new dataset: labels are checked, and the class counts those of the whole.
        part = copy.copy(self)
        for name in self._encoded:
            setattr(part, name, Subset(getattr(self, name), list(indices)))
        for name in self._known:
            known = getattr(self, name)
            if isinstance(known, np.ndarray):
                setattr(part, name, known[list(indices)])
            elif known is not None:
                setattr(part, name, [known[index] for index in indices])
        return part


@dataclass(eq=False, repr=False)
class ImageDataset(DecodedImages, Dataset[tuple[Tensor, int]]):
    """Images with class labels, decoded on access. Usually made by `load_images`.

    Orientation tags (EXIF) are ignored and transparency is dropped, as in timm and torchvision, with which published
    accuracies were measured. 16-bit grey images are scaled to 8 bits.

    Attributes:
        labels: (len(images),) integers >= 0, stored as int64.
        num_classes: the number of class names, else the largest label + 1.

    Raises:
        DataError: no images, or a label that is negative, not an integer or without a class name.

    Example:
        >>> from io import BytesIO
        >>> from PIL import Image
        >>> file = BytesIO()
        >>> Image.new("RGB", (4, 2)).save(file, "png")
        >>> dataset = ImageDataset([file.getvalue()], [0], class_names=["black"])
        >>> image, label = dataset[0]
        >>> image.shape, dataset.class_names[label], dataset.num_classes
        (torch.Size([3, 2, 4]), 'black', 1)
    """

    labels: Any
    _known = ("labels",)

    def __post_init__(self) -> None:
        super().__post_init__()
        array, count, names = np.asarray(self.labels), len(self.images), self.class_names
        if array.shape != (count,) or array.dtype.kind not in "iu":
            raise DataError(
                f"labels of {self.source} must be {count} integers, not {array.dtype} of shape {array.shape}"
            )
        end = np.iinfo(np.int64).max if names is None else len(names)
        # A label without a name, or below zero, would index another class from the end.
        wrong = (array < 0) | (array >= end)
        if wrong.any():
            row = int(np.argmax(wrong))
            valid = "integers >= 0" if names is None else f"0 to {end - 1}, one per class name"
            raise DataError(f"the label of image {row} of {self.source} is {array[row]}; valid: {valid}")
        self.labels = array.astype(np.int64)
        self.num_classes = int(self.labels.max()) + 1 if names is None else len(names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Read one image and its label in [0, num_classes). Errors as of `read_image`."""
        label = int(self.labels[index])  # first: an index out of range must raise IndexError
        return self.read_image(index), label


@dataclass(eq=False, repr=False)
class MultiLabelDataset(DecodedImages, Dataset[tuple[Tensor, Tensor]]):
    """Images with any number of classes each, decoded on access. Usually made by `load_data`.

    Orientation tags, transparency and wide pixels as in `ImageDataset`.

    Attributes:
        targets: (len(images), K), 1 for the classes of an image, possibly none, and 0 for others; stored as bool.

    Raises:
        DataError: no images, targets of another shape or with other values, or another number of names.

    Example:
        >>> data = MultiLabelDataset([b"png"], [[0, 1, 1]], class_names=["cat", "dog", "eel"])
        >>> data.targets.tolist(), data.num_classes
        ([[False, True, True]], 3)
    """

    targets: Any
    _known = ("targets",)

    def __post_init__(self) -> None:
        super().__post_init__()
        source, count = self.source, len(self.images)
        array = np.asarray(self.targets)
        if array.ndim != 2 or len(array) != count or array.shape[1] == 0 or array.dtype.kind not in "biu":
            raise DataError(
                f"targets of {source} must be {count} rows of 0 and 1, one per class, not {array.dtype} of shape "
                f"{array.shape}"
            )
        wrong = (array != 0) & (array != 1)
        if wrong.any():
            row, column = (int(place) for place in np.argwhere(wrong)[0])
            raise DataError(f"target {column} of image {row} of {source} is {array[row, column]}; valid: 0 and 1")
        self.num_classes = array.shape[1]
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise DataError(
                f"targets of {source} are of {self.num_classes} classes, but there are {len(self.class_names)} names"
            )
        self.targets = array.astype(np.bool_)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Read one image and its classes: (K,) float32 of 0 and 1. Errors as of `read_image`."""
        target = torch.from_numpy(self.targets[index].astype(np.float32))
        return self.read_image(index), target


def multi_hot(classes: Sequence[Sequence[int]], num_classes: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(len(classes), K) bool, True for the ``classes`` of each image, which may be in any order and repeated.

    Example:
        >>> multi_hot([[2, 0, 2], []], 3).astype(int).tolist()
        [[1, 0, 1], [0, 0, 0]]
    """
    table = np.zeros((len(classes), num_classes), dtype=np.bool_)
    for row, members in zip(table, classes, strict=True):
        row[list(members)] = True
    return table


def batches(
    dataset: Dataset[T],
    batch_size: int,
    *,
    limit: int | None = None,
    workers: int = 0,
) -> DataLoader[T]:
    """Read a dataset in batches, in its own order, the same at every call.

    Args:
        batch_size: B, at least 1; the last batch may be smaller.
        limit: at most this many items, spread evenly over the dataset, because a file may be sorted by class; None for
            all.
        workers: processes that read, 0 for this one.

    Returns:
        An iterable of batches with a length; for an `ImageDataset` (B, C, H, W) float32 images and (B,) int64 labels.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> [x.tolist() for (x,) in batches(TensorDataset(torch.arange(10)), 2, limit=4)]
        [[0, 3], [6, 9]]
    """
    count = len(cast(Sized, dataset))
    if limit is not None and limit < count:
        dataset = Subset(dataset, spread(count, limit).tolist())
    # its own generator: otherwise every pass would draw a seed from the global one
    generator = torch.Generator().manual_seed(0)
    return DataLoader(dataset, batch_size, shuffle=False, num_workers=workers, generator=generator)


CALIBRATED = 64
"""Images to calibrate int8 on."""


def calibrating(
    places: np.ndarray[Any, np.dtype[np.int64]], most: int = CALIBRATED
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """At most ``most`` of the ``places`` of images to calibrate int8 on, spread evenly: a file may be sorted."""
    chosen: np.ndarray[Any, np.dtype[np.int64]] = places[spread(len(places), most)]
    return chosen


def spread(count: int, limit: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """At most ``limit`` of ``count`` indices, spread evenly and in order; all if ``limit`` is None.

    Example:
        >>> spread(10, 4).tolist()
        [0, 3, 6, 9]"""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, limit).round().astype(np.int64))
