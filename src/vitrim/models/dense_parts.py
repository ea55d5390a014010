"""Steps that models for dense tasks and stems share: whole patches, and the tokens of the patches laid out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitrim.errors import VitrimError


def padded(images: Tensor, patch_size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Pad images (B, 3, H, W) with zeros at their right and bottom to whole patches.

    Returns:
        The images, themselves where nothing is missing, and the rows and columns of their patches.

    Example:
        >>> import torch
        >>> whole, grid = padded(torch.ones(1, 3, 30, 32), (16, 16))
        >>> whole.shape, grid
        (torch.Size([1, 3, 32, 32]), (2, 2))
    """
    down, right = -images.shape[2] % patch_size[0], -images.shape[3] % patch_size[1]
    whole = F.pad(images, (0, right, 0, down)) if down or right else images
    return whole, (whole.shape[2] // patch_size[0], whole.shape[3] // patch_size[1])


def patch_map(tokens: Tensor, num_prefix: int, grid: tuple[int, int]) -> Tensor:
    """The tokens (B, P, C) of the patches, in raster order, out of all tokens (B, N, C), prefix in front.

    Raises:
        VitrimError: there is not one token for every patch of the ``grid``: the backbone alone was reduced by a method
            that prunes, or drops patches in training.

    Example:
        >>> import torch
        >>> patch_map(torch.zeros(1, 7, 4), 1, (2, 3)).shape
        torch.Size([1, 6, 4])
    """
    rows, columns = grid
    if tokens.shape[1] != num_prefix + rows * columns:
        raise VitrimError(
            f"a dense head needs the {rows * columns} patches of {rows} x {columns}, and the backbone hands out "
            f"{tokens.shape[1] - num_prefix}: reduce the whole model instead of its backbone, and drop no patches"
        )
    return tokens[:, num_prefix:]
