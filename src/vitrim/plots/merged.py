"""Pictures of a reduction: merged and pruned patches, drawn on the image itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.core.tokens import TokenState
from vitrim.errors import VitrimError
from vitrim.plots.style import sheet

PRUNED_COLOUR = (0.93, 0.62, 0.60)
"""Pale red: a colour that neither grey scans nor most photographs have in large areas."""
OUTLINE_COLOUR = (1.0, 0.60, 0.10)
"""Orange: visible on black, white and pale red."""


def draw_groups(image: NDArray[np.float32], source: NDArray[np.int64], grid: tuple[int, int], scale: int = 1) -> Any:
    """The image as the model sees it after a reduction: every group of merged patches in its mean colour, outlined.

    Args:
        image: (H, W, 3) or (H, W), values in [0, 1].
        source: (P,) current token of each patch in raster order, -1 where it was pruned.
        grid: rows and columns of patches; rows * columns = P, and they divide H and W.
        scale: enlarge the image by this whole factor first, so that outlines are thin next to small patches.

    Returns:
        (H * scale, W * scale, 3) float32 in [0, 1]. Pruned patches are pale red; groups of two or more patches are
        outlined in orange, single patches show the image itself.

    Raises:
        VitrimError: shapes that do not fit.
    """
    rows, columns = grid
    height, width = image.shape[:2]
    if rows * columns != source.size or height % rows or width % columns:
        raise VitrimError(
            f"{source.size} patches on a grid of {rows} x {columns} do not fit an image of {height} x {width}"
        )
    colour = np.repeat(image[..., None], 3, axis=-1) if image.ndim == 2 else image
    colour = colour.repeat(scale, 0).repeat(scale, 1).astype(np.float32)
    groups = source.reshape(rows, columns).repeat(height * scale // rows, 0).repeat(width * scale // columns, 1)
    drawn = colour.copy()
    for group in np.unique(source):
        inside = groups == group
        if group < 0:
            drawn[inside] = PRUNED_COLOUR
        elif (source == group).sum() > 1:
            drawn[inside] = colour[inside].mean(axis=0)
    drawn[outline(groups, source)] = OUTLINE_COLOUR
    return drawn


def outline(groups: NDArray[np.int64], source: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Pixels (H, W) on the border of a group of two or more patches.

    Args:
        groups: (H, W), the token of each pixel.
        source: (P,), the token of each patch, -1 where it was pruned.
    """
    tokens, sizes = np.unique(source, return_counts=True)
    large = np.isin(groups, tokens[(sizes > 1) & (tokens >= 0)])
    padded = np.pad(groups, 1, constant_values=-2)
    neighbours = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    return np.asarray(large & np.any([groups != other for other in neighbours], axis=0))


def plot_merged(
    images: NDArray[np.float32],
    reductions: Sequence[tuple[str, TokenState]],
    grid: tuple[int, int],
    path: str | Path,
    *,
    captions: Sequence[str] = (),
    title: str = "",
) -> None:
    """Write a figure with one row per reduction and one column per image, the images themselves on top.

    Args:
        images: (B, H, W, 3) or (B, H, W), values in [0, 1].
        reductions: label and final state of each reduction of these images.
        grid: rows and columns of patches.
        path: the file to write; its ending decides the format.
        captions: one line above each image.
        title: line above the figure.
    """
    count = len(images)
    scale = max(1, 224 // images.shape[1])
    figure = sheet(1.35 * count + 1.6, 1.42 * (len(reductions) + 1) + 0.7)
    axes = figure.subplots(len(reductions) + 1, count, squeeze=False)
    for column in range(count):
        axes[0, column].imshow(images[column], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes[0, column].set_title(captions[column] if captions else "", fontsize=9)
        for row, (_, state) in enumerate(reductions, start=1):
            source = state.source[column, state.num_prefix :].cpu().numpy()
            axes[row, column].imshow(draw_groups(images[column], source, grid, scale), interpolation="nearest")
    for row, label in enumerate(["image", *(label for label, _ in reductions)]):
        axes[row, 0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9, labelpad=6)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
