"""Maps over images: values of patches in colours, with the image faded where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.plots.kept import Image, draw_kept
from vitrim.plots.style import SMALL, TEXT, sheet

__all__ = ["gallery", "grid_of", "overlay"]

FADED = 0.35
"""Share of the light that the image has where there is no value."""


def grid_of(patches: int, image: NDArray[Any]) -> tuple[int, int]:
    """Rows and columns of so many square patches over an image (H, W, ...).

    Example:
        >>> grid_of(8, np.zeros((32, 64, 3)))
        (2, 4)
    """
    rows = round((patches * image.shape[0] / image.shape[1]) ** 0.5)
    while patches % rows:
        rows -= 1
    return rows, patches // rows


def overlay(
    image: NDArray[Any],
    values: NDArray[Any],
    grid: tuple[int, int],
    *,
    limits: tuple[float, float] | None = None,
    cmap: str = "viridis",
    scale: int = 1,
) -> Image:
    """The values of patches in colours over the image, which is pale where a value is nan.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        values: (P,), patches in raster order.
        grid: rows and columns of the patches.
        limits: of the colours; default: those of the values.
        cmap: viridis or cividis.
        scale: enlarge the image by this whole factor first.

    Returns:
        (H * scale, W * scale, 3) float32 in [0, 1].

    Raises:
        VitrimError: the grid does not hold P patches.

    Example:
        >>> overlay(np.zeros((2, 2)), np.array([0.0, np.nan, 0.5, 1.0]), (2, 2))[0, 1].astype(float).round(2).tolist()
        [0.65, 0.65, 0.65]
    """
    from matplotlib import colormaps

    grey = draw_kept(image, np.arange(values.size), grid, scale=scale).mean(-1, keepdims=True)
    drawn = np.repeat(FADED * grey + (1 - FADED), 3, -1).astype(np.float32)
    if not np.isfinite(values).any():
        return drawn
    low, high = limits or (float(np.nanmin(values)), float(np.nanmax(values)))
    placed = np.asarray(values, dtype=np.float64).reshape(grid)
    shades = colormaps[cmap]((placed - low) / max(high - low, 1e-12))[..., :3]
    tall, wide = drawn.shape[:2]
    down = (np.arange(tall) * grid[0] // tall)[:, None]
    across = (np.arange(wide) * grid[1] // wide)[None]
    known = np.isfinite(placed)[down, across]
    drawn[known] = shades[down, across][known]
    return drawn


def gallery(rows: Sequence[tuple[str, Sequence[tuple[str, NDArray[Any] | None]]]], *, side: float = 1.2) -> Any:
    """A figure of pictures in rows: a name beside each row, a title above each picture that has one."""
    columns = max(len(pictures) for _, pictures in rows)
    figure = sheet(0.5 + side * columns, (side + 0.25) * len(rows) + 0.1)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03, wspace=0.01, hspace=0.01)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, pictures) in zip(axes, rows, strict=True):
        for axis in line:
            axis.set(xticks=[], yticks=[])
            for edge in axis.spines.values():
                edge.set_visible(False)
        line[0].set_ylabel(name, fontsize=SMALL)
        for axis, (title, picture) in zip(line, pictures, strict=False):
            if picture is not None:
                axis.imshow(picture, interpolation="antialiased", vmin=0, vmax=1)
            axis.set_title(title, fontsize=TEXT)
    return figure
