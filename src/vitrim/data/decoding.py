"""Decoding of images into tensors, the only place where image files are decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrim.data.paths import check_regular
from vitrim.errors import DataError, first_line

if TYPE_CHECKING:
    from PIL import Image

    Transform = Callable[[Image.Image], Tensor]

DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    RuntimeError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
)
"""Errors of PIL's formats on damaged files."""
_UNREAD = frozenset({"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"})
"""Formats that Pillow knows by name and does not decode itself; EPS is a program, which it would run."""
_LABEL_MODES = ("1", "L", "P", "I;16", "I;16L", "I;16B", "I;16N", "I")


class EncodedImages(Protocol):
    """A source of encoded images: a list of paths, or rows of a table. None is a row without an image."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes | Path | None: ...


def is_readable(name: str) -> bool:
    """True if a file of this name has the suffix of a format that Pillow decodes here.

    Example:
        >>> [is_readable(name) for name in ("a.JPEG", "a.gif", "a.jfif", "a.eps", "a.txt")]
        [True, True, True, False, False]
    """
    from PIL import Image

    form = Image.registered_extensions().get(Path(name).suffix.lower())
    # photos of several views (MPO) are opened as JPEG
    return form is not None and form not in _UNREAD and (form in Image.OPEN or form == "MPO")


def to_tensor(image: Image.Image) -> Tensor:
    """The pixels of an image, (C, H, W) float32 in [0, 1], C being 3 for RGB and 1 for L: the default transform.

    Example:
        >>> from PIL import Image
        >>> to_tensor(Image.new("RGB", (4, 2))).shape
        torch.Size([3, 2, 4])
    """
    # A grey image has no axis of channels: the reshape gives it one.
    pixels = np.array(image, dtype=np.float32) / 255
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1).contiguous()


def place(what: str, file: bytes | Path | None, index: int, source: str) -> str:
    """The name of an image or a mask in a message: its index, and its file if it has one."""
    return f"{what} {index} of {source}" + (f" ({file})" if isinstance(file, Path) else "")


def decode(file: bytes | Path | None, where: str) -> Image.Image:
    """Decode an image from its file or bytes; ``where`` names it in messages."""
    from PIL import Image

    image = _opened(file, where)
    if image.mode.startswith("I;16"):  # PIL would clip most 16-bit pixels to white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"cannot read {where}: its pixels are 32-bit numbers of unknown range (mode {image.mode})")
    return image


def decode_labels(file: bytes | Path | None, where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Decode an image without colours whose pixel values or palette indices are labels: (H, W) int64."""
    mask = _opened(file, where)
    if mask.mode not in _LABEL_MODES:
        raise DataError(f"{where} has colours (mode {mask.mode}), not labels: L or P expected")
    return np.asarray(mask).astype(np.int64)


def _opened(file: bytes | Path | None, where: str) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if file is None:
        raise DataError(f"{where} is missing")
    if isinstance(file, Path):
        check_regular(file, where)
    # whatever the file's name
    Image.init()
    formats = [name for name in Image.ID if name not in _UNREAD]
    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file, formats=formats) as image:
            image.load()
    except UnidentifiedImageError as error:  # its message shows a memory address
        raise DataError(f"cannot read {where}: not an image of a known format") from error
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read {where}: {first_line(error)}") from error
    return image
