"""The number of patch tokens each layer keeps: functions of Python ints, so that one model serves every image size.

An amount has ``keep(initial, current) -> int``: the patch tokens it wants left, given how many entered the first block
and how many there are now. A schedule is a list with one amount, or None, per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, TypeVar

from vitrim.errors import VitrimError

N = TypeVar("N", int, float)

KeepRule = Literal["ceil_current", "floor_current", "floor_initial", "floor_initial_power", "ceil_current_class_token"]
MergeRule = Literal[KeepRule, "floor_initial_power_steps"]
"""Keep rules, with one for merges that may fall short of a target because they remove at most half of the tokens."""

KEEP_RULES: dict[MergeRule, Callable[[float, float, int, int], int]] = {
    # (rate, product of the rates of earlier stages, initial, current) -> patch tokens kept
    "ceil_current": lambda rate, before, initial, current: math.ceil(_clean(rate * current)),
    "floor_current": lambda rate, before, initial, current: int(_clean(rate * current)),
    "floor_initial": lambda rate, before, initial, current: int(_clean(rate * initial)),
    "floor_initial_power": lambda rate, before, initial, current: int(_clean(before * rate * initial)),
    # the rate applies to patches and class token together, and the class token stays
    "ceil_current_class_token": lambda rate, before, initial, current: math.ceil(_clean(rate * (current + 1))) - 1,
    # removes the difference of two targets, even if earlier stages fell short
    "floor_initial_power_steps": lambda rate, before, initial, current: (
        current + int(_clean(before * rate * initial)) - int(_clean(before * initial))
    ),
}


def _clean(count: float) -> float:
    """Round off floating-point error: 0.7**2 * 100 gives 48.99999999999999 and means 49."""
    return round(count, 9)


class Amount(Protocol):
    """The number of patch tokens one layer should keep."""

    def keep(self, initial: int, current: int) -> int:
        """Patch tokens wanted after this layer; `effective_keep` limits them to the possible range."""
        ...


@dataclass(frozen=True)
class Remove:
    """Remove ``count`` patch tokens, or with ``per`` that many of an image with ``per`` patches, else in proportion.

    Example:
        >>> Remove(13).keep(196, 196), Remove(40, per=1024).keep(256, 256)
        (183, 246)
    """

    count: int
    per: int | None = None

    def keep(self, initial: int, current: int) -> int:
        if self.per is None:
            return current - self.count
        # Rounded to the nearest, half up, in integers: floor(x + 1 / 2) with x = count * initial / per.
        return current - (2 * self.count * initial + self.per) // (2 * self.per)


@dataclass(frozen=True)
class Fuse:
    """Fuse ``r`` patch tokens, or below 1 that share of the current ones, but leave at least ``least``.

    Example:
        >>> Fuse(0.35, least=9).keep(196, 196), Fuse(16, least=9).keep(196, 20)
        (128, 9)
    """

    r: float
    least: int = 1

    def keep(self, initial: int, current: int) -> int:
        # round: 0.29 * 100 is 28.999999999999996 in floating point and means 29
        removed = math.floor(round(current * self.r, 9)) if self.r < 1 else int(self.r)
        return max(current - removed, min(self.least, current))


@dataclass(frozen=True)
class BringBack:
    """Bring back all banked patch tokens: as many leave the layer as entered the first one."""

    def keep(self, initial: int, current: int) -> int:
        return initial


@dataclass(frozen=True)
class Keep:
    """Keep a share of the patch tokens by a named rule.

    Papers count "keep rate 0.7 at three stages" of 196 patches differently: ``ceil_current`` (EViT) gives 138, 97, 68;
    ``floor_initial_power`` (DynamicViT, the comparative study) 137, 96, 67; ``floor_initial`` (Evo-ViT) 137 at every
    stage. ``floor_initial_power_steps`` is the study's ToMe, ``ceil_current_class_token`` ToMe and ToFu in PiToMe's
    repository. ``stage`` counts from 1; ``before`` is the product of earlier rates where stages differ.

    Example:
        >>> Keep(0.7, stage=2, rule="floor_initial_power").keep(196, 137)
        96
    """

    rate: float
    stage: int = 1
    rule: MergeRule = "ceil_current"
    before: float | None = None

    def keep(self, initial: int, current: int) -> int:
        before = self.rate ** (self.stage - 1) if self.before is None else self.before
        return KEEP_RULES[self.rule](self.rate, before, initial, current)


@dataclass(frozen=True)
class OnMultiples:
    """The patches that a whole schedule leaves, rounded up so that all tokens are a multiple of a number.

    Attributes:
        amounts: of the layers up to this one.
        counts: maps amounts and initial patches to the patches left after each layer.
        others: prefix tokens, and tokens that the layer adds.
    """

    amounts: tuple[Amount | None, ...]
    counts: Callable[[Sequence[Amount | None], int], list[int]]
    multiple: int
    others: tuple[int, int]

    def keep(self, initial: int, current: int) -> int:
        # The excess of one layer is left to later ones. Rounding every amount by itself would accumulate it, and with a
        # small `Remove` never remove anything.
        prefix, added = self.others
        total = self.counts(self.amounts, initial)[-1] + prefix
        return math.ceil(total / self.multiple) * self.multiple - prefix - added


class Pattern:
    """An amount that follows from the grid of the patches, not from their number."""

    def number(self, grid: tuple[int, int]) -> int:
        """Patches that it keeps of a ``grid`` (rows, columns)."""
        raise NotImplementedError

    def reaches(self, grid: tuple[int, int]) -> bool:
        """True unless the grid does not allow as few patches as asked."""
        return True

    def keep(self, initial: int, current: int) -> int:
        return self.number(square_of(initial))


def square_of(initial: int) -> tuple[int, int]:
    """Rows and columns of ``initial`` patches in a square."""
    side = math.isqrt(initial)
    if side * side != initial:
        raise VitrimError(f"{initial} patches make no square: give counts(..., grid=(rows, columns))")
    return side, side


@dataclass(frozen=True)
class Limited:
    """An ``amount`` in a layer that cannot reduce as far as the method can elsewhere.

    ``least`` maps the current patch tokens to the fewest that the layer can leave; it must be picklable.

    Example:
        >>> effective_keep(Limited(Remove(130), half), least=1, initial=196, current=196)
        98
    """

    amount: Amount
    least: Callable[[int], int]

    def keep(self, initial: int, current: int) -> int:
        return self.amount.keep(initial, current)


def effective_keep(amount: Amount, least: int, initial: int, current: int, grid: tuple[int, int] | None = None) -> int:
    """Evaluate an amount: at most ``current`` patch tokens, at least ``least`` (of a `Limited` amount, its own).

    Example:
        >>> effective_keep(Remove(130), least=98, initial=196, current=196)
        98
    """
    reach = amount.least(current) if isinstance(amount, Limited) else least
    if isinstance(amount, Pattern) and grid is not None:
        return max(min(amount.number(grid), current), min(reach, current))
    return max(min(amount.keep(initial, current), current), min(reach, current))


def one_token(current: int) -> int:
    """The fewest patch tokens most methods can leave."""
    return 1


def half(current: int) -> int:
    """The fewest patch tokens a bipartite matching can leave, merging every pair.

    Example:
        >>> half(197)
        99
    """
    return current - current // 2


def linear(r: int, inflect: float, num_layers: int, per: int | None = None) -> list[Amount | None]:
    """Remove ``r`` on average, changing linearly over the layers (ToMe appendix, "(r, inflect)").

    ``inflect`` in [-1, 1]: -1 goes from 2r to 0, 0 is constant, 1 goes from 0 to 2r.

    Example:
        >>> [amount.count for amount in linear(8, -1.0, 6)]
        [16, 12, 9, 6, 3, 0]
    """
    if num_layers == 1:
        return [Remove(r, per)]
    low = int(r * (1.0 - inflect))
    step = (2 * r - low - low) / (num_layers - 1)
    # Truncated as published, so the sum may fall a few tokens short of r times the number of layers.
    return [Remove(int(low + step * layer), per) for layer in range(num_layers)]


def per_layer(counts: int | Sequence[int], num_layers: int, per: int | None = None) -> list[Amount | None]:
    """Remove ``counts`` patch tokens in every layer, or ``counts[i]`` in layer i."""
    if isinstance(counts, int):
        return [Remove(counts, per)] * num_layers
    if len(counts) != num_layers:
        raise VitrimError(f"the list has {len(counts)} amounts but the model has {num_layers} blocks: give one each")
    return [Remove(count, per) for count in counts]


def filled_up(counts: int | Sequence[int], num_layers: int) -> int | Sequence[int]:
    """A list that ends early, with 0 for the layers after its end.

    Example:
        >>> filled_up([3, 1], 4), filled_up(3, 4)
        ((3, 1, 0, 0), 3)
    """
    return counts if isinstance(counts, int) else (*counts, *[0] * (num_layers - len(counts)))


def keep_rate(
    rate: float | Sequence[float], blocks: Sequence[int], rule: MergeRule, num_layers: int
) -> list[Amount | None]:
    """Keep ``rate`` of the patch tokens at each of ``blocks`` (0-based), by a named rule; None elsewhere.

    ``rate`` may list one rate per block, in order of depth. Rules with powers of the rate then use products: each stage
    keeps its share of what earlier stages left.

    Example:
        >>> [amount.keep(196, 196) for amount in keep_rate([0.8, 0.5], [1, 3], "floor_initial_power", 4) if amount]
        [156, 78]
    """
    check_blocks(blocks, num_layers)
    rates = one_each(rate, len(blocks), "keep_rate")
    schedule: list[Amount | None] = [None] * num_layers
    before = 1.0 if "power" in rule and not isinstance(rate, int | float) else None
    for stage, (block, each) in enumerate(zip(sorted(blocks), rates, strict=True), start=1):
        schedule[block] = Keep(each, stage, rule, before)
        before = None if before is None else before * each
    return schedule


def at_blocks(
    amount: Callable[[N], Amount], values: N | Sequence[N], blocks: Sequence[int], num_layers: int, what: str
) -> list[Amount | None]:
    """An ``amount`` at each of ``blocks`` (0-based, in order), made from ``values`` (see `one_each`).

    Example:
        >>> at_blocks(Fuse, [8, 0.5], [1, 2], 4, "r")
        [None, Fuse(r=8, least=1), Fuse(r=0.5, least=1), None]
    """
    schedule: list[Amount | None] = [None] * num_layers
    for block, each in zip(blocks, one_each(values, len(blocks), what), strict=True):
        schedule[block] = amount(each)
    return schedule


def removed_by(initial: int, counts: Sequence[float]) -> list[int]:
    """Patches that each layer removes of ``initial``, from mean ``counts`` left after each, rounded to the nearest.

    Example:
        >>> removed_by(16, [12.4, 12.4, 8.5])
        [4, 0, 3]
    """
    whole = [initial, *(math.floor(count + 0.5) for count in counts)]
    return [before - after for before, after in pairwise(whole)]


def one_each(values: N | Sequence[N], count: int, what: str) -> tuple[N, ...]:
    """One value for each of ``count`` blocks, from as many values or from one for all; errors call them ``what``.

    Example:
        >>> one_each(8, 3, "r"), one_each([16, 8], 2, "r")
        ((8, 8, 8), (16, 8))
    """
    each = tuple(values) if isinstance(values, Sequence) else (values,) * count
    if len(each) != count:
        raise VitrimError(f"{what} has {len(each)} values for {count} blocks: give one for all, or one each")
    return each


def check_blocks(blocks: Sequence[int], num_layers: int) -> None:
    """Refuse ``blocks`` that are empty, repeat a block, or name one that a model of ``num_layers`` lacks."""
    wrong = [block for block in blocks if not 0 <= block < num_layers]
    twice = len(set(blocks)) < len(blocks)
    if not blocks or wrong or twice:
        which = f"blocks {wrong} do not exist" if wrong else f"blocks {list(blocks)} name a block twice"
        raise VitrimError(f"{which if blocks else 'no blocks are given'}: the model has blocks 0 to {num_layers - 1}")


def quarter_blocks(num_layers: int) -> tuple[int, ...]:
    """The usual three stages, at a quarter, half and three quarters of the depth: blocks 3, 6, 9 of 12."""
    return tuple(sorted({num_layers * quarter // 4 for quarter in (1, 2, 3)}))
