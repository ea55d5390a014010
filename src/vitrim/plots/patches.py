"""Pictures of patches over an image: pruned and merged patches, and values in colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError
from vitrim.style import SMALL, TEXT, TITLE, save, sheet

Image = NDArray[np.float32]

HATCH_GROUND, HATCH_LINE = (0.90, 0.90, 0.90), (0.58, 0.58, 0.58)
"""Greys of a pruned patch: its background and its slanted lines, a texture that photographs do not have."""
HATCHES = 28
"""Slanted lines along the shorter side of a picture."""
OUTLINE_COLOUR = (1.0, 0.60, 0.10)
"""Orange: visible on black, white and the hatch."""
FADED = 0.35
"""Brightness of the image under missing values."""


def sources_of(states: Iterable[TokenState], row: int = 0) -> NDArray[np.int64]:
    """The token that holds each patch of image ``row`` after each block, (L, P), for `draw_kept`, from recorded states.

    With a `vitrim.measure.decisions.Decisions`, use ``source[row][:, header["num_prefix"]:]``.
    """
    # While nothing was reduced, one row of indices serves the whole batch.
    each = [state.source.expand(max(len(state.source), row + 1), -1)[row, state.num_prefix :] for state in states]
    return np.stack([source.cpu().numpy() for source in each])


def groups_of(sources: NDArray[Any]) -> NDArray[Any]:
    """The token that finally holds each patch, (P,), of ``sources`` (L, P) or (P,); -1 if it was pruned at any time.

    A patch that was restored later (`restore`, Cropr's fusion) counts as pruned, unless the last block both pruned and
    restored it: no state is recorded in between.
    """
    every = np.atleast_2d(sources)
    return np.where((every < 0).any(axis=0), -1, every[-1])


def draw_kept(
    image: NDArray[Any],
    sources: NDArray[Any],
    grid: tuple[int, int],
    *,
    covered: tuple[float, float] | None = None,
    scale: int = 1,
    made: NDArray[np.bool_] | None = None,
) -> Image:
    """The image as the blocks see it: pruned patches are hatched, groups of merged patches are outlined.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        sources: (L, P) or (P,), see `groups_of`, patches in raster order.
        grid: rows and columns of the patches; rows * columns = P.
        covered: height and width of the grid in pixels of the image, if it was padded at the right and bottom; default:
            the image's size.
        scale: enlarge the image by this integer factor first, so that outlines are thin beside small patches.
        made: (P,), patches to outline because their tokens were merged from several.

    Returns:
        (H * scale, W * scale, 3) float32 in [0, 1]: single kept patches unchanged; pruned patches hatched; groups of
            two or more in their mean colour, outlined in orange.
    """
    groups = groups_of(sources)
    rows, columns = grid
    colour = in_colour(image)
    height, width = colour.shape[:2]
    tall, wide = covered or (height, width)
    if rows * columns != groups.size:
        raise VitrimError(f"{groups.size} patches do not fill a grid of {rows} x {columns}")
    if tall < height or wide < width:
        raise VitrimError(f"a grid over {tall:g} x {wide:g} pixels does not cover an image of {height} x {width}")
    drawn = enlarged(colour, scale)
    # The patch under the middle of each pixel: a pixel on an edge belongs to one patch.
    row = ((np.arange(height * scale) + 0.5) * rows / (tall * scale)).astype(np.int64)
    column = ((np.arange(width * scale) + 0.5) * columns / (wide * scale)).astype(np.int64)
    token = groups.reshape(rows, columns)[row[:, None], column[None, :]]
    gone = token < 0
    drawn[gone] = hatch(*token.shape)[gone]
    names, sizes = np.unique(groups, return_counts=True)
    several = names[(sizes > 1) & (names >= 0)]
    merged = np.isin(token, several)
    drawn[merged] = _means(drawn, token, merged)
    outlined = several if made is None else np.append(several, groups[made & (groups >= 0)])
    drawn[_border(token, outlined)] = OUTLINE_COLOUR
    return drawn


def hatch(height: int, width: int) -> Image:
    """A grey picture (height, width, 3) with slanted lines, for removed patches."""
    # At most one line in four pixels, also in small pictures.
    period = max(4, round(min(height, width) / HATCHES))
    lines = np.add.outer(np.arange(height), np.arange(width)) % period < max(1, round(period / 5))
    return np.where(lines[..., None], np.asarray(HATCH_LINE, np.float32), np.asarray(HATCH_GROUND, np.float32))


def _means(image: Image, token: NDArray[Any], chosen: NDArray[np.bool_]) -> Image:
    """The mean colour of its token's pixels, for every ``chosen`` pixel."""
    _, places = np.unique(token[chosen], return_inverse=True)
    counts = np.bincount(places)
    # Sums by token in one pass: a mean for each of hundreds of groups would take as many.
    means = [np.bincount(places, image[chosen][:, channel]) / np.maximum(counts, 1) for channel in range(3)]
    return np.stack(means, axis=-1).astype(np.float32)[places]


def in_colour(image: NDArray[Any]) -> Image:
    """A float32 copy of an image (H, W, 3), (H, W, 1) or (H, W) with three channels."""
    given = image[..., None] if image.ndim == 2 else image
    if given.ndim != 3 or given.shape[-1] not in (1, 3):
        raise VitrimError(f"an image is (H, W, 3) or (H, W), not {image.shape}")
    return np.array(np.broadcast_to(given, (*given.shape[:2], 3)), dtype=np.float32)


def enlarged(image: Image, scale: int) -> Image:
    """An image (H, W, 3) with every pixel as a square of ``scale`` pixels."""
    return image.repeat(scale, 0).repeat(scale, 1)


def _border(groups: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask (H, W) of the pixels of ``tokens`` at the edge of the picture or of another token."""
    # Beyond the picture is another token, so its edge is a border, too.
    padded = np.pad(groups, 1, constant_values=-2)
    neighbours = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    return np.asarray(np.isin(groups, tokens) & np.any([groups != other for other in neighbours], axis=0))


def plot_merged(
    images: NDArray[np.float32],
    reductions: Sequence[tuple[str, TokenState]],
    grid: tuple[int, int],
    path: str | Path,
    *,
    captions: Sequence[str] = (),
    title: str = "",
) -> None:
    """Write a figure with a row per label and final state in ``reductions``, a column per image, images on top."""
    scale, titles = max(1, 224 // images.shape[1]), captions or [""] * len(images)
    rows: list[tuple[str, list[tuple[str, Image]]]] = [
        ("image", [(title, in_colour(image)) for title, image in zip(titles, images, strict=True)])
    ]
    for label, state in reductions:
        sources = (sources_of([state], row) for row in range(len(images)))
        kept = [draw_kept(image, source, grid, scale=scale) for image, source in zip(images, sources, strict=True)]
        rows.append((label, [("", picture) for picture in kept]))
    figure = gallery(rows, side=1.35)
    figure.suptitle(title, fontsize=TITLE)
    save(figure, Path(path))


def grid_of(patches: int, image: NDArray[Any]) -> tuple[int, int]:
    """Rows and columns of a grid of square patches over an image (H, W, ...).

    Example:
        >>> grid_of(8, np.zeros((32, 64, 3)))
        (2, 4)
    """
    # Rows of square patches, rounded; then the next fewer that divide the patches.
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
    """Overlay the image with coloured values of its patches; it is pale where a value is nan.

    Args:
        values: (P,), patches in raster order.
        limits: limits of the colours; default: those of the values.
        cmap: viridis or cividis.
        scale: enlarge the image by this integer factor first.

    Returns:
        (H * scale, W * scale, 3) float32 in [0, 1].

    Example:
        >>> overlay(np.zeros((2, 2)), np.array([0.0, np.nan, 0.5, 1.0]), (2, 2))[0, 1].astype(float).round(2).tolist()
        [0.65, 0.65, 0.65]
    """
    from matplotlib import colormaps

    # Drawn as if every patch were kept: this enlarges, and checks image and grid.
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
    """A figure with rows of pictures: a name beside each row, and optional titles above the pictures."""
    columns = max(len(pictures) for _, pictures in rows)
    figure = sheet(0.5 + side * columns, (side + 0.25) * len(rows) + 0.1)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03, wspace=0.01, hspace=0.01)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, pictures) in zip(axes, rows, strict=True):
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(name, fontsize=SMALL)
        for axis, (title, picture) in zip(line, pictures, strict=False):
            if picture is not None:
                axis.imshow(picture, interpolation="antialiased", vmin=0, vmax=1)
            axis.set_title(title, fontsize=TEXT)
    return figure
