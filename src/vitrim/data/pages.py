"""Pages of documents with queries, for retrieval."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch.utils.data import Dataset

from vitrim.data.dataset import DecodedImages
from vitrim.errors import DataError

if TYPE_CHECKING:
    from PIL import Image


@dataclass(eq=False, repr=False)
class PageDataset(DecodedImages, Dataset[Any]):
    """Images of pages, and for each a query that it answers. Usually made by `load_data` with ``task="retrieval"``.

    Rows with the same image are one page, and rows with the same text one query: a query may have several pages, and a
    page several queries.

    Attributes:
        queries: a text per row; None or "" for a page without one, which is only there to be passed over.
        pages: the first row of every page.
        texts: the queries.
        relevant: (queries, pages) bool.

    Raises:
        DataError: no images, another number of queries, or no query at all.

    Example:
        >>> data = PageDataset([b"a", b"b", b"a"], queries=["What is a?", None, "Why a?"])
        >>> data.pages, data.texts
        ([0, 1], ['What is a?', 'Why a?'])
        >>> data.relevant.tolist()
        [[True, False], [True, False]]
    """

    queries: Sequence[str | None] = ()
    _known = ("queries",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.queries) != len(self.images):
            raise DataError(
                f"{self.source} has {len(self.images)} pages and {len(self.queries)} queries: give each one"
            )
        if not any(self.queries):
            raise DataError(f"no page of {self.source} has a query: there is nothing to look for")
        self.num_classes = 0
        self._find()

    def part(self, indices: Sequence[int]) -> Self:
        part = super().part(indices)
        if not any(part.queries):
            raise DataError(f"no page in this part of {self.source} has a query: there is nothing to look for")
        part._find()
        return part

    def __getitem__(self, index: int) -> Image.Image:
        """Read the image of one row, of mode `mode`; `DataError` if it is unreadable."""
        return self._decoded(index)

    def _find(self) -> None:
        """Find pages and queries, and which belong together."""
        numbers: dict[bytes, int] = {}
        self.pages: list[int] = []
        page_of = []
        for row in range(len(self.images)):
            number = numbers.setdefault(_content(self.images[row], row), len(numbers))
            page_of.append(number)
            if number == len(self.pages):
                self.pages.append(row)
        self.texts: list[str] = list(dict.fromkeys(text for text in self.queries if text))
        place = {text: number for number, text in enumerate(self.texts)}
        self.relevant: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros(
            (len(self.texts), len(self.pages)), dtype=np.bool_
        )
        for page, text in zip(page_of, self.queries, strict=True):
            if text:
                self.relevant[place[text], page] = True


def _content(image: bytes | Path | None, row: int) -> bytes:
    """The identity of a page: a digest of the image file, or its path; a row without an image is a page of its own."""
    if isinstance(image, bytes):
        return hashlib.sha256(image).digest()
    return f"row {row}".encode() if image is None else str(image.resolve()).encode()
