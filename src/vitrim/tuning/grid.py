"""Grids: every combination of some options of a method, or of some values of a recipe.

    atm:alpha=0.945..1.0/0.005,beta=0|0.02|0.045       all of these options, beside each other
    optimizer.lr=1e-2|1e-3|1e-4                        one value of a recipe; several such texts are combined

A range START..STOP/STEP includes its end. The sweeps of the papers have names; they are in ``grids.yaml``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vitrim.core.method import MethodConfig
from vitrim.core.registry import make_method, read_value, split_options
from vitrim.errors import VitrimError, unknown

MOST = 10_000
"""Points of a grid that are tried without being asked for a number."""

FILE = Path(__file__).parent / "grids.yaml"

Values = dict[str, str]
"""One value, as text, for every option."""


@dataclass(frozen=True)
class Grid:
    """Options and the values they take.

    Attributes:
        method: the method they are of; None for values of a recipe.
        axes: the texts of the values, by option.
    """

    method: str | None
    axes: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        return int(np.prod([len(values) for values in self.axes.values()], dtype=np.int64))

    def points(self, number: int | None = None, seed: int = 0) -> list[Values]:
        """All combinations, the last option fastest, or so many of them drawn at random, in their order.

        Raises:
            VitrimError: more than 10,000, and no number.

        Example:
            >>> [list(point.values()) for point in parse(["tome:r=4..8/4,last_block=full|auto"]).points()]
            [['4', 'full'], ['4', 'auto'], ['8', 'full'], ['8', 'auto']]
        """
        if number is None and len(self) > MOST:
            raise VitrimError(f"the grid has {len(self)} points: say with --evaluations how many of them to try")
        places = np.arange(len(self))
        if number is not None and number < len(self):
            places = np.sort(np.random.default_rng(seed).choice(len(self), number, replace=False))
        shape = tuple(len(values) for values in self.axes.values())
        return [
            {key: values[place] for (key, values), place in zip(self.axes.items(), point, strict=True)}
            for point in zip(*(each.tolist() for each in np.unravel_index(places, shape)), strict=True)
        ]

    def config(self, point: Values) -> MethodConfig:
        """The method at a point."""
        assert self.method is not None
        return make_method(self.method, **{key: read_value(text, key) for key, text in point.items()})


@cache
def ready() -> dict[str, dict[str, Any]]:
    """The sweeps of the papers by name: ``paper``, ``grid`` (texts), and ``train`` (a recipe) where they train.

    Example:
        >>> len(parse(ready()["atm"]["grid"]))
        2880
    """
    return dict(yaml.safe_load(FILE.read_text(encoding="utf-8")))


def texts_of(given: Sequence[str]) -> list[str]:
    """The texts with the names of ready grids replaced by what these are.

    Raises:
        VitrimError: a name that there is not.
    """
    found: list[str] = []
    for text in given:
        if "=" in text:
            found.append(text)
        elif text in ready():
            found += ready()[text]["grid"]
        else:
            raise unknown("grid", text, ready())
    return found


def parse(texts: Sequence[str], *, recipe: bool = False) -> Grid:
    """The grid of one method, or with ``recipe`` of values of a recipe.

    Raises:
        VitrimError: text of another form, an option that is given twice, or several methods.

    Example:
        >>> parse(["atm:alpha=0.98..1.0/0.01,beta=0|0.02"]).axes
        {'alpha': ('0.98', '0.99', '1'), 'beta': ('0', '0.02')}
        >>> parse(["optimizer.lr=1e-2|1e-3", "epochs=1"], recipe=True).axes
        {'optimizer.lr': ('1e-2', '1e-3'), 'epochs': ('1',)}
    """
    axes: dict[str, tuple[str, ...]] = {}
    method: str | None = None
    if not recipe:
        if texts and not any(":" in text.partition("=")[0] for text in texts):
            raise VitrimError(
                f"{texts[0]} is a value of a recipe or nothing that is known: give --train RECIPE too, or write the "
                "grid of a method, e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02"
            )
        if len(texts) != 1:
            raise VitrimError(f"a grid is of one method, got {len(texts)}: {', '.join(texts)}")
        method, colon, rest = texts[0].partition(":")
        if not colon or "=" in method:
            raise VitrimError(f"cannot read the grid '{texts[0]}': write e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02")
        parts, method = split_options(rest), method.strip()
    else:
        parts = list(texts)
    for part in parts:
        key, equals, text = part.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise VitrimError(f"cannot read '{part}' of the grid: write e.g. key=1|2|3 or key=0.8..1.0/0.05")
        if key.strip() in axes:
            raise VitrimError(f"'{key.strip()}' is given twice in the grid")
        axes[key.strip()] = _values(text.strip())
    return Grid(method, axes)


def _values(text: str) -> tuple[str, ...]:
    """The values between bars, ranges spelled out, none of them twice."""
    found = list(itertools.chain.from_iterable(_range(one.strip()) for one in text.split("|")))
    if "" in found:
        raise VitrimError(f"a value is missing in '{text}' of the grid: write e.g. 0|0.02|0.045")
    return tuple(dict.fromkeys(found))


def _range(text: str) -> list[str]:
    """A range as its values; anything else as it is."""
    ends, slash, step_text = text.partition("/")
    start_text, dots, stop_text = ends.partition("..")
    if not dots or text.startswith("["):
        return [text]
    try:
        start, stop = Decimal(start_text), Decimal(stop_text)
        step = Decimal(step_text) if slash else Decimal(1)
    except InvalidOperation:
        raise VitrimError(f"cannot read the range '{text}': write START..STOP/STEP, e.g. 0.8..1.0/0.05") from None
    if not (start.is_finite() and stop.is_finite() and step.is_finite()) or step <= 0 or stop < start:
        raise VitrimError(f"the range '{text}' does not rise: write START..STOP/STEP with a step above 0")
    number = int((stop - start) / step)
    if number > MOST:
        raise VitrimError(f"the range '{text}' has {number + 1} values, at most {MOST} are tried")
    return [f"{(start + place * step).normalize():f}" for place in range(number + 1)]
