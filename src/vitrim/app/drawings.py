"""The page's example images: eight drawings of things that CIFAR-10 has classes for, free of anybody's rights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["DRAWINGS", "draw"]

SIDE, FINE = 128, 4
"""Pixels of a drawing, and how many times finer it is drawn first, so that its edges are smooth."""
SKY, SEA, GRASS, ROAD, SAND = "#8fbce6", "#2f5f8f", "#5f8f3f", "#6f7074", "#b9a98a"


class Pen:
    """Draws on a square whose sides are 100 long, from the upper left."""

    def __init__(self, above: str, below: str, horizon: float) -> None:
        from PIL import Image, ImageDraw

        self.scale = SIDE * FINE / 100
        self.image = Image.new("RGB", (SIDE * FINE, SIDE * FINE), above)
        self.on = ImageDraw.Draw(self.image)
        self.box(0, horizon, 100, 100, below)

    def _scaled(self, places: tuple[float, ...]) -> list[float]:
        return [place * self.scale for place in places]

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """A rectangle."""
        self.on.rectangle(self._scaled((left, top, right, bottom)), fill=colour)

    def disc(self, x: float, y: float, wide: float, tall: float, colour: str) -> None:
        """An ellipse around a centre, of so many units from there."""
        self.on.ellipse(self._scaled((x - wide, y - tall, x + wide, y + tall)), fill=colour)

    def shape(self, colour: str, *places: float) -> None:
        """A polygon, of x, y, x, y, ..."""
        self.on.polygon(self._scaled(places), fill=colour)

    def stroke(self, colour: str, width: float, *places: float) -> None:
        """A line through x, y, x, y, ..."""
        self.on.line(self._scaled(places), fill=colour, width=round(width * self.scale), joint="curve")


def _ship() -> Pen:
    pen = Pen(SKY, SEA, 58)
    pen.shape("#b03028", 8, 52, 92, 52, 82, 70, 18, 70)
    pen.box(28, 40, 72, 52, "#f2f0ea")
    pen.box(34, 31, 60, 40, "#e4e0d6")
    pen.box(40, 16, 48, 31, "#d05a28")
    for place in range(32, 70, 8):
        pen.box(place, 43, place + 4, 48, "#30404f")
    return pen


def _airplane() -> Pen:
    pen = Pen("#a9cdec", "#c4ddf2", 75)
    pen.shape("#dfe3e8", 8, 52, 20, 44, 82, 42, 94, 50, 82, 56, 20, 58)
    pen.shape("#b4bac2", 42, 48, 62, 48, 46, 84, 36, 84)
    pen.shape("#c8cdd4", 46, 44, 58, 44, 50, 24, 43, 24)
    pen.shape("#4a6fa5", 10, 48, 22, 47, 14, 26, 6, 26)
    pen.box(80, 45, 87, 48, "#35506b")
    return pen


def _automobile() -> Pen:
    pen = Pen(SAND, ROAD, 62)
    pen.shape("#c22f2a", 6, 56, 24, 50, 36, 36, 68, 36, 82, 50, 94, 54, 94, 70, 6, 70)
    pen.shape("#9fb9cc", 31, 49, 40, 40, 51, 40, 51, 49)
    pen.shape("#9fb9cc", 54, 49, 54, 40, 66, 40, 75, 49)
    for place in (26, 75):
        pen.disc(place, 70, 9, 9, "#202226")
        pen.disc(place, 70, 4, 4, "#b9bdc2")
    return pen


def _truck() -> Pen:
    pen = Pen("#c9d6de", ROAD, 70)
    pen.box(6, 24, 64, 68, "#ece9e2")
    pen.box(6, 58, 64, 64, "#c9682a")
    pen.shape("#2f5fa8", 66, 38, 82, 38, 94, 54, 94, 72, 66, 72)
    pen.shape("#b7cbd9", 71, 42, 80, 42, 88, 54, 71, 54)
    for place in (20, 34, 80):
        pen.disc(place, 74, 8, 8, "#1f2023")
        pen.disc(place, 74, 3, 3, "#a9acb0")
    return pen


def _frog() -> Pen:
    pen = Pen("#7b8a58", "#5b4a33", 70)
    pen.disc(50, 62, 32, 22, "#6fa03a")
    pen.disc(50, 70, 20, 13, "#c9cf8f")
    for side in (-1, 1):
        pen.disc(50 + 34 * side, 76, 13, 9, "#5c8a30")
        pen.disc(50 + 17 * side, 38, 10, 10, "#7db044")
        pen.disc(50 + 17 * side, 37, 6, 6, "#f0e6a0")
        pen.disc(50 + 17 * side, 37, 3, 5, "#16180f")
    pen.stroke("#3b5a20", 2, 32, 58, 42, 63, 58, 63, 68, 58)
    return pen


def _horse() -> Pen:
    pen = Pen(SKY, GRASS, 66)
    pen.disc(48, 50, 26, 14, "#7a4a26")
    for place in (28, 36, 60, 68):
        pen.shape("#6b4020", place - 3, 56, place + 4, 56, place + 2, 88, place - 3, 88)
    pen.shape("#7a4a26", 60, 46, 74, 16, 84, 22, 76, 54)
    pen.shape("#7a4a26", 72, 16, 80, 12, 96, 28, 91, 34, 76, 28)
    pen.shape("#2d1c10", 58, 44, 70, 14, 76, 16, 66, 44)
    pen.shape("#2d1c10", 24, 42, 14, 50, 12, 76, 18, 76, 24, 54)
    return pen


def _bird() -> Pen:
    pen = Pen("#cfe0ea", "#cfe0ea", 100)
    pen.stroke("#6b5236", 4, 0, 80, 100, 74)
    pen.shape("#4a5d78", 14, 70, 34, 52, 42, 62, 20, 78)
    pen.disc(52, 52, 22, 16, "#5b7fb0")
    pen.disc(58, 57, 15, 11, "#d98a4a")
    pen.disc(70, 36, 11, 11, "#5b7fb0")
    pen.shape("#d9a13a", 80, 34, 92, 38, 80, 41)
    pen.disc(73, 34, 2, 2, "#101010")
    pen.shape("#3f5a80", 34, 48, 58, 44, 50, 60, 24, 62)
    for place in (50, 57):
        pen.stroke("#8a5a30", 2, place, 66, place, 77)
    return pen


def _cat() -> Pen:
    pen = Pen("#c9b79c", "#8f7a63", 78)
    pen.shape("#7a7670", 24, 100, 32, 66, 68, 66, 78, 100)
    for side in (-1, 1):
        pen.shape("#7a7670", 50 + 28 * side, 12, 50 + 30 * side, 42, 50 + 8 * side, 28)
        pen.shape("#d9a7a0", 50 + 25 * side, 18, 50 + 26 * side, 34, 50 + 14 * side, 29)
    pen.disc(50, 46, 30, 25, "#8a8680")
    for side in (-1, 1):
        pen.disc(50 + 13 * side, 42, 6, 6, "#d6cf5a")
        pen.disc(50 + 13 * side, 42, 2, 5, "#14140f")
        pen.stroke("#f4f2ee", 0.8, 50 + 10 * side, 56, 50 + 38 * side, 52)
        pen.stroke("#f4f2ee", 0.8, 50 + 10 * side, 58, 50 + 38 * side, 60)
        pen.stroke("#55524d", 3, 50 + 4 * side, 22, 50 + 6 * side, 32)
    pen.disc(50, 58, 11, 8, "#ddd8d0")
    pen.shape("#c9807a", 46, 52, 54, 52, 50, 57)
    return pen


DRAWINGS: dict[str, Callable[[], Pen]] = {
    "ship": _ship,
    "airplane": _airplane,
    "automobile": _automobile,
    "truck": _truck,
    "frog": _frog,
    "horse": _horse,
    "bird": _bird,
    "cat": _cat,
}


def draw(name: str) -> Image.Image:
    """One of `DRAWINGS`, (128, 128) RGB.

    Example:
        >>> draw("ship").size
        (128, 128)
    """
    pen = DRAWINGS[name]()
    return pen.image.reduce(FINE)
