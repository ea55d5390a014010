"""VidCom2: tokens of a video that are unlike all of it and unlike their frame; unusual frames get more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.registry import register_selector
from vitrim.core.selection import Choice, Seen, Selector, as_grid, descending, unit_rows
from vitrim.core.tokens import decision_dtype
from vitrim.errors import VitrimError

WIDTHS = (1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Squared widths of the Gaussians whose sum is a similarity."""
KEEP = 0.25
"""Share of the tokens, by default."""
TEMPERATURE = 0.01
"""Of the softmax over frames: nearly the whole surplus goes to one."""


def similarity(x: Tensor, centre: Tensor) -> Tensor:
    """(..., n) sums of Gaussians of the squared distance between ``x`` (..., n, D) and its ``centre`` (..., 1, D)."""
    distance = (x - centre).square().sum(dim=-1)
    return torch.stack([(-distance / (2 * width)).exp() for width in WIDTHS]).sum(dim=0)


def similarities(video: Tensor) -> tuple[Tensor, Tensor]:
    """(T, n) similarity of every token to the mean of its ``video`` (T, n, D), and to the mean of its frame.

    Only the half of the channels with the smallest variances counts, divided by the token's length in these.
    """
    x = video.to(decision_dtype(video.dtype))
    quiet = x.flatten(0, 1).var(dim=0, correction=0).sort(stable=True).indices[: max(x.shape[2] // 2, 1)]
    x = unit_rows(x[:, :, quiet], 1e-12)
    return similarity(x, x.mean(dim=(0, 1), keepdim=True)), similarity(x, x.mean(dim=1, keepdim=True))


def frame_counts(to_video: Tensor, share: float) -> list[int]:
    """The number of tokens that every frame keeps: about a ``share``, more if it is unlike the video, and at least 1.

    ``to_video`` are the first values of `similarities`.
    """
    frames, tokens = to_video.shape
    surplus = (-to_video.double().mean(dim=1) / TEMPERATURE).softmax(dim=0) - 1 / frames
    own = share * (1 + surplus) * tokens
    # halves to even, with floating-point error rounded off
    return [min(max(round(round(count, 4)), 1), tokens) for count in own.tolist()]


def unusual(video: Tensor, share: float, count: int | None) -> Tensor:
    """(m,) tokens of a ``video`` (T, n, D), in raster order: of each frame those least like it and the video.

    Args:
        video: its T frames of n tokens.
        share: of the tokens, in (0, 1].
        count: m; tokens of the largest similarity are then dropped, or of the smallest added, over all frames, so that
            a frame can end up empty. None: the counts of the frames as they are.
    """
    to_video, to_frame = similarities(video)
    alike = to_video + to_frame
    counts = frame_counts(to_video, share)
    rank = descending(-alike).argsort(dim=1)
    taken = (rank < rank.new_tensor(counts)[:, None]).flatten()
    order = descending(-alike.flatten()[None])[0]
    order = torch.cat([order[taken[order]], order[~taken[order]]])
    return order[: sum(counts) if count is None else count].sort().values


@register_selector
class VidCom2(Selector):
    """Select the tokens of a video that are least like it and their frame; frames unlike the video keep more.

    An image is a video of one frame. The number is that of vLLM, known before the features are; ``reconcile=false``
    keeps the number of the release, which is not. Decisions in float32 (the release: in the features' dtype, where many
    similarities are equal). Tokens stay in raster order.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("vidcom2:keep=0.25").count((6, 5, 5))
        37
    """

    name = "vidcom2"
    paper = "Liu et al., Video Compression Commander, EMNLP 2025 (2505.14454)"
    rounding = "floor"
    default_keep = KEEP
    published_with = "LLaVA-OneVision, LLaVA-Video, Qwen2-VL, Qwen2.5-VL, Qwen3-VL"

    reconcile: bool = Field(
        True,
        description="keep exactly the share of the video, and at least one token per frame on average, as in vLLM; "
        "false: what the frames' own counts add up to, as released",
    )

    def count(self, grid: Sequence[int] | int) -> int:
        if not self.reconcile:
            raise VitrimError(f"{self.describe()} finds its number video by video: leave reconcile out")
        frames, rows, columns = as_grid(grid)
        return max(frames, self.budget(frames * rows * columns))

    def select(self, seen: Seen) -> list[Choice]:
        grid = seen.known_grid(self)
        total = seen.features.shape[1]
        share = min(self.tokens / total, 1.0) if self.tokens is not None else self.keep or KEEP
        count = self.count(grid) if self.reconcile else None
        return [Choice(unusual(video.unflatten(0, (grid[0], -1)), share, count)) for video in seen.features]
