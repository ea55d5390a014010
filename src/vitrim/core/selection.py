"""Selection of the image tokens that a language model gets: `Selector`, its input `Seen`, and tensor functions.

A selector acts behind an image tower, on all tokens of an image at once, and uses nothing of the model except `Seen`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, prod
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from vitrim.core.options import Options
from vitrim.core.tokens import decision_dtype
from vitrim.errors import VitrimError

Place = Literal["image", "before", "behind"]
"""The image itself; or its tokens in front of the connector; or behind it, as the language model gets them."""
AttentionUse = Literal["none", "read", "last"]
"""The tower block whose attention a selector needs: the one whose output the connector reads, or the last one."""
Positions = Literal["closed", "original"]
T = TypeVar("T")
FrameGrid = tuple[int, int, int]
"""Frames (1 for an image), rows and columns of tokens."""


@dataclass(frozen=True)
class Seen:
    """B images of N tokens each, as a selector sees them. N excludes class and other prefix tokens.

    Attributes:
        features: (B, N, D), at the selector's `Selector.place`.
        grid: frames, rows and columns of the N tokens; None if a reduction removed some.
        scores: (B, N) attention that each token gets from the class token, or from all tokens; mean over heads.
        keys: (B, N, d) keys, mean over heads.
        class_token: (B, D), beside ``features``; None if there is none, or the connector drops it.
        query, wide_keys: (B, C), (B, 1 + N, C) query of the class token, keys of it and of all tokens; heads
            concatenated.
        text: (M, D) embeddings of the prompt's text for every image, as the language model gets them.
    """

    features: Tensor
    grid: FrameGrid | None = None
    scores: Tensor | None = None
    keys: Tensor | None = None
    class_token: Tensor | None = None
    query: Tensor | None = None
    wide_keys: Tensor | None = None
    text: Sequence[Tensor] | None = None

    def image(self, index: int) -> Seen:
        """The same for one image, with B = 1."""
        changes = {
            name: value[index : index + 1] for name, value in vars(self).items() if name != "grid" and value is not None
        }
        return replace(self, **changes)

    def known_grid(self, selector: Selector) -> FrameGrid:
        """The grid; `VitrimError` if it is unknown to ``selector``, which acts on whole videos."""
        if self.grid is None:
            raise VitrimError(f"{selector.name} needs frames, rows and columns of the tokens: it acts on whole videos")
        return self.grid


class Choice(NamedTuple):
    """The tokens of one image that are kept.

    Attributes:
        kept: (n,) int64 places among the N tokens, in output order.
        tokens: (n, D) what replaces them; None: they themselves.
        front, end: (m, D) further tokens without a place in the image, or None.
        merged: (n,) bool, which of ``tokens`` are made from several; None for none.
    """

    kept: Tensor
    tokens: Tensor | None = None
    front: Tensor | None = None
    end: Tensor | None = None
    merged: Tensor | None = None

    @property
    def number(self) -> int:
        """All tokens, ``front`` and ``end`` included."""
        return len(self.kept) + sum(0 if extra is None else len(extra) for extra in (self.front, self.end))

    def of(self, features: Tensor) -> Tensor:
        """The output tokens, from ``features`` (N, D)."""
        own = features.index_select(0, self.kept) if self.tokens is None else self.tokens
        parts = [part for part in (self.front, own, self.end) if part is not None]
        return torch.cat(parts) if len(parts) > 1 else own


class SelectorNeeds(NamedTuple):
    """The needs of a selector: attention of a block of the tower, a class token, the text of the prompt."""

    attention: AttentionUse = "none"
    class_token: bool = False
    text: bool = False


class Selector(Options):
    """Options of a selector, and its choice. One file each in ``vitrim/selectors``, tensor function first.

    Example:
        >>> import vitrim
        >>> vitrim.parse_selector("divprune:tokens=64").count((1, 24, 24))
        64
    """

    paper: ClassVar[str] = ""
    place: ClassVar[Place] = "behind"
    merges: ClassVar[bool] = False
    """Some output tokens are made from several."""
    rounding: ClassVar[Literal["round", "floor", "ceil"]] = "round"
    """The rounding of ``keep`` to a count."""
    published_with: ClassVar[str] = ""
    """Models of the paper, or of the code that ships the selector."""
    default_keep: ClassVar[float | None] = 0.25
    """``keep`` if neither it nor ``tokens`` is given; None: the selector finds a number per image."""

    tokens: int | None = Field(None, ge=1, description="tokens kept of each image, or tile; all if it has fewer")
    keep: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="share of the tokens kept of each image"
    )
    positions: Positions | None = Field(
        None,
        description="positions of the remaining tokens: 'closed', without gaps, or 'original', so that text continues "
        "as behind the whole image; default: closed, and original if positions have three axes",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Selector:
        if self.tokens is not None and self.keep is not None:
            raise ValueError("give tokens or keep, not both")
        return self

    def needs(self) -> SelectorNeeds:
        """The needs of these options."""
        return SelectorNeeds()

    def keeps_places(self) -> bool:
        """True if every output token has a place in the image, in raster order: it can keep its position."""
        return True

    def is_adaptive(self) -> bool:
        """True if the number of tokens depends on the image."""
        return self.tokens is None and self.keep is None and self.default_keep is None

    def budget(self, tokens: int) -> int:
        """The number of an image's ``tokens`` to keep, those without a place too; an error if images decide."""
        if self.tokens is not None:
            return min(self.tokens, tokens)
        share = self.keep if self.keep is not None else self.default_keep
        if share is None:
            raise VitrimError(f"{self.describe()} finds its number image by image: give tokens or keep")
        # round off floating-point error: 0.29 * 100 means 29
        product = round(tokens * share, 9)
        roundings: dict[str, Callable[[float], int]] = {"round": round, "floor": floor, "ceil": ceil}
        count = roundings[self.rounding](product)
        return min(max(count, 1), tokens)

    def count(self, grid: Sequence[int] | int) -> int:
        """Tokens kept of an image or video, from its ``grid`` alone: (rows, columns), (frames, rows, columns), or a
        number.

        Example:
            >>> import vitrim
            >>> vitrim.parse_selector("evs:keep=0.4").count((4, 3, 4))
            19
        """
        return self.budget(prod(as_grid(grid)))

    def mask(self, features: Tensor, grid: Sequence[int] | int | None = None, text: Tensor | None = None) -> Tensor:
        """(N,) bool: the kept tokens of an image, as many as `count`. For servers that cut prompts.

        Args:
            features: (N, D), as the language model gets them.
            grid: of the tokens; required for videos.
            text: (M, D) embeddings of the prompt's text, for selectors that read it.

        Example:
            >>> import torch, vitrim
            >>> vitrim.parse_selector("divprune:tokens=2").mask(torch.tensor([[1.0, 0], [1, 0.1], [0, 1]]))
            tensor([ True, False,  True])
        """
        if self.needs().attention != "none":
            raise VitrimError(f"{self.name} needs the tower's attention: there is no mask of features alone")
        whole = None if grid is None else as_grid(grid)
        seen = Seen(features[None], whole, text=None if text is None else [text])
        (choice,) = self.select(seen)
        found = torch.zeros(len(features), dtype=torch.bool, device=features.device)
        found[choice.kept] = True
        return found

    def select(self, seen: Seen) -> list[Choice]:
        """The choice for every image."""
        raise NotImplementedError


