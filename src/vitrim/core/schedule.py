"""The number of patch tokens each layer keeps: functions of Python ints, so one reduced model serves every image size.

An amount answers ``keep(initial, current) -> int``: how many patch tokens it wants left, given how many entered the
first block and how many there are now. A schedule is a list with one amount (or None) per layer.
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
"""Keep rules of methods that may fall short of a target because one merge removes at most half of the tokens."""

KEEP_RULES: dict[MergeRule, Callable[[float, int, int, int], int]] = {
    # (rate, stage, initial, current) -> patch tokens kept; stages count from 1
    "ceil_current": lambda rate, stage, initial, current: math.ceil(_clean(rate * current)),
    "floor_current": lambda rate, stage, initial, current: int(_clean(rate * current)),
    "floor_initial": lambda rate, stage, initial, current: int(_clean(rate * initial)),
    "floor_initial_power": lambda rate, stage, initial, current: int(_clean(rate**stage * initial)),
    # the class token counts among the tokens that the rate applies to, and stays
    "ceil_current_class_token": lambda rate, stage, initial, current: math.ceil(_clean(rate * (current + 1))) - 1,
    # what lies between two targets is removed, whatever the stages before it fell short of
    "floor_initial_power_steps": lambda rate, stage, initial, current: (
        current + int(_clean(rate**stage * initial)) - int(_clean(rate ** (stage - 1) * initial))
    ),
}


def _clean(count: float) -> float:
    """Remove the last bits of a product: 0.7**2 * 100 is 48.99999999999999 in floating point and means 49."""
    return round(count, 9)


class Amount(Protocol):
    """The number of patch tokens one layer wants to keep."""

    def keep(self, initial: int, current: int) -> int:
        """Wanted number of patch tokens after this layer; may be out of range, `effective_keep` limits it."""
        ...


@dataclass(frozen=True)
class Remove:
    """Remove ``count`` patch tokens regardless of their number, or ``count`` per ``per`` that entered the first block.

    With ``per`` the amount follows the size of the image: it is for images of so many patches, and rounded to the
    nearest number (up at the middle) on others.

    Example:
        >>> Remove(13).keep(196, 196), Remove(40, per=1024).keep(256, 256)
        (183, 246)
    """

    count: int
    per: int | None = None

    def keep(self, initial: int, current: int) -> int:
        if self.per is None:
            return current - self.count
        return current - (2 * self.count * initial + self.per) // (2 * self.per)


@dataclass(frozen=True)
class Fuse:
    """Fuse ``r`` patch tokens, or that fraction of the current ones if below 1, but leave at least ``least``.

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
    """Bring back all patch tokens waiting in the bank: as many leave the layer as entered the first one."""

    def keep(self, initial: int, current: int) -> int:
        return initial


@dataclass(frozen=True)
class Keep:
    """Keep a share of the patch tokens by a named rule.

    Three papers mean three different counts by "keep rate 0.7 at three stages" of 196 patches:
    ``ceil_current`` (EViT) 138, 97, 68; ``floor_initial_power`` (DynamicViT, the comparative study) 137, 96, 67;
    ``floor_initial`` (Evo-ViT) 137 at every stage. ``stage`` counts from 1. ``floor_initial_power_steps`` is that of
    the study's ToMe, whose later stages do not make up for one that fell short; ``ceil_current_class_token`` that of
    ToMe and ToFu in PiToMe's repository.

    Example:
        >>> Keep(0.7, stage=2, rule="floor_initial_power").keep(196, 137)
        96
    """

    rate: float
    stage: int = 1
    rule: MergeRule = "ceil_current"
    before: float | None = None
    """For stages that differ: the product of the rates before this one, in place of ``rate ** (stage - 1)``."""

    def keep(self, initial: int, current: int) -> int:
        if self.before is None or "power" not in self.rule:
            return KEEP_RULES[self.rule](self.rate, self.stage, initial, current)
        wanted = int(_clean(self.before * self.rate * initial))
        return wanted if self.rule == "floor_initial_power" else current + wanted - int(_clean(self.before * initial))


