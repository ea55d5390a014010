"""PixelPrune: cells of an image that their neighbours predict are left out, before the tower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vitrim.core.registry import register_selector
from vitrim.core.repeats import RepeatOptions
from vitrim.core.selection import ImageSelector
from vitrim.errors import VitrimError


@register_selector
class PixelPrune(RepeatOptions, ImageSelector):
    """Leave out cells of an image that repeat their neighbours, in front of the tower: for documents and screens.

    The number depends on the image, and on its pixels alone. What stays keeps its place, in the tower and in the
    language model, and text continues as behind the whole image. With ``tau=0``, cells equal in every pixel go.
    Images only. Differences from the release: pixels are scaled to [0, 1] by the deviations of the model's published
    processor, not always by 0.5; text behind an image is numbered as in its version for transformers, not for vLLM.

    Example:
        >>> import torch, vitrim
        >>> page = torch.tensor([[1, 1, 1, 1], [1, 5, 5, 1], [1, 1, 1, 1]])
        >>> vitrim.parse_selector("pixelprune").kept_cells(page[:, :, None]).int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 0]]
    """

    name = "pixelprune"
    paper = "PixelPrune, 2026 (2604.00886); after the released code"
    published_with = "Qwen3-VL"
    default_keep = None
    drops_cells = True

    def faults(self) -> Iterator[str]:
        if self.tokens is not None or self.keep is not None:
            yield "the image decides how many cells stay: leave tokens and keep out"

    def count(self, grid: Sequence[int] | int) -> int:
        raise VitrimError(f"{self.describe()} finds its number image by image, from the pixels: see kept_cells")
