"""Tables of images read from front to back, for tables too large to index or to download first.

Four numbers from the caller determine a pass: seed and epoch give the order, the rank selects this process's part, and
the number of images read so far is where it resumes.

    stream = stream_images("hfds/owner/name", split="train").shuffled(seed=0).part(rank, world)
    stream.transform = ...
    stream.resume(epoch=3, images=1024)   # or stream.set_epoch(epoch)
    for image, label in stream: ...

`vitrim train stream=true` reads all rows in every process by `ImageStream.encoded`, and decodes only its own: then
neither processes nor workers change which images an update sees.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vitrim.checked import checked_call
from vitrim.data.decoding import decode, place, to_tensor
from vitrim.data.paths import HUB_PREFIX, check_given, existing
from vitrim.data.tables import (
    encoded_image,
    find_image_column,
    find_label_column,
    kind_of,
    open_table,
    parquet_files,
    read_source,
    undecoded,
)
from vitrim.errors import DataError

if TYPE_CHECKING:
    from vitrim.data.decoding import Transform


@dataclass(eq=False, repr=False)
class ImageStream(IterableDataset[tuple[Tensor, int]]):
    """Images with class labels in the order of a table, decoded on access. Made by `stream_images`.

    Attributes:
        rows: a `datasets.IterableDataset`.
        image_column, label_column: its columns; labels are integers or class labels.
        length: images that all processes together read in a pass; None if unknown.
        files: names and sizes of its files, as far as they are on disk, and digests of parts of them.
        class_names, source, split, transform, mode: see `DecodedImages`.
    """

    rows: Any
    image_column: str
    label_column: str
    _: KW_ONLY
    class_names: list[str] | None
    source: str
    split: str | None
    length: int | None
    files: tuple[tuple[str, int, str], ...] = ()
    transform: Transform = to_tensor
    mode: str = "RGB"
    _epoch: int = field(default=0, init=False)
    _done: tuple[int, int] = field(default=(0, 0), init=False)

    def shuffled(self, seed: int, buffer: int = 10_000) -> ImageStream:
        """The same images in another order, which depends on seed and epoch only.

        Files of the table are shuffled, then images within a ``buffer`` of encoded ones.
        """
        return replace(self, rows=self.rows.shuffle(seed=seed, buffer_size=buffer))

    def part(self, rank: int, world: int) -> ImageStream:
        """The share of one of ``world`` processes; together they read every image once per epoch.

        Whole files, if their number is a multiple of `world`, otherwise every world-th image. Parts may differ in
        length, so let every process do as many steps as the shortest allows.

        Raises:
            ValueError: rank is not in [0, world).
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}), not {rank}")
        distributed = importlib.import_module("datasets.distributed")
        return replace(self, rows=distributed.split_dataset_by_node(self.rows, rank=rank, world_size=world))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order of a shuffled stream's next pass."""
        self._epoch = epoch
        self.rows.set_epoch(epoch)

    def resume(self, epoch: int, images: int) -> None:
        """Resume in an epoch: this process's first ``images`` images are read, but neither decoded nor yielded.

        Exact also when shuffled, unlike the state of `datasets`, which omits the buffered images. Needs a loader
        without workers, each of which would skip that many.
        """
        self._done = (epoch, images)
        self.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Iterate over the images once.

        Raises:
            DataError: an image is unreadable or a label is missing; the message names the row of this pass. Or a loader
                with workers resumes within an epoch.
        """
        epoch, images = self._done
        start = images if epoch == self._epoch else 0
        if start and get_worker_info() is not None:
            raise DataError(f"cannot go on after {start} images of {self.source} with workers: set workers=0")
        for index, row in enumerate(self.encoded(self._epoch, start), start):
            yield self.decode(row, index)

    def encoded(self, epoch: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of a pass from ``start`` on, images still encoded, for a reader that distributes the decoding."""
        self.rows.set_epoch(epoch)
        rows = islice(self.rows, start, None)
        while (row := read_source(partial(next, rows, None), self.source)) is not None:
            yield row

    def decode(self, row: dict[str, Any], index: int) -> tuple[Tensor, int]:
        """The image of a ``row`` from `encoded`, decoded and transformed, and its label; ``index`` is for messages.

        Raises:
            DataError: the image is unreadable, or its label is missing or none of the classes.
        """
        label = row[self.label_column]
        if label is None:
            raise DataError(f"row {index} of {self.source} has no label in column {self.label_column!r}")
        end = None if self.class_names is None else len(self.class_names)
        if label < 0 or (end is not None and label >= end):
            valid = "integers >= 0" if end is None else f"0 to {end - 1}, one per class name"
            raise DataError(f"the label of row {index} of {self.source} is {label}; valid: {valid}")
        file = encoded_image(row[self.image_column])
        image = decode(file, place("image", file, index, self.source))
        return self.transform(image.convert(self.mode)), int(label)

    @property
    def num_classes(self) -> int:
        """The number of class names.

        Raises:
            DataError: it has none: the largest label is known only after a whole pass.
        """
        if self.class_names is None:
            raise DataError(f"{self.source} has labels without class names: how many there are is not known in advance")
        return len(self.class_names)


