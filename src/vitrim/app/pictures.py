"""Pictures of the remaining tokens of an image, block by block, as WebP and in words."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitrim.app.messages import BlockPicture
from vitrim.core.registry import host_of
from vitrim.plots.classifier import LARGE
from vitrim.plots.images import pixels_of
from vitrim.plots.patches import draw_kept, groups_of


def pictures_of(model: nn.Module, image: Tensor, sources: NDArray[np.int64] | None = None) -> list[BlockPicture]:
    """The preprocessed ``image`` (C, H, W), or its remaining tokens after each block.

    ``sources`` (L, P) are the token that contains each patch after each block, -1 for none; None: only the image.
    """
    pixels, grid = pixels_of(model, image), host_of(model).facts(model).grid_size
    scale = -(-LARGE // pixels.shape[1])
    if sources is None:
        left = np.arange(grid[0] * grid[1])
        return [BlockPicture(-1, _webp(draw_kept(pixels, left, grid, scale=scale)), "the image as the model gets it")]
    found = []
    for block in range(len(sources)):
        left = sources[: block + 1]
        drawn = _webp(draw_kept(pixels, left, grid, scale=scale))
        found.append(BlockPicture(block, drawn, _words(block, groups_of(left))))
    return found


def _webp(drawn: NDArray[np.float32]) -> bytes:
    """A picture (H, W, 3) in [0, 1] as WebP, a fifth of the size of PNG; a page has dozens."""
    Image.fromarray((drawn * 255).round().astype(np.uint8)).save(file := io.BytesIO(), "WEBP", quality=90)
    return file.getvalue()


def _words(block: int, groups: NDArray[Any]) -> str:
    """The content of a picture in one sentence."""
    sizes = np.unique(groups[groups >= 0], return_counts=True)[1]
    pruned, merged, count = int((groups < 0).sum()), int(sizes[sizes > 1].sum()), int((sizes > 1).sum())
    parts = [f"{pruned} {'is' if pruned == 1 else 'are'} pruned"] if pruned else []
    parts += [f"{merged} are merged into {count} group{'' if count == 1 else 's'}"] if merged else []
    if not parts:
        return f"after block {block}: all {len(groups)} patches are there"
    return f"after block {block}: of {len(groups)} patches, {', '.join(parts)}"
