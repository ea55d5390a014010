"""Tables of images read from front to back, for tables too large to index or to download first.

Seed and epoch give the order of a pass, the rank this process's part, and the number of images read so far its start.
`vitrim train stream=true` reads all rows in every process by `ImageStream.encoded` and decodes only its own: then
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
        length: images that all processes together read in a pass; None if unknown.
        files: names, sizes and digests of its files, as far as they are on disk.
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
        """The same images in another order, by seed and epoch: files are shuffled, then images in a ``buffer`` of
        encoded ones.
        """
        return replace(self, rows=self.rows.shuffle(seed=seed, buffer_size=buffer))

    def part(self, rank: int, world: int) -> ImageStream:
        """The share of one of ``world`` processes; together they read every image once per epoch.

        Whole files, if their number is a multiple of `world`, otherwise every world-th image. Parts may differ in
        length, so let every process do as many steps as the shortest allows.
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
        """Iterate over the images once; `DataError` names the row of this pass."""
        epoch, images = self._done
        start = images if epoch == self._epoch else 0
        if start and get_worker_info() is not None:
            raise DataError(f"cannot go on after {start} images of {self.source} with workers: set workers=0")
        for index, row in enumerate(self.encoded(self._epoch, start), start):
            yield self.decode(row, index)

    def encoded(self, epoch: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of a pass from ``start`` on, images still encoded, for a reader that distributes the decoding."""
        self.rows.set_epoch(epoch)
        # Rows before the start are read, not decoded: the buffer of a shuffle must see them.
        rows = islice(self.rows, start, None)
        while (row := read_source(partial(next, rows, None), self.source)) is not None:
            yield row

    def decode(self, row: dict[str, Any], index: int) -> tuple[Tensor, int]:
        """The image of a ``row`` from `encoded`, decoded and transformed, and its label; ``index`` is for messages."""
        label = row[self.label_column]
        end = None if self.class_names is None else len(self.class_names)
        if label is None or label < 0 or (end is not None and label >= end):
            valid = "integers >= 0" if end is None else f"0 to {end - 1}, one per class name"
            raise DataError(f"the label of row {index} of {self.source} is {label}; valid: {valid}")
        file = encoded_image(row[self.image_column])
        image = decode(file, place("image", file, index, self.source))
        return self.transform(image.convert(self.mode)), int(label)

    @property
    def num_classes(self) -> int:
        """The number of class names; `DataError` without them: the largest label is known only after a whole pass."""
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
        source: a parquet file, a folder of them, or `hfds/owner/name`, a dataset of the Hugging Face Hub, which is not
            stored.
        split, image_column, label_column: as of `load_data`; labels must be integers: the order of texts is known too
            late.

    Returns:
        A stream of ((C, H, W) float32 in [0, 1], int label) until its `transform` is replaced.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import pyarrow, pyarrow.parquet
        >>> table = {"image": [{"bytes": b"png", "path": "a"}] * 3, "label": [5, 6, 7]}
        >>> with TemporaryDirectory() as root:
        ...     pyarrow.parquet.write_table(pyarrow.table(table), Path(root) / "train.parquet")
        ...     stream_images(root).length
        3
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
        # A parquet file ends with its footer, the footer's length in four bytes, and the sign "PAR1".
        opened.seek(-8, os.SEEK_END)
        opened.seek(-8 - int.from_bytes(opened.read(4), "little"), os.SEEK_END)
        digest = hashlib.sha256(opened.read())
        for place in range(0, size, size // 256):
            opened.seek(place)
            digest.update(opened.read(2**12))
    return digest.hexdigest()
