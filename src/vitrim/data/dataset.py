"""Map-style datasets of images, decoded when they are read, and their batches in order."""

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
from vitrim.errors import DataError, check_whole

if TYPE_CHECKING:
    from PIL import Image

    from vitrim.data.decoding import Transform

T = TypeVar("T")

_MODES = ("RGB", "L")


@dataclass(eq=False, repr=False)
class DecodedImages:
    """Common base of all image datasets: where their images come from, and how one is read.

    Attributes:
        images: encoded images: a sequence of paths, or of the bytes of image files.
        class_names: the name of each label, or None if they have none.
        source: where the images are from; used in messages.
        split: the split they are, or None if the source has none.
        transform: from a PIL image of mode `mode` to a tensor, by default `to_tensor`; may be replaced.
        mode: "RGB", or "L" for a transform that wants one channel; may be replaced.
        num_classes: K.

    Raises:
        DataError: no images, or an unknown mode.
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
    """The attributes that are images, encoded."""
    _known: ClassVar[Sequence[str]] = ()
    """Those that have an entry for each image: an array or a list, or None where nothing is known."""

    def __post_init__(self) -> None:
        if len(self.images) == 0:
            raise DataError(f"no images in {self.source}")
        if self.mode not in _MODES:
            raise DataError(f"unknown image mode {self.mode!r}; valid: {', '.join(_MODES)}")
        self.class_names = None if self.class_names is None else list(self.class_names)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    def read_image(self, index: int) -> Tensor:
        """Read one image through the transform, by default (C, H, W) float32 in [0, 1].

        Raises:
            DataError: the image cannot be read; the message names the row or file.
        """
        return self.transform(self._decoded(index))

    def _decoded(self, index: int) -> Image.Image:
        """The image before the transform."""
        file = self.images[index]
        return decode(file, place("image", file, index, self.source)).convert(self.mode)

    def part(self, indices: Sequence[int]) -> Self:
        """Return the dataset of some of these images, in this order: the same classes, and a transform of its own.

        Raises:
            DataError: no images.
            IndexError: no such image.

        Example:
            >>> whole = ImageDataset([b"a", b"b", b"c"], [0, 1, 2])
            >>> part = whole.part([2, 0])
            >>> part.labels.tolist(), part.images[0], part.num_classes
            ([2, 0], b'c', 3)
        """
        if len(indices) == 0:
            raise DataError(f"no images in this part of {self.source}")
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
    """Images with class labels, decoded when they are read. Usually made by `load_images`.

    Orientation tags (EXIF) are ignored and transparency is dropped, as timm and torchvision do: published accuracies
    were measured that way. 16-bit grey images are scaled to 8 bits.

    Attributes:
        labels: (len(images),) integers >= 0, kept as int64 array.
        num_classes: the number of class names if there are any, otherwise the largest label + 1.
        images, class_names, source, split, transform, mode: as of `DecodedImages`.

    Raises:
        DataError: no images, a label that is missing, negative or not an integer, fewer class names than labels need,
            or an unknown mode.

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
        wrong = (array < 0) | (array >= end)
        if wrong.any():
            row = int(np.argmax(wrong))
            valid = "integers >= 0" if names is None else f"0 to {end - 1}, one per class name"
            raise DataError(f"the label of image {row} of {self.source} is {array[row]}; valid: {valid}")
        self.labels = array.astype(np.int64)
        self.num_classes = int(self.labels.max()) + 1 if names is None else len(names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Read one image.

        Returns:
            What the transform makes of it, by default (C, H, W) float32 in [0, 1], and its label in [0, num_classes).

        Raises:
            DataError: the image cannot be read; the message names the row or file.
            IndexError: no such image.
        """
        label = int(self.labels[index])  # first: an index out of range must be an IndexError, whatever holds the images
        return self.read_image(index), label


@dataclass(eq=False, repr=False)
class MultiLabelDataset(DecodedImages, Dataset[tuple[Tensor, Tensor]]):
    """Images with any number of classes each, decoded when they are read. Usually made by `load_data`.

    Orientation tags, transparency and wide pixels are treated as by `ImageDataset`.

    Attributes:
        targets: (len(images), K): 1 where an image is of a class, otherwise 0, kept as bool array. An image may be of
            none.
        num_classes, images, class_names, source, split, transform, mode: as of `DecodedImages`.

    Raises:
        DataError: no images, targets of another shape or with other values, another number of class names, or an
            unknown mode.

    Example:
        >>> from io import BytesIO
        >>> from PIL import Image
        >>> file = BytesIO()
        >>> Image.new("RGB", (4, 2)).save(file, "png")
        >>> dataset = MultiLabelDataset([file.getvalue()], [[0, 1, 1]], class_names=["cat", "dog", "eel"])
        >>> image, target = dataset[0]
        >>> image.shape, target, dataset.num_classes
        (torch.Size([3, 2, 4]), tensor([0., 1., 1.]), 3)
    """

    targets: Any
    _known = ("targets",)

    def __post_init__(self) -> None:
        super().__post_init__()
        source, count = self.source, len(self.images)
        try:
            array = np.asarray(self.targets)
        except ValueError as error:  # rows of several lengths
            raise DataError(f"targets of {source} must be a table with one row per image: {error}") from error
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
        """Read one image, as `ImageDataset` does, and its classes: (K,) float32 of 0 and 1.

        Raises:
            DataError: the image cannot be read; the message names the row or file.
            IndexError: no such image.
        """
        target = torch.from_numpy(self.targets[index].astype(np.float32))  # first, for the same reason as in a label
        return self.read_image(index), target


def multi_hot(classes: Sequence[Sequence[int]], num_classes: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The classes of each image as a table.

    Args:
        classes: for each image its classes in [0, num_classes), in any order, also repeated.
        num_classes: K.

    Returns:
        (len(classes), K), true where an image is of a class.

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
    """Read a dataset in batches, in its own order, which is the same at every call.

    Args:
        dataset: any map-style dataset; for an `ImageDataset` the transform must give images of one size.
        batch_size: B, at least 1; the last batch may be smaller.
        limit: read at most this many items, spread evenly over the dataset (the first ones would be of few classes
            where a file is sorted by class); None for all.
        workers: processes that read, 0 for this one.

    Returns:
        An iterable, with a length, of batches; for an `ImageDataset` (B, C, H, W) float32 images and (B,) int64 labels.

    Raises:
        VitrimError: batch_size or limit is no whole number of at least 1, or workers none of at least 0.
        DataError: while iterating, an image that cannot be read.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> [x.tolist() for (x,) in batches(TensorDataset(torch.arange(10)), 2, limit=4)]
        [[0, 3], [6, 9]]
    """
    check_whole(batch_size=(batch_size, 1), limit=(limit, 1), workers=(workers, 0))
    count = len(cast(Sized, dataset))
    if limit is not None and limit < count:
        dataset = Subset(dataset, spread(count, limit).tolist())
    # a generator of its own: otherwise every pass draws a seed from the global one and changes what follows it
    generator = torch.Generator().manual_seed(0)
    return DataLoader(dataset, batch_size, shuffle=False, num_workers=workers, generator=generator)


def spread(count: int, limit: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """At most ``limit`` of ``count`` places, spread evenly and in order; all of them where ``limit`` is None.

    Example:
        >>> spread(10, 4).tolist()
        [0, 3, 6, 9]

    Raises:
        VitrimError: a limit that is no whole number of at least 1.
    """
    check_whole(limit=(limit, 1))
    if limit is None or limit >= count:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, limit).round().astype(np.int64))