@dataclass(frozen=True)
class OnMultiples:
    """The count that a whole schedule leaves after its last layer, in all a multiple of a number, rounded up.

    What a layer keeps beyond its amount, a later one removes: rounding each amount by itself would keep all of it, and
    with a small `Remove` never remove anything. Layers without an amount, and those that bring patches back, keep
    theirs.

    Attributes:
        amounts: of the layers up to this one.
        counts: from amounts and initial patches to the patches left after each layer.
        multiple: of all tokens.
        others: tokens that are no patches, and those that the layer adds.
    """

    amounts: tuple[Amount | None, ...]
    counts: Callable[[Sequence[Amount | None], int], list[int]]
    multiple: int
    others: tuple[int, int]

    def keep(self, initial: int, current: int) -> int:
        prefix, added = self.others
        total = self.counts(self.amounts, initial)[-1] + prefix
        return math.ceil(total / self.multiple) * self.multiple - prefix - added


class Pattern:
    """An amount that follows from the grid of the patches, and not from their number."""

    def number(self, grid: tuple[int, int]) -> int:
        """Patches that it keeps of a ``grid`` of rows and columns."""
        raise NotImplementedError

    def reaches(self, grid: tuple[int, int]) -> bool:
        """True if that is as few as asked; False where the grid does not allow it."""
        return True

    def keep(self, initial: int, current: int) -> int:
        return self.number(square_of(initial))


def square_of(initial: int) -> tuple[int, int]:
    """Rows and columns of the square of ``initial`` patches.

    Raises:
        VitrimError: they make none.

    Example:
        >>> square_of(196)
        (14, 14)
    """
    side = math.isqrt(initial)
    if side * side != initial:
        raise VitrimError(f"{initial} patches make no square: give counts(..., grid=(rows, columns))")
    return side, side


@dataclass(frozen=True)
class Limited:
    """Another amount, in a layer that cannot reduce as far as the method can elsewhere.

    Attributes:
        amount: wanted.
        least: from the patch tokens of now to the fewest that the layer can leave; a function that can be pickled.

    Example:
        >>> effective_keep(Limited(Remove(130), half), least=1, initial=196, current=196)
        98
    """

    amount: Amount
    least: Callable[[int], int]

    def keep(self, initial: int, current: int) -> int:
        return self.amount.keep(initial, current)


def effective_keep(amount: Amount, least: int, initial: int, current: int, grid: tuple[int, int] | None = None) -> int:
    """Evaluate an amount: at least ``least`` (what the method can reach in one step), at most ``current``.

    A `Limited` amount has a ``least`` of its own. A `Pattern` is evaluated on the ``grid`` of rows and columns, by
    default the square of the ``initial`` patches.

    Example:
        >>> effective_keep(Remove(130), least=98, initial=196, current=196)
        98
    """
    reach = amount.least(current) if isinstance(amount, Limited) else least
    if isinstance(amount, Pattern) and grid is not None:
        return max(min(amount.number(grid), current), min(reach, current))
    return max(min(amount.keep(initial, current), current), min(reach, current))


def half(current: int) -> int:
    """The fewest patch tokens a bipartite matching can leave: every pair may merge, no more.

    Example:
        >>> half(197)
        99
    """
    return current - current // 2


def linear(r: int, inflect: float, num_layers: int, per: int | None = None) -> list[Amount | None]:
    """Remove ``r`` on average, changing linearly over the layers (ToMe appendix, "(r, inflect)").

    ``inflect`` in [-1, 1]: -1 goes from 2r down to 0, 0 is constant, +1 goes from 0 up to 2r. Values are truncated as
    published, so their sum may be a few tokens short of r times the number of layers.

    Example:
        >>> [amount.count for amount in linear(8, -1.0, 6)]
        [16, 12, 9, 6, 3, 0]
    """
    if num_layers == 1:
        return [Remove(r, per)]
    low = int(r * (1.0 - inflect))
    step = (2 * r - low - low) / (num_layers - 1)
    return [Remove(int(low + step * layer), per) for layer in range(num_layers)]