class ImageSelector(Selector):
    """A selector that changes what the tower reads: the size of images, or which cells of patches they have.

    All tokens that the tower makes of them go on.
    """

    place = "image"
    drops_cells: ClassVar[bool] = False
    """It leaves out cells, see `kept_cells`; otherwise images get `smaller`."""

    def smaller(self, grid: FrameGrid) -> FrameGrid:
        """The grid of tokens that an image of ``grid`` is made smaller for."""
        raise NotImplementedError

    def kept_cells(self, cells: Tensor) -> Tensor:
        """(R, C) bool: the cells of an image that the tower reads, from their pixels (R, C, V), in the range [0, 1].

        A cell is what becomes one token of the language model. A constant may be added to the pixels of a channel.
        """
        raise NotImplementedError

    def mask(self, features: Tensor, grid: Sequence[int] | int | None = None, text: Tensor | None = None) -> Tensor:
        """Refused: there is no mask of features."""
        raise VitrimError(f"{self.name} acts on images, not on their features: there is no mask")

    def select(self, seen: Seen) -> list[Choice]:
        """All tokens: the image was changed before."""
        every = torch.arange(seen.features.shape[1], device=seen.features.device)
        return [Choice(every) for _ in seen.features]


class Choosing(nn.Module):
    """Runs everything spent on choosing, as a module, so that counters and timers can attribute it."""

    def __init__(self, selector: Selector) -> None:
        super().__init__()
        self.selector = selector

    def forward(self, work: Callable[[], T]) -> T:
        """The result of ``work``."""
        return work()


def as_grid(grid: Sequence[int] | int) -> FrameGrid:
    """Frames, rows and columns.

    Example:
        >>> as_grid((3, 4)), as_grid(12)
        ((1, 3, 4), (1, 1, 12))
    """
    sizes = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise VitrimError(f"expected a grid such as (24, 24), or (frames, rows, columns), got {grid!r}")
    frames, rows, columns = (1,) * (3 - len(sizes)) + sizes
    return frames, rows, columns


def unit_rows(x: Tensor, least: float | None = None) -> Tensor:
    """Rows of ``x`` (..., N, D) divided by their lengths, or by ``least`` if shorter, in at least float32.

    Example:
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    x = x.to(decision_dtype(x.dtype))
    length: Tensor = x.norm(dim=-1, keepdim=True)
    # Rows of zeros stay zeros, so no cosine is NaN.
    return x / length.clamp_min(torch.finfo(x.dtype).tiny if least is None else least)


def first_largest(x: Tensor) -> Tensor:
    """(B, 1) index of the largest entry of each row of ``x`` (B, N), the first of equal ones, on every device.

    Example:
        >>> first_largest(torch.tensor([[1.0, 3.0, 3.0]]))
        tensor([[1]])
    """
    if x.device.type == "cpu":  # `max` finds the first there
        return x.max(dim=1, keepdim=True).indices
    places = torch.arange(x.shape[1], device=x.device)
    return places.where(x == x.amax(dim=1, keepdim=True), x.shape[1] - 1).amin(dim=1, keepdim=True)


def descending(scores: Tensor) -> Tensor:
    """(B, N) indices by descending ``scores`` (B, N); ties by index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def largest(scores: Tensor, count: int) -> Tensor:
    """(B, ``count``) indices of the largest ``scores`` (B, N), ascending; ties by index.

    Example:
        >>> largest(torch.tensor([[3.0, 1.0, 3.0, 3.0]]), 2)
        tensor([[0, 2]])
    """
    return descending(scores)[:, :count].sort(dim=1).values


def complement(kept: Tensor, count: int) -> Tensor:
    """(B, ``count`` - n) indices below ``count`` that are not in ``kept`` (B, n), ascending.

    Example:
        >>> complement(torch.tensor([[1, 3]]), 4)
        tensor([[0, 2]])
    """
    gone = torch.ones(kept.shape[0], count, dtype=torch.bool, device=kept.device).scatter(1, kept, False)
    # `nonzero` goes row by row, and every row has as many.
    return gone.nonzero()[:, 1].view(kept.shape[0], count - kept.shape[1])
