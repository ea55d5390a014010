"""CubistMerge: merge along rows and columns, so that the tokens form a rectangle (CubistMerge, 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import sqrt
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vitrim.core.assignment import Hard, merge
from vitrim.core.attention import Attention
from vitrim.core.block import Reducer, StepOutput
from vitrim.core.matching import most_similar_first, unit
from vitrim.core.method import MethodConfig, Needs, Share, Traits, Tunable
from vitrim.core.registry import register
from vitrim.core.schedule import Amount, Pattern, check_blocks
from vitrim.core.tokens import TokenState, decision_dtype, no_gradient, take, whole


class CubistMerge(MethodConfig):
    """Shorten every row, then every column, by merging neighbours, so that the tokens form a smaller grid.

    Formulas and deviations are in docs/methods/cubist_merge.md.

    Example:
        >>> CubistMerge(rows=3, columns=3).counts(196, 12)[:3]
        [196, 121, 121]
    """

    name = "cubist_merge"
    paper = "CubistMerge: Spatial-Preserving Token Merging For Diverse ViT Backbones (2025)"
    kind = "merge"
    traits = Traits(aligns=False)
    runtime = frozenset({"keep_rate", "rows", "columns"})
    tunable = Tunable("keep_rate", 1.0, 0.25, digits=3)

    keep_rate: Share = Field(0.6, description="share of patches kept, in whole rows and columns")
    rows: int | None = Field(None, ge=0, description="instead of keep_rate: rows removed")
    columns: int | None = Field(None, ge=0, description="instead of keep_rate: columns removed; default as rows")
    block: int = Field(1, ge=0, description="block before which it acts, 0-based")
    overlap: Literal["largest", "last"] = Field(
        "largest",
        description="where two tokens join the same one: largest of the three; 'last': last one written, as released",
    )

    def faults(self) -> Iterator[str]:
        if self.rows is None and self.columns is not None:
            yield "columns goes with rows; rows=0 leaves them"
        if self.rows is not None and "keep_rate" in self.model_fields_set:
            yield "give either keep_rate, or rows and columns"

    def needs(self) -> Needs:
        return Needs(grid=True)

    def stages(self, num_layers: int) -> tuple[int, ...]:
        return (self.block,)

    def amounts(self, num_layers: int) -> list[Amount | None]:
        check_blocks((self.block,), num_layers)
        schedule: list[Amount | None] = [None] * num_layers
        removed = None if self.rows is None else (self.rows, self.rows if self.columns is None else self.columns)
        schedule[self.block] = SmallerGrid(self.keep_rate, removed)
        return schedule


@dataclass(frozen=True)
class SmallerGrid(Pattern):
    """Shrink the grid to a share of the patches, or by the rows and columns ``removed``."""

    keep_rate: float
    removed: tuple[int, int] | None = None

    def sides(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns left of a ``grid``, at least half of each."""
        # Both sides shrink by the same factor, so the share of the patches is its square.
        wanted = [round(side * sqrt(self.keep_rate)) for side in grid]
        if self.removed is not None:
            wanted = [side - removed for side, removed in zip(grid, self.removed, strict=True)]
        rows, columns = (max(left, side - side // 2) for side, left in zip(grid, wanted, strict=True))
        return rows, columns

    def number(self, grid: tuple[int, int]) -> int:
        rows, columns = self.sides(grid)
        return rows * columns

    def reaches(self, grid: tuple[int, int]) -> bool:
        if self.removed is None:
            return self.keep_rate >= 0.25
        return all(removed <= side // 2 for side, removed in zip(grid, self.removed, strict=True))


@dataclass(frozen=True)
class Shrunk(Hard):
    """An assignment with its new patches (B, M - prefix, C): the value of a cell is not a mean."""

    patches: Tensor = field(kw_only=True)

    def apply(self, x: Tensor, state: TokenState) -> StepOutput:
        return torch.cat([x[:, : state.num_prefix], self.patches], dim=1), self.advance(x, state)


@register(CubistMerge)
class CubistMergeReducer(Reducer[CubistMerge]):
    site = "before"
    spares_block = True

    def assign(self, x: Tensor, attention: Attention, state: TokenState) -> Hard | None:
        height, width = (whole(side) for side in state.known_grid(self.config.name))
        amount = self.layer.amount
        assert isinstance(amount, SmallerGrid)
        rows, columns = amount.sides((height, width))
        if (rows, columns) == (height, width):
            return None
        batch, _, channels = x.shape
        last = self.config.overlap == "last"
        # Rows first: every row is a line of the batch. Then the columns of what is left, so cells lie column by column.
        lines = x[:, state.num_prefix :].reshape(batch * height, width, channels)
        row = shortened(lines, width - columns, last)
        cells = row.tokens.view(batch, height, columns, channels).transpose(1, 2)
        column = shortened(cells.reshape(batch * columns, height, channels), height - rows, last)
        patches = column.tokens.view(batch, columns, rows, channels).transpose(1, 2).flatten(1, 2)
        with no_gradient():
            # where each patch of a row went, then where that cell went in its column
            across = row.target.view(batch, height, width)
            down = column.target.view(batch, columns, height).transpose(1, 2).gather(2, across)
            place = (down * columns + across).flatten(1)
            source = column.kept.view(batch, columns, rows).transpose(1, 2)  # the row that each cell comes from
            kept = (source * width + row.kept.view(batch, height, columns).gather(1, source)).flatten(1)
            stays = torch.zeros_like(place, dtype=torch.int8).scatter(1, kept, 1)
            moved = stays.sort(dim=1, stable=True).indices[:, : height * width - rows * columns]
            decided = merge(state, kept, moved, place.gather(1, moved))
        parts = {each.name: getattr(decided, each.name) for each in fields(decided)}  # torch.compile cannot read `vars`
        return Shrunk(**parts, patches=patches)


class ShortLine(NamedTuple):
    """Shortened lines: ``tokens`` (L, m, C), ``kept`` (L, m) their old places, ``target`` (L, n) the new places."""

    tokens: Tensor
    kept: Tensor
    target: Tensor


def shortened(x: Tensor, r: int, last: bool = False) -> ShortLine:
    """Merge ``r`` tokens of every line of ``x`` (L, n, C) into a neighbour, r at most n // 2.

    ``last``: where two tokens join the same one, use only the one that the released code writes last.
    """
    n = whole(x.shape[1])
    pairs, evens = n // 2, (n + 1) // 2
    with no_gradient():
        vectors = unit(x.to(decision_dtype(x.dtype)))
        # Tokens at odd places are the sources: each has an even neighbour on its left, and most have one on the right.
        alike = (vectors[:, 1:] * vectors[:, :-1]).sum(dim=2)  # of each token and the next one
        left, right = alike[:, ::2], alike[:, 1::2]
        if evens == pairs:  # the last one of an even line has a left neighbour only
            right = torch.constant_pad_nd(right, (0, 1), -torch.inf)
        rightwards = right > left
        order = most_similar_first(torch.maximum(left, right))
        rank = order.argsort(dim=1)
        goes = rank < r
        place = torch.arange(n, device=x.device).expand(x.shape[0], n)
        # an even token receives the odd one before it, the odd one after it, both or neither
        before = torch.constant_pad_nd(goes & rightwards, (1, 0))[:, :evens]
        behind = torch.constant_pad_nd(goes & ~rightwards, (0, evens - pairs))
        if last:  # the order of writing: sources of even rank, then of odd rank
            turn = rank % 2 * pairs + rank
            later = torch.constant_pad_nd(turn, (0, evens - pairs)) > torch.constant_pad_nd(turn, (1, 0))[:, :evens]
            before, behind = before & ~(behind & later), behind & ~(before & ~later)
        stays = torch.ones_like(place, dtype=torch.bool)
        stays[:, 1::2] = ~goes
        kept = stays.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, : n - r]
        # A source that goes joins the place on its right or left; the sum of those that stay numbers the new line.
        joins = place.clone()
        joins[:, 1::2] = torch.where(goes, place[:, 1::2] + torch.where(rightwards, 1, -1), place[:, 1::2])
        target = (stays.cumsum(dim=1) - 1).gather(1, joins)
    even, odd = x[:, ::2], x[:, 1::2]
    even = larger(even, torch.constant_pad_nd(odd, (0, 0, 1, 0))[:, :evens], before)
    padded = torch.constant_pad_nd(odd, (0, 0, 0, evens - pairs))
    even = larger(even, padded, behind)
    tokens = torch.stack([even, padded], dim=2).flatten(1, 2)
    return ShortLine(take(tokens, kept), kept, target)


def larger(x: Tensor, other: Tensor, joins: Tensor) -> Tensor:
    """``x`` (L, n, C), or ``other`` where its magnitude is larger, in the tokens (L, n) of ``joins``."""
    return torch.where(joins.unsqueeze(2) & (other.abs() > x.abs()), other, x)
