"""Uploads: huge, tiny, animated, CMYK, 16 bits, transparent, turned, broken, no image: one clear line each."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from app_files import encoded
from vitrim.app.messages import Limits
from vitrim.app.uploads import read_image
from vitrim.errors import VitrimError

NOISE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def header_only(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return start + struct.pack(">I", 100) + b"IDAT" + bytes(100)


def frames() -> bytes:
    first, second = Image.new("RGB", (20, 20), "red"), Image.new("RGB", (20, 20), "blue")
    return encoded(first, "GIF", save_all=True, append_images=[second])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"%PDF-1.7 no image", "not an image of a known format; valid: PNG, JPEG, WEBP, GIF, BMP, TIFF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image of a known format"),
        (encoded(Image.fromarray(NOISE))[:300], "cannot read the image"),
        (encoded(Image.fromarray(NOISE), "JPEG")[:700], "cannot read the image"),
        (header_only(8000, 6000), "the image has 8000 x 6000 pixels; at most 40 megapixels are read"),
        (header_only(40_000, 40_000), "the image has more than 40 megapixels"),
        (encoded(Image.new("RGB", (7, 300))), "the image has 7 x 300 pixels; at least 8 x 8"),
        (encoded(Image.new("RGB", (1, 1))), "the image has 1 x 1 pixels; at least 8 x 8"),
        (encoded(Image.new("RGB", (8, 200))), "one side may be at most 20 times the other"),
        (b"\0" * 5_000_001, "the file has 5.0 MB; at most 5 MB are read"),
        (encoded(Image.new("F", (20, 20)), "TIFF"), "its pixels are 32-bit numbers of unknown range"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_refused(content: bytes, message: str) -> None:
    with pytest.raises(VitrimError) as error:
        read_image(content)
    assert message in str(error.value)
    assert "0x" not in str(error.value), "an address in memory says nothing to anybody"


def test_nothing_is_decoded_before_its_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("pixels were decoded"))
    with pytest.raises(VitrimError, match="megapixels"):
        read_image(header_only(8000, 6000))


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (frames(), "the image has 2 frames: the first one is shown"),
        (encoded(Image.new("CMYK", (20, 20)), "JPEG"), "the image is in CMYK"),
        (encoded(Image.fromarray(np.full((20, 20), 40_000, np.uint16))), "the image has 16 bits per pixel"),
        (encoded(Image.new("RGBA", (20, 20))), "transparent parts of the image stand on white"),
        (encoded(Image.new("LA", (20, 20))), "transparent parts of the image stand on white"),
    ],
)
def test_what_is_changed_is_said(content: bytes, note: str) -> None:
    upload = read_image(content)
    assert (upload.image.mode, upload.image.size) == ("RGB", (20, 20))
    assert [line[: len(note)] for line in upload.notes] == [note]


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P"])
def test_ordinary_images_have_no_notes(mode: str) -> None:
    upload = read_image(encoded(Image.new(mode, (20, 30))))
    assert (upload.image.mode, upload.image.size, upload.notes) == ("RGB", (20, 30), ())


COLOURS: list[tuple[Callable[[], bytes], tuple[int, int, int]]] = [
    (frames, (255, 0, 0)),
    (lambda: encoded(Image.fromarray(np.full((20, 20), 0x8040, np.uint16))), (128, 128, 128)),
    (lambda: encoded(Image.new("RGBA", (20, 20), (0, 0, 0, 0))), (255, 255, 255)),
    (lambda: encoded(Image.new("RGBA", (20, 20), (10, 20, 30, 255))), (10, 20, 30)),
    (lambda: encoded(Image.new("LA", (20, 20), (0, 255))), (0, 0, 0)),
]


@pytest.mark.parametrize(("content", "colour"), COLOURS)
def test_colours(content: Callable[[], bytes], colour: tuple[int, int, int]) -> None:
    assert read_image(content()).image.getpixel((3, 3)) == colour


def test_a_turned_photograph_is_upright() -> None:
    """Orientation 6: the camera was turned, so the file's left column is the top row of the picture."""
    image = Image.new("RGB", (40, 20))
    image.paste("red", (0, 0, 8, 20))
    exif = image.getexif()
    exif[274] = 6
    upright = read_image(encoded(image, exif=exif)).image
    assert upright.size == (20, 40)
    assert [upright.getpixel(place) for place in ((0, 0), (19, 0), (10, 30))] == [(255, 0, 0), (255, 0, 0), (0, 0, 0)]


def test_limits_are_the_servers() -> None:
    image = encoded(Image.new("RGB", (100, 100)))
    with pytest.raises(VitrimError, match=r"at most 0\.005 megapixels"):
        read_image(image, Limits(megapixels=0.005))
    with pytest.raises(VitrimError, match="MB are read"):
        read_image(image, Limits(megabytes=1e-4))
