"""Smaller images, the plain rival of selectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from vitrim.core.registry import register_selector
from vitrim.core.selection import FrameGrid, ImageSelector
from vitrim.selectors.pool import nearest_rectangle, squared


@register_selector
class Resize(ImageSelector):
    """Make images smaller so that about that many tokens come: the baseline that makes the tower faster, too.

    The answer is that to a smaller image: positions are its own. The grid is the nearest rectangle of at most that many
    tokens, equal in every frame of a video, and at least one token of each. Towers of a fixed size get positions that
    the library interpolates. Pixels are resized bicubically with antialiasing, after the processor, so that values
    beyond the range of a picture can occur.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("resize:tokens=64").count((24, 24))
        64
    """

    name = "resize"
    paper = "none, a baseline; see VTC-Bench (2510.07143)"
    published_with = "no model: a baseline for any"

    def faults(self) -> Iterator[str]:
        if self.positions is not None:
            yield "positions are those of the smaller image: leave them out"

    def smaller(self, grid: FrameGrid) -> FrameGrid:
        frames, rows, columns = grid
        return (frames, *nearest_rectangle(rows, columns, max(self.budget(prod(grid)) // frames, 1)))

    def count(self, grid: Sequence[int] | int) -> int:
        return prod(self.smaller(squared(grid)))
