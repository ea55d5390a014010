"""Images with a label at every pixel, or with boxes and outlines, decoded together on access."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrim.data.dataset import DecodedImages
from vitrim.data.decoding import EncodedImages, decode_labels, place, to_tensor
from vitrim.data.objects import Objects, areas, checked_boxes, clamped, decode_outline, import_pycocotools, outside
from vitrim.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IGNORED = 255
"""Label of a pixel that no loss and no metric counts."""


def plain(image: Image.Image, target: Any) -> tuple[Tensor, Any]:
    """The pixels of an image, and its target unchanged: the default transform."""
    return to_tensor(image), target


@dataclass(eq=False, repr=False)
class SegmentationDataset(DecodedImages, Dataset[tuple[Tensor, Tensor]]):
    """Images with a label at every pixel, decoded on access. Usually made by `load_data`.

    Args:
        ignore: pixel values that become `IGNORED`.
        relabel: maps pixel values to classes, or to `IGNORED`; None: values below K are classes.

    Attributes:
        masks: encoded images whose pixel values are labels, one per image.
        num_classes: K, at most 255, without ignored pixels; required without class names.
        transform: maps a PIL image and a mask (H, W) uint8 to (C, H, W) and the mask; may be replaced.
        table: (65536,) int16, the label of every pixel value, -1 for invalid values.

    Example:
        >>> data = SegmentationDataset([b"png"], [b"png"], class_names=["sky", "sea"], ignore=0, relabel={1: 0, 2: 1})
        >>> data.table[:4].tolist()
        [255, 0, 1, -1]
    """

    masks: EncodedImages
    _: KW_ONLY
    num_classes: Any = None
    ignore: InitVar[int | Sequence[int]] = IGNORED
    relabel: InitVar[Mapping[int, int] | None] = None
    transform: Any = plain
    _encoded = ("images", "masks")

    def __post_init__(self, ignore: int | Sequence[int], relabel: Mapping[int, int] | None) -> None:
        source = self.source
        self.num_classes = number_of_classes(self.class_names, self.num_classes, source)
        super().__post_init__()
        if len(self.masks) != len(self.images):
            raise DataError(f"{source} has {len(self)} images, but {len(self.masks)} masks: each image has one")
        if self.num_classes > IGNORED:
            raise DataError(
                f"{source} has {self.num_classes} classes; at most {IGNORED}: {IGNORED} is an ignored pixel"
            )
        ignored = [ignore] if isinstance(ignore, int) else ignore
        given = {value: value for value in range(self.num_classes)} if relabel is None else dict(relabel)
        # One look-up per pixel instead of a comparison per class; 16-bit masks fit into it.
        self.table = np.full(2**16, -1, dtype=np.int16)
        for value, label in (given | dict.fromkeys(ignored, IGNORED)).items():
            if not 0 <= value < len(self.table) or not (0 <= label < self.num_classes or label == IGNORED):
                raise DataError(
                    f"pixel value {value} of {source} is relabelled to {label}; valid: values 0 to "
                    f"{len(self.table) - 1}, labels 0 to {self.num_classes - 1} and {IGNORED}"
                )
            self.table[value] = label

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Read one image and its mask, by default (C, H, W) float32 in [0, 1] and (H, W) uint8 with `IGNORED`.

        `DataError` names the row or file that is unreadable, of two sizes, or has an invalid value.
        """
        from torchvision import tv_tensors

        index = range(len(self))[index]
        image = self._decoded(index)
        mask = self.read_mask(index)
        # Pillow says width and height, an array rows and columns.
        if image.size != mask.shape[::-1]:
            raise DataError(
                f"image {index} of {self.source} has {image.width} x {image.height} pixels, its "
                f"{place('mask', self.masks[index], index, self.source)} has {mask.shape[1]} x {mask.shape[0]}"
            )
        pixels, target = self.transform(image, tv_tensors.Mask(torch.from_numpy(mask)))
        return pixels, target

    def read_mask(self, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read one mask: (H, W) uint8; `DataError` if it is unreadable, or has an invalid value."""
        file = self.masks[index]
        where = place("mask", file, index, self.source)
        values = decode_labels(file, where)
        # Values outside of the table index row 0, and are refused below with those of no class.
        within = (values >= 0) & (values < len(self.table))
        labels = self.table[np.where(within, values, 0)]
        wrong = ~within | (labels < 0)
        if wrong.any():
            valid = _ranges(np.flatnonzero(self.table >= 0).tolist())
            raise DataError(f"{where} has a pixel of value {values[wrong][0]}; valid: {valid}")
        return labels.astype(np.uint8)

    def check_occurring(self) -> Self:
        """Check that masks contain two classes, reading as few of them as possible, and return the dataset.

        A mask that means its second class by 255, the ignored value, would otherwise train on nothing. An invalid value
        counts as a class: it is refused when its mask is read.
        """
        seen: set[int] = set()
        for index in range(len(self)):
            file = self.masks[index]
            values = np.unique(decode_labels(file, place("mask", file, index, self.source)))
            seen.update(self.table[values[(values >= 0) & (values < len(self.table))]].tolist())
            # Two classes in the first masks, usually: the rest need not be read.
            if len(seen - {IGNORED}) > 1 or -1 in seen:
                return self
        if IGNORED in seen and self.num_classes > 1:
            ignored = np.flatnonzero(self.table == IGNORED).tolist()
            found = "".join(f"of class {label} or " for label in seen - {IGNORED})
            raise DataError(
                f"every pixel of {self.source} is {found}ignored (value {_ranges(ignored)}), though there are "
                f"{self.num_classes} classes: where 255 means the second class, write it as 1"
            )
        return self


@dataclass(eq=False, repr=False)
class DetectionDataset(DecodedImages, Dataset[tuple[Tensor, Objects]]):
    """Images with boxes and, for instance segmentation, outlines. Usually made by `load_data`.

    Attributes:
        boxes: per image (n, 4) numbers, x1 y1 x2 y2 in pixels, stored as float32; n may be 0.
        labels: per image (n,) integers in [0, K), stored as int64.
        crowd: per image (n,) booleans, True for a box around many objects; None: none is.
        area: per image (n,) areas in square pixels, of the outline if there is one, stored as float32; None: of the
            box.
        outlines: per image n outlines for `decode_outline`; None: boxes only.
        sizes: per image (height, width); None: boxes are checked against the image when it is read.
        num_classes: K, without background; required without class names.
        transform: maps a PIL image and a dict of `boxes`, `labels`, `iscrowd`, `area` and, with outlines, `masks` (n,
            H, W) uint8 to (C, H, W) and the dict; may be replaced.

    Raises:
        DataError: a box without area, beyond its image, or not of 4 finite numbers; a label out of range; lists of
            several lengths.
        MissingPackageError: there are outlines and `pycocotools` is not installed.

    Example:
        >>> data = DetectionDataset([b"png"], [[[1, 1, 4, 3]]], [[1]], num_classes=2)
        >>> data.boxes[0].tolist(), data.labels[0].tolist(), data.area[0].tolist()
        ([[1.0, 1.0, 4.0, 3.0]], [1], [6.0])
    """

    boxes: Any
    labels: Any
    _: KW_ONLY
    crowd: Any = None
    area: Any = None
    outlines: Any = None
    sizes: Any = None
    num_classes: Any = None
    transform: Any = plain
    _known = ("boxes", "labels", "crowd", "area", "outlines", "sizes")

    def __post_init__(self) -> None:
        source = self.source
        self.num_classes = number_of_classes(self.class_names, self.num_classes, source)
        super().__post_init__()
        if self.outlines is not None:
            import_pycocotools()
        for name in self._known:
            given = getattr(self, name)
            if given is not None and len(given) != len(self):
                raise DataError(f"{source} has {len(self)} images, but {name} of {len(given)}")
        self.boxes = [checked_boxes(each, f"image {row} of {source}") for row, each in enumerate(self.boxes)]
        self.labels = [np.asarray(each).reshape(-1) for each in self.labels]
        self.sizes = None if self.sizes is None else [(int(height), int(width)) for height, width in self.sizes]
        self.outlines = None if self.outlines is None else list(self.outlines)
        # A training that runs for hours must not end at a bad box.
        for row in range(len(self)):  # everything known about every image, before one is read
            self._check_objects(row)
        self.labels = [each.astype(np.int64) for each in self.labels]
        crowd = [np.zeros(len(box)) for box in self.boxes] if self.crowd is None else self.crowd
        self.crowd = [np.asarray(each, dtype=np.bool_).reshape(-1) for each in crowd]
        area = map(areas, self.boxes) if self.area is None else self.area
        self.area = [np.asarray(each, dtype=np.float32).reshape(-1) for each in area]

    def _check_objects(self, row: int) -> None:
        """Refuse the objects of an image: lists of several lengths, labels that are no classes, impossible boxes."""
        box, label, where = self.boxes[row], self.labels[row], f"image {row} of {self.source}"
        for name in ("labels", "crowd", "area", "outlines"):
            given = getattr(self, name)
            if given is not None and len(given[row]) != len(box):
                raise DataError(f"{where} has {len(box)} boxes, but {name} of {len(given[row])}")
        if label.size and label.dtype.kind not in "iu":
            raise DataError(f"labels of {where} are not integers but {label.dtype}")
        finite = np.isfinite(box).all(axis=1)
        if not finite.all():
            self._refuse(row, int(finite.argmin()), "expected finite numbers")
        # Corners in another order, or a width as x2, would train and score silently wrong.
        empty = (box[:, 2] <= box[:, 0]) | (box[:, 3] <= box[:, 1])
        if empty.any():
            self._refuse(row, int(empty.argmax()), "it has no area; expected x1 < x2 and y1 < y2")
        wrong = (label < 0) | (label >= self.num_classes)
        if wrong.any():
            number, valid = int(wrong.argmax()), f"0 to {self.num_classes - 1}"
            raise DataError(f"box {number} of {where} has label {label[number]}; valid: {valid}")
        if self.sizes is not None:
            self._check_within(row, self.sizes[row])

    def __getitem__(self, index: int) -> tuple[Tensor, Objects]:
        """Read one image and its objects, by default (C, H, W) float32 in [0, 1] and a dict as in `transform`.

        `DataError` names the row or file that is unreadable, of another size, or has a box or an outline that does not
        fit.
        """
        from torchvision import tv_tensors

        index = range(len(self))[index]
        image = self._decoded(index)
        size = (image.height, image.width)
        if self.sizes is None:
            self._check_within(index, size)
        elif self.sizes[index] != size:
            raise DataError(
                f"{place('image', self.images[index], index, self.source)} has {size[1]} x {size[0]} pixels, its boxes "
                f"are of one of {self.sizes[index][1]} x {self.sizes[index][0]}"
            )
        # Boxes may reach beyond by `SLACK`: they are cut off here, when the size is known for certain.
        boxes = torch.from_numpy(clamped(self.boxes[index], size))
        target: Objects = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.from_numpy(self.labels[index].copy()),
            "iscrowd": torch.from_numpy(self.crowd[index].astype(np.int64)),
            "area": torch.from_numpy(self.area[index].copy()),
        }
        if self.outlines is not None:
            masks = np.zeros((len(boxes), *size), dtype=np.uint8)
            for box, outline in enumerate(self.outlines[index]):
                where = f"the outline of box {box} of image {index} of {self.source}"
                masks[box] = decode_outline(outline, size, where)
            target["masks"] = tv_tensors.Mask(torch.from_numpy(masks))
        pixels, changed = self.transform(image, target)
        return pixels, changed

    def _check_within(self, row: int, size: tuple[int, int]) -> None:
        beyond, gone = outside(self.boxes[row], size)
        wrong = beyond | gone
        if wrong.any():
            height, width = size
            self._refuse(row, int(wrong.argmax()), f"it reaches beyond the image of {width} x {height} pixels")

    def _refuse(self, row: int, box: int, problem: str) -> NoReturn:
        corners = ", ".join(f"{number:g}" for number in self.boxes[row][box])
        raise DataError(f"box {box} of image {row} of {self.source} is x1, y1, x2, y2 = {corners}: {problem}")


def number_of_classes(class_names: Sequence[str] | None, num_classes: int | None, source: str) -> int:
    """The number of classes, as given or from their names."""
    if class_names is None and num_classes is None:
        raise DataError(
            f"{source} does not say how many classes it has: give num_classes=K or class_names=[...] as an option of "
            "the data"
        )
    count = len(class_names or ()) if num_classes is None else num_classes
    if count < 1 or (class_names is not None and len(class_names) != count):
        names = "" if class_names is None else f" and {len(class_names)} class names"
        raise DataError(f"{source} is given num_classes={num_classes}{names}; expected at least one, and as many names")
    return count


def paired(images: Mapping[str, Any], masks: Mapping[str, Any], source: str, **options: Any) -> SegmentationDataset:
    """The dataset of images and masks with equal names, in order of name. ``options`` are of `SegmentationDataset`."""
    # Both ways: an image without a mask, and a mask without an image.
    for names, others, what in ((images, masks, ("image", "mask")), (masks, images, ("mask", "image"))):
        alone = sorted(set(names) - set(others))
        if alone:
            raise DataError(f"{what[0]} {names[alone[0]]} of {source} has no {what[1]} ({len(alone)} have none)")
    stems = sorted(images)
    own, labels = ([each[stem] for stem in stems] for each in (images, masks))
    return SegmentationDataset(own, labels, source=source, **options)


def _ranges(values: Iterable[int]) -> str:
    """Ascending numbers as runs: "0 to 10, 255"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in runs)
