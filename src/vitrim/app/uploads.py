"""Uploads by strangers, images and the ``front.json`` of ``vitrim tune``: checked before use."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field

from vitrim.app.messages import FrontFile, Limits, PlottedPoint
from vitrim.checked import Stored
from vitrim.data.decoding import DAMAGED, decode
from vitrim.errors import VitrimError, first_line
from vitrim.files import parse_json
from vitrim.style import DENSE_COLOUR, OKABE_ITO, SMALL, encoded, panels
from vitrim.tuning.result import non_dominated

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats of web pages, and TIFF; every further decoder would be more attack surface."""
ORIENTATION = 274
"""The EXIF tag."""
LARGEST_FRONT = 1_000_000
"""Largest ``front.json`` in bytes."""
MOST_POINTS = 200
LONGEST = 400
"""Largest length of a text in it."""
AGREE = "agree"
UNITS = {"macs": "MACs", "speedup": "latency"}


@dataclass(frozen=True)
class Upload:
    """An accepted image, RGB and upright, with a line per visible change."""

    image: Image.Image
    notes: tuple[str, ...] = ()


def read_image(content: bytes, limits: Limits | None = None) -> Upload:
    """Decode an uploaded image: the first frame, upright, in RGB, on white. Its header is checked first.

    `VitrimError` for a file that is too large, broken, or of a format not in `FORMATS`, and for sides out of range.
    """
    limits = limits or Limits()
    if len(content) > limits.megabytes * 1e6:
        raise VitrimError(f"the file has {len(content) / 1e6:.1f} MB; at most {limits.megabytes:g} MB are read")
    if not content:
        raise VitrimError("the file is empty; give an image")
    notes = tuple(_check_header(content, limits))
    image = decode(content, "the image")
    # upright, in RGB
    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if _has_alpha(image):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return Upload(image.convert("RGB"), notes)


def _check_header(content: bytes, limits: Limits) -> Iterator[str]:
    """Check only the header; yield a note per visible change."""
    try:
        # our limit is in megapixels, and an error
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            # Opening reads the header alone: nothing is decoded before its size is known to be harmless.
            image: Any = Image.open(BytesIO(content), formats=FORMATS)
            frames = getattr(image, "n_frames", 1)
    except UnidentifiedImageError:
        raise VitrimError(f"not an image of a known format; valid: {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise VitrimError(f"the image has more than {limits.megapixels:g} megapixels; make it smaller") from None
    except DAMAGED as error:
        raise VitrimError(f"cannot read the image: {first_line(error)}") from error
    with image:
        width, height = image.size
        shape = f"the image has {width} x {height} pixels"
        bounds = {
            f"at most {limits.megapixels:g} megapixels are read": width * height > limits.megapixels * 1e6,
            f"at least {limits.side} x {limits.side} are needed to see anything": min(width, height) < limits.side,
            f"one side may be at most {limits.aspect:g} times the other: crop it": (
                max(width, height) > limits.aspect * min(width, height)
            ),
        }
        broken = next((bound for bound, beyond in bounds.items() if beyond), None)
        if broken is not None:
            raise VitrimError(f"{shape}; {broken}")
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


class _FrontRow(Stored):
    target: str
    setting: str
    config: str
    share: float
    scores: dict[str, float | None]
    returned: bool = False


class _Tuned(Stored):
    proxy: str = "feature"
    base: str | None = None
    made_for: dict[str, Any] = Field({})
    images: dict[str, int] = Field({})


class _FrontJson(Stored):
    rows: list[_FrontRow] = Field(min_length=1, max_length=MOST_POINTS)
    tuned: _Tuned


def read_front(content: bytes) -> FrontFile:
    """Read the bytes of a ``front.json``; `VitrimError` for anything else.

    Scores are the agreement with the dense model in percent if the file has it, else the damage (less is better). The
    front is that of these scores.

    Example:
        >>> import json
        >>> row = {"target": "macs=0.5", "setting": "constant", "config": "tome:r=8", "share": 0.5,
        ...        "scores": {"agree": 0.02}, "returned": True, "on_front": True}
        >>> front = read_front(json.dumps({"tuned": {"proxy": "feature"}, "rows": [row]}).encode())
        >>> front.measure, front.points[0].score
        ('decided as by the dense model, %', 98.0)
    """
    if len(content) > LARGEST_FRONT:
        raise VitrimError(f"the file has {len(content) / 1e6:.1f} MB; a front.json has far less than 1 MB")
    name = "the front.json of `vitrim tune --front`"
    found = _FrontJson.of(parse_json(content, name), name)
    agreed = all(AGREE in row.scores for row in found.rows)
    score = AGREE if agreed else found.tuned.proxy
    points = [_point(row, number, score) for number, row in enumerate(found.rows)]
    # the front of the shown scores; the file's front is that of the minimised score
    kept = non_dominated([(one.share, -one.score if score == AGREE else one.score) for one in points])
    points = [replace(one, on_front=on) for one, on in zip(points, kept, strict=True)]
    kind = points[0].target.partition("=")[0]
    measure = "decided as by the dense model, %" if score == AGREE else f"damage ({_short(score)}), less is better"
    cost = UNITS.get(kind, "cost")
    png = _picture(points, cost, measure)
    words = f"{len(points)} settings: {measure} over {cost} in % of the dense model; the table has the numbers"
    # the conditions of the searches
    tuned = found.tuned
    model = tuned.made_for.get("model") or tuned.made_for.get("class")
    about = [f"{key}: {_short(value)}" for key, value in (("model", model), ("base", tuned.base)) if value]
    if "check" in tuned.images:
        about.append(f"measured on {tuned.images['check']} images")
    return FrontFile("; ".join(about), cost, measure, points, png, words)


def _point(row: _FrontRow, number: int, score: str) -> PlottedPoint:
    value = row.scores.get(score)
    if value is None:
        raise VitrimError(f"row {number} of the file has no score '{_short(score)}'")
    shown = 100 * (1 - value) if score == AGREE else value
    texts = [_short(text) for text in (row.target, row.setting, row.config)]
    return PlottedPoint(texts[0], texts[1], texts[2], row.share, shown, False, row.returned)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _picture(points: Sequence[PlottedPoint], cost: str, measure: str) -> bytes:
    """The figure: points by kind, the front as a dotted line, the dense model as a star."""
    figure, (axis,) = panels(1, across=1, size=(5.6, 3.4), above=0.0)
    for setting, colour, marker in (("constant", OKABE_ITO[0], "o"), ("searched", OKABE_ITO[5], "D")):
        own = [(100 * one.share, one.score) for one in points if one.setting == setting]
        if own:
            axis.plot(*zip(*own, strict=True), marker, color=colour, label=setting, zorder=3)
    # The dense model decides as itself in all images; its damage is 0.
    dense = 100.0 if measure.startswith("decided") else 0.0
    line = sorted([*((100 * one.share, one.score) for one in points if one.on_front), (100.0, dense)])
    axis.plot(*zip(*line, strict=True), ":", color=DENSE_COLOUR, linewidth=1, label="front", zorder=2)
    axis.plot([100.0], [dense], "*", color=DENSE_COLOUR, markersize=12, label="dense", zorder=4)
    axis.set_xlabel(f"{cost}, % of the dense model", fontsize=SMALL)
    axis.set_ylabel(measure, fontsize=SMALL)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=SMALL, frameon=False)
    return encoded(figure)
