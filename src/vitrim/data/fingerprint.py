"""Fingerprint of a dataset: a short text that differs for different datasets, wherever they lie.

It covers order, labels, class names, names and sizes of all images, and the contents of a few hundred of them; for
images in memory or in a small table, all contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from vitrim.data.dataset import spread
from vitrim.data.dense import DetectionDataset, SegmentationDataset
from vitrim.data.paths import check_regular
from vitrim.data.streaming import ImageStream
from vitrim.data.tables import Rows
from vitrim.errors import DataError

SAMPLED = 256
"""Images, spread evenly, whose contents are read if reading all would take too long."""
MOST_BYTES = 2**30
"""Bytes up to which tables are read whole."""
NAMES = 2
"""Path parts that count, folder and file: a dataset may be moved."""


def fingerprint(data: Any) -> str:
    """The fingerprint of a dataset: 64 hexadecimal digits.

    Of a dataset with neither ``images`` nor ``labels``, ``targets`` or ``tensors``, only the length counts.

    Example:
        >>> from vitrim.data import ImageDataset
        >>> one, other = (ImageDataset([image, b"b"], [0, 1]) for image in (b"a", b"c"))
        >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
        (True, False)
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(data):
            # The length first: otherwise "ab", "c" and "a", "bc" would have one digest.
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def _parts(data: Any) -> Iterator[bytes]:
    names = getattr(data, "class_names", None)
    yield repr(None if names is None else list(names)).encode()
    if isinstance(data, ImageStream):
        yield repr((data.split, data.length, *data.files)).encode()
        return
    yield str(len(data)).encode()
    if isinstance(data, DetectionDataset):
        # the number of boxes per image, and everything about every box
        yield np.array([len(boxes) for boxes in data.boxes], dtype=np.int64).tobytes()
        for name in ("boxes", "labels", "crowd", "area"):
            yield np.concatenate(getattr(data, name)).tobytes()
        for outlines in data.outlines or ():
            yield from outlines
    else:
        for name in ("labels", "targets"):
            values = getattr(data, name, None)
            if values is not None:
                yield np.ascontiguousarray(values).tobytes()
    for tensor in getattr(data, "tensors", ()):  # torch's TensorDataset
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(data, SegmentationDataset):
        yield data.table.tobytes()
        yield from _images(data.masks)
    images = getattr(data, "images", None)
    if images is not None:
        yield from _images(images)


def _images(images: Any) -> Iterator[bytes]:
    if isinstance(images, Subset):
        yield np.asarray(images.indices, dtype=np.int64).tobytes()
        yield from _images(images.dataset)
    elif isinstance(images, Rows):
        sizes = images.sizes()
        yield sizes.tobytes()
        # A small table is read whole; of a large one all sizes and some images are.
        if int(sizes.sum()) <= MOST_BYTES:
            yield from images.contents()
        else:
            yield from (_content(images[place]) for place in spread(len(images), SAMPLED).tolist())
    else:  # names and sizes of files, contents of some of them, and of all images in memory
        for place in range(len(images)):
            image = images[place]
            if isinstance(image, Path):
                check_regular(image, str(image))
                yield f"{'/'.join(image.parts[-NAMES:])} {image.stat().st_size}".encode()
            else:
                yield _content(image)
        yield from (_content(images[place]) for place in spread(len(images), SAMPLED).tolist())


def _content(image: bytes | Path | None) -> bytes:
    if not isinstance(image, Path):
        return image or b""
    check_regular(image, str(image))
    return image.read_bytes()
