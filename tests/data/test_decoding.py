"""Image files are data, whatever is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

from vitrim.data.decoding import decode, decode_labels
from vitrim.errors import DataError


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mark that a program called `gs` leaves where it is started."""
    mark, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 10.0\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # what Pillow remembers
    return mark


def test_postscript_starts_no_program(tmp_path: Path, ghostscript: Path) -> None:
    file = tmp_path / "a.png"
    Image.new("RGB", (4, 4)).save(file, "EPS")
    for read in (decode, decode_labels):
        for given in (file, file.read_bytes()):
            with pytest.raises(DataError, match=r"^cannot read image 0: not an image of a known format$"):
                read(given, "image 0")
    assert not ghostscript.exists()
    with pytest.raises((OSError, SyntaxError)), Image.open(file) as image:  # Pillow itself starts it
        image.load()
    assert ghostscript.exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_formats_of_pixels_are_read(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (4, 3), (10, 20, 30)).save(tmp_path / "a", kind)
    assert decode(tmp_path / "a", "image 0").size == (4, 3)