def per_layer(counts: int | Sequence[int], num_layers: int, per: int | None = None) -> list[Amount | None]:
    """Remove so many patch tokens in every layer, or ``counts[i]`` in layer i; layers beyond the list remove none.

    Raises:
        VitrimError: the list is longer than the model is deep.
    """
    if isinstance(counts, int):
        return [Remove(counts, per)] * num_layers
    if len(counts) > num_layers:
        raise VitrimError(f"the list has {len(counts)} amounts but the model has {num_layers} blocks")
    return [Remove(count, per) for count in (*counts, *[0] * (num_layers - len(counts)))]


def keep_rate(
    rate: float | Sequence[float], blocks: Sequence[int], rule: MergeRule, num_layers: int
) -> list[Amount | None]:
    """Keep ``rate`` of the patch tokens at each of ``blocks`` (0-based), by a named rule; None elsewhere.

    ``rate`` may be a list with one rate for each of ``blocks``, in order of depth. Where a rule speaks of powers of the
    rate, these are then products: each stage keeps its share of what the stages before it left.

    Example:
        >>> [amount.keep(196, 196) for amount in keep_rate([0.8, 0.5], [1, 3], "floor_initial_power", 4) if amount]
        [156, 78]

    Raises:
        VitrimError: no blocks, a block that does not exist, one that is named twice, or another number of rates.
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
    """An ``amount`` at each of ``blocks`` (0-based, in order), made of one of ``values``; None elsewhere.

    ``values`` is a list with one for each of ``blocks``, or one for all.

    Raises:
        VitrimError: another number of them; ``what`` they are, it says.

    Example:
        >>> at_blocks(Fuse, [8, 0.5], [1, 2], 4, "r")
        [None, Fuse(r=8, least=1), Fuse(r=0.5, least=1), None]
    """
    schedule: list[Amount | None] = [None] * num_layers
    for block, each in zip(blocks, one_each(values, len(blocks), what), strict=True):
        schedule[block] = amount(each)
    return schedule


def removed_by(initial: int, counts: Sequence[float]) -> list[int]:
    """The patches that each layer takes away of ``initial``, of so many left after it: means, taken to the nearest.

    Example:
        >>> removed_by(16, [12.4, 12.4, 8.5])
        [4, 0, 3]
    """
    whole = [initial, *(math.floor(count + 0.5) for count in counts)]
    return [before - after for before, after in pairwise(whole)]


def one_each(values: N | Sequence[N], count: int, what: str) -> tuple[N, ...]:
    """One value for each of ``count`` blocks, from as many, or from one for all.

    Raises:
        VitrimError: another number of them; ``what`` they are, it says.

    Example:
        >>> one_each(8, 3, "r"), one_each([16, 8], 2, "r")
        ((8, 8, 8), (16, 8))
    """
    each = tuple(values) if isinstance(values, Sequence) else (values,) * count
    if len(each) != count:
        raise VitrimError(f"{what} has {len(each)} values for {count} blocks: give one for all, or one each")
    return each


def check_blocks(blocks: Sequence[int], num_layers: int) -> None:
    """Refuse ``blocks`` that are empty, name a block twice, or name one that a model of ``num_layers`` lacks.

    Raises:
        VitrimError: in each of these cases; a reduction would otherwise do nothing, or not what was asked, silently.
    """
    valid = f"the model has blocks 0 to {num_layers - 1}"
    if not blocks:
        raise VitrimError(f"no blocks are given: {valid}")
    wrong = [block for block in blocks if not 0 <= block < num_layers]
    if wrong:
        raise VitrimError(f"blocks {wrong} do not exist: {valid}")
    if len(set(blocks)) < len(blocks):
        raise VitrimError(f"blocks {list(blocks)} name a block twice")


def quarter_blocks(num_layers: int) -> tuple[int, ...]:
    """The usual three stages, at a quarter, half and three quarters of the depth: blocks 3, 6, 9 of 12."""
    return tuple(sorted({num_layers * quarter // 4 for quarter in (1, 2, 3)}))
