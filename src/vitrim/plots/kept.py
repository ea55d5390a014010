"""Pictures of the tokens that were kept: over the image, patches that were pruned and groups of merged ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError
from vitrim.plots.merged import OUTLINE_COLOUR, outline

Image = NDArray[np.float32]

PRUNED_LIGHT = 0.25
"""Share of its light that a pruned patch is drawn with."""
PRUNED_TINT = (0.04, 0.05, 0.22)
"""Light added to it, dark blue: so that it differs from what is dark in the image itself."""


def sources_of(states: Iterable[TokenState], row: int = 0) -> NDArray[np.int64]:
    """The token that holds each patch of one image after each block, (L, P), as `draw_kept` reads it.

    In a `vitrim.measure.decisions.Decisions` the same is ``source[row][:, header["num_prefix"]:]``.

    Args:
        states: `Reduction.states` of a reduction with ``record=True``.
        row: the image within the batch.

    Example:
        >>> import torch
        >>> sources_of([TokenState.start(torch.zeros(2, 5, 8), num_prefix=1)]).tolist()
        [[1, 2, 3, 4]]
    """
    each = [state.source.expand(max(len(state.source), row + 1), -1)[row, state.num_prefix :] for state in states]
    return np.stack([source.cpu().numpy() for source in each])


def groups_of(sources: NDArray[Any]) -> NDArray[Any]:
    """The token that holds each patch at the end, (P,), -1 where the patch was pruned at any time.

    A patch that a model got back later (`restore`, Cropr's fusion) was pruned. What the last block itself prunes and
    brings back is not seen, as no state is recorded between.

    Args:
        sources: (L, P) or (P,): the token that holds each patch after each block, -1 for none.

    Example:
        >>> groups_of(np.array([[0, 1, 1, -1], [0, 1, 1, 2]])).tolist()  # the last one was brought back
        [0, 1, 1, -1]
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
) -> Image:
    """The image as the blocks saw it: patches that were pruned are dark, groups of merged ones are outlined.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        sources: (L, P) or (P,), as of `groups_of`, patches in raster order.
        grid: rows and columns of the patches; rows * columns = P.
        covered: height and width in pixels of the image that the grid covers, more than the image where it was padded
            at its right and bottom; default: just the image.
        scale: enlarge the image by this whole factor first, so that outlines are thin next to small patches.

    Returns:
        (H * scale, W * scale, 3) float32 in [0, 1]: the image itself where single patches were kept; pruned patches
        in dark blue with a quarter of their light; groups of two or more in their mean colour, outlined in orange.

    Raises:
        VitrimError: the grid does not hold P patches, or does not cover the image.
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
    row = ((np.arange(height * scale) + 0.5) * rows / (tall * scale)).astype(np.int64)
    column = ((np.arange(width * scale) + 0.5) * columns / (wide * scale)).astype(np.int64)
    token = groups.reshape(rows, columns)[row[:, None], column[None, :]]
    dark = token < 0
    drawn[dark] = PRUNED_LIGHT * drawn[dark].mean(axis=-1, keepdims=True) + np.array(PRUNED_TINT, np.float32)
    names, sizes = np.unique(groups, return_counts=True)
    merged = np.isin(token, names[(sizes > 1) & (names >= 0)])
    drawn[merged] = _means(drawn, token, merged)
    drawn[outline(token, groups)] = OUTLINE_COLOUR
    return drawn


def _means(image: Image, token: NDArray[Any], chosen: NDArray[np.bool_]) -> Image:
    """For every pixel that is ``chosen`` the mean colour of its token's pixels."""
    _, places = np.unique(token[chosen], return_inverse=True)
    counts = np.bincount(places)
    means = [np.bincount(places, image[chosen][:, channel]) / np.maximum(counts, 1) for channel in range(3)]
    return np.stack(means, axis=-1).astype(np.float32)[places]


def in_colour(image: NDArray[Any]) -> Image:
    """A copy of an image (H, W, 3), (H, W, 1) or (H, W) with three channels, float32.

    Raises:
        VitrimError: another shape.

    Example:
        >>> in_colour(np.zeros((2, 3))).shape
        (2, 3, 3)
    """
    given = image[..., None] if image.ndim == 2 else image
    if given.ndim != 3 or given.shape[-1] not in (1, 3):
        raise VitrimError(f"an image is (H, W, 3) or (H, W), not {image.shape}")
    return np.array(np.broadcast_to(given, (*given.shape[:2], 3)), dtype=np.float32)


def enlarged(image: Image, scale: int) -> Image:
    """An image (H, W, 3) with every pixel as a square of ``scale`` pixels."""
    return image.repeat(scale, 0).repeat(scale, 1)
