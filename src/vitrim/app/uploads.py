"""Files that strangers upload: checked before they are decoded; one line says what is wrong or was changed."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from vitrim.app.records import Limits
from vitrim.data.decoding import decode
from vitrim.errors import DataError, VitrimError, first_line

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Upload", "read_image"]

BROKEN = (OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError, struct.error)
"""Errors of Pillow's decoders on broken files; anything else is a mistake of ours, and shown as one."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Those that pages show, and TIFF; every further one would be further code that strangers' bytes reach."""
ORIENTATION = 274
"""The EXIF tag."""


@dataclass(frozen=True)
class Upload:
    """An image that was accepted.

    Attributes:
        image: RGB, upright.
        notes: a line for every change that can be seen.
    """

    image: Image.Image
    notes: tuple[str, ...] = ()


def read_image(content: bytes, limits: Limits | None = None) -> Upload:
    """Decode an uploaded image: the first frame, upright, in RGB, transparent parts on white.

    Args:
        content: of the file.
        limits: default: `Limits()`.

    Raises:
        VitrimError: the file is too large, no image, of another format than `FORMATS`, broken, or its sides are out of
            range. Nothing is decoded before its size is known.

    Example:
        >>> from PIL import Image
        >>> file = BytesIO()
        >>> Image.new("CMYK", (40, 30)).save(file, "JPEG")
        >>> read_image(file.getvalue()).notes
        ('the image is in CMYK: its colours were converted to RGB, without a colour profile',)
    """
    limits = limits or Limits()
    if len(content) > limits.megabytes * 1e6:
        raise VitrimError(f"the file has {len(content) / 1e6:.1f} MB; at most {limits.megabytes:g} MB are read")
    if not content:
        raise VitrimError("the file is empty; give an image")
    notes = tuple(_check_header(content, limits))
    try:
        image = decode(content, "the image")
    except DataError as error:
        raise VitrimError(str(error)) from error
    except BROKEN as error:
        raise VitrimError(f"cannot read the image: {first_line(error)}") from error
    return Upload(_upright(image), notes)


def _check_header(content: bytes, limits: Limits) -> Iterator[str]:
    """Refuse by the header alone; yield a note for whatever will be changed."""
    from PIL import Image, UnidentifiedImageError

    try:
        # the limit here is in megapixels, and told as an error
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            image: Any = Image.open(BytesIO(content), formats=FORMATS)
            frames = getattr(image, "n_frames", 1)
    except UnidentifiedImageError:
        raise VitrimError(f"not an image of a known format; valid: {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise VitrimError(f"the image has more than {limits.megapixels:g} megapixels; make it smaller") from None
    except BROKEN as error:
        raise VitrimError(f"cannot read the image: {first_line(error)}") from error
    with image:
        width, height = image.size
        shape = f"the image has {width} x {height} pixels"
        if width * height > limits.megapixels * 1e6:
            raise VitrimError(f"{shape}; at most {limits.megapixels:g} megapixels are read")
        if min(width, height) < limits.side:
            raise VitrimError(f"{shape}; at least {limits.side} x {limits.side} are needed to see anything")
        if max(width, height) > limits.aspect * min(width, height):
            raise VitrimError(f"{shape}; one side may be at most {limits.aspect:g} times the other: crop it")
        if frames > 1:
            yield f"the image has {frames} frames: the first one is shown"
        if image.mode == "CMYK":
            yield "the image is in CMYK: its colours were converted to RGB, without a colour profile"
        if image.mode.startswith("I;16"):
            yield "the image has 16 bits per pixel: the upper 8 are read"
        if _has_alpha(image):
            yield "transparent parts of the image stand on white"


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _upright(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it, in RGB."""
    from PIL import Image, ImageOps

    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if _has_alpha(image):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
