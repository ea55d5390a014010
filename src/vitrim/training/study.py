"""The grid of "Which Tokens to Use?" (Haurum et al. 2023): a recipe per data set, method and keep rate.

Each is a row of ``recipes/study.csv`` over a base in ``recipes/study/``. Columns with a dot, ``objective`` and
``teacher`` hold values of the recipe as YAML; an empty cell keeps the base's value.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parent / "recipes" / "study.csv"
DATASETS = {"imagenet": "ImageNet", "nabirds": "NABirds", "coco": "COCO", "nuswide": "NUS-WIDE"}
"""Display names of the data sets; Table 5 has all but the first, in this order."""
RATES = (25, 50, 70, 90)
"""Keep rates in percent, in the order of the tables."""
SETTINGS = {"I": "ImageNet's settings", "D": "the dataset's baseline"}
"""The marks of Table 5."""


def names() -> tuple[str, ...]:
    """The names of the grid's recipes, in the order of the table."""
    return tuple(_rows())


def grouped(recipes: Iterable[str]) -> dict[str, list[str]]:
    """Group recipes that differ only in their keep rate, under a name in the shell's brace notation.

    Example:
        >>> grouped(["deit_small", "study/coco/topk@25", "study/coco/topk@50"])
        {'deit_small': ['deit_small'], 'study/coco/topk@{25,50}': ['study/coco/topk@25', 'study/coco/topk@50']}
    """
    found: dict[str, list[str]] = {}
    for name in recipes:
        found.setdefault(name.partition("@")[0], []).append(name)
    rates = {name: ",".join(each.partition("@")[2] for each in group) for name, group in found.items()}
    return {group[0] if len(group) == 1 else f"{name}@{{{rates[name]}}}": group for name, group in found.items()}


def study(name: str) -> dict[str, Any]:
    """The values of a recipe of the grid, nested by section, with the name of its base under ``base``.

    Example:
        >>> study("study/imagenet/topk@25")["method"]
        'topk:keep_rate=0.25'
    """
    row = _rows()[name]
    base, marks = f"study/{row['dataset']}", row["table_5"].split()
    rate, label = int(row["rate"]), f"{row['label']} on {DATASETS[row['dataset']]}"
    # Table 5 has four rates per data set except ImageNet, and marks for some of them
    place = len(RATES) * (list(DATASETS).index(row["dataset"]) - 1) + RATES.index(rate)
    mark = marks[min(place, len(marks) - 1)] if marks else ""
    extended = ", extended from a row that is cut short" if marks and place >= len(marks) else ""
    setting = f" ({mark}: {SETTINGS[mark]}{extended})" if mark else ""
    notes = f"See {base}."
    if marks and row["teacher"]:
        notes = f"The teacher is DeiT-S trained with {base}: teacher_checkpoint=PATH. See there for the rest."
    elif extended:
        notes = (
            f'Table 5 marks I or D for every rate; in the text at hand its row ends after "{" ".join(marks)}" (rates '
            "25, 50, 70, 90 of NABirds, then COCO, then NUS-WIDE), and the last mark is taken for the rest. "
            f"See {base} for all else."
        )
    options = f",{row['options']}" if row["options"] else ""
    values: dict[str, Any] = {
        "base": base,
        "paper": f"Which Tokens to Use? Table {5 if marks else 3}, {label}, r = {rate / 100:g}{setting}",
        "notes": notes,
        "method": f"{row['method']}:keep_rate={rate / 100:g}{options}",
    }
    for column, cell in row.items():
        if cell and ("." in column or column in ("objective", "teacher")):
            section, _, key = column.rpartition(".")
            inside = values.setdefault(section, {}) if section else values
            inside[key] = yaml.safe_load(cell)
    return values


def hint(name: str) -> str | None:
    """Suggest names if ``name`` is a study recipe without its keep rate."""
    method, _, _ = name.partition("@")
    rates = [rate for known, _, rate in (known.partition("@") for known in names()) if known == method]
    if not rates:
        return None
    first, *others, last = (f"@{rate}" for rate in rates)
    return f"{method} is a recipe for each keep rate: {', '.join([f'{method}{first}', *others])} or {last}"


@cache
def _rows() -> dict[str, dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {f"study/{row['dataset']}/{row['method']}@{row['rate']}": row for row in csv.DictReader(file)}