@checked_call
def stream_images(
    source: str | Path,
    *,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageStream:
    """Open a table of images without reading it.

    Args:
        source: a parquet file, a folder of parquet files, or `hfds/owner/name`, a dataset of the Hugging Face Hub,
            which is not stored on disk.
        split, image_column, label_column: see `load_data`. Labels must be integers: the sorted order of texts is known
            only after a whole pass.

    Returns:
        A stream of ((C, H, W) float32 in [0, 1], int label) until its `transform` is replaced.

    Raises:
        DataError: source, split or column does not exist or is ambiguous, or the source is a folder of images.
        MissingPackageError: the package `datasets` is not installed.

    Example:
        >>> from io import BytesIO
        >>> from tempfile import TemporaryDirectory
        >>> import pyarrow, pyarrow.parquet
        >>> from PIL import Image
        >>> file = BytesIO()
        >>> Image.new("RGB", (4, 2)).save(file, "png")
        >>> table = {"image": [{"bytes": file.getvalue(), "path": "a"}] * 3, "label": [5, 6, 7]}
        >>> with TemporaryDirectory() as root:
        ...     pyarrow.parquet.write_table(pyarrow.table(table), Path(root) / "train.parquet")
        ...     stream = stream_images(root)
        ...     stream.resume(epoch=0, images=1)
        ...     [label for image, label in stream], stream.length
        ([6, 7], 3)
    """
    check_given(source, split=split, image_column=image_column, label_column=label_column)
    hub = str(source).startswith(HUB_PREFIX)
    tables = [] if hub else parquet_files(existing(source))
    if not hub and not tables:
        raise DataError(f"{source} has no parquet files: only tables and Hub datasets can be streamed")
    rows, chosen, files, length = open_table(str(source), tables, split, stream=True)
    features = rows.features
    if features is None:
        raise DataError(f"{source} does not say what its columns are: use load_images")
    image = find_image_column(features, image_column, str(source))
    label = find_label_column(features, label_column, str(source))
    if kind_of(features[label]) == "text":
        raise DataError(f"labels of {source} are texts (column {label!r}): a stream needs integers; use load_images")
    names = getattr(features[label], "names", None)
    return ImageStream(
        undecoded(rows, image, label),
        image,
        label,
        class_names=names,
        source=str(source),
        split=chosen,
        length=length,
        files=tuple((file.name, file.stat().st_size, _digest(file)) for file in files),
    )


def _digest(file: Path) -> str:
    """The digest of a parquet file; of a large one, of spread pieces and the footer, which locates every page."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= 2**24:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        opened.seek(-8, os.SEEK_END)
        opened.seek(-8 - int.from_bytes(opened.read(4), "little"), os.SEEK_END)
        digest = hashlib.sha256(opened.read())
        for place in range(0, size, size // 256):
            opened.seek(place)
            digest.update(opened.read(2**12))
    return digest.hexdigest()
