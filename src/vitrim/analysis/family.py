"""The tables of an analysis family, and what its figures ask of them; `figures.py` draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.report import Table

TableRow = dict[str, Any]
"""A row of a table by column."""
NAMES = ("method", "method_a", "method_b")
"""Columns that hold names of records."""


@dataclass
class FamilyResult:
    """The findings of one family.

    Attributes:
        tables: empty if the family does not apply.
        notes: one line each: parts left out and why, numbers to read with care.
        arrays: data of pictures by name; the family documents the names.
        images: number of images behind the numbers, if not all of the records'.
    """

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    images: int | None = None

    def add(self, name: str, title: str, rows: Sequence[TableRow], shown: tuple[str, ...] | None = None) -> None:
        """Add a table of rows with equal columns, if there are rows; ``shown`` as in `Table`."""
        if rows:
            texts = sum(column in NAMES for column in rows[0])
            values = [tuple(row.values()) for row in rows]
            self.tables.append(Table(name, title, tuple(rows[0]), values, shown, text_columns=texts))

    @classmethod
    def joined(cls, parts: Iterable[FamilyResult]) -> FamilyResult:
        """The findings of several parts of one family."""
        whole = cls()
        for part in parts:
            whole.tables += part.tables
            whole.notes += part.notes
            whole.arrays |= part.arrays
        return whole


class Tables(dict[str, Table]):
    """All tables of a report by name; colours depend on all of them, so a figure receives them all.

    ``arrays`` are data of pictures, by family and name; empty for a report rebuilt from stored records.
    """

    def __init__(self, tables: Mapping[str, Table], arrays: Mapping[str, Mapping[str, NDArray[Any]]] | None = None):
        super().__init__(tables)
        self.arrays = arrays or {}

    @classmethod
    def of(cls, results: Mapping[str, FamilyResult]) -> Tables:
        return cls(
            {table.name: table for result in results.values() for table in result.tables},
            {family: result.arrays for family, result in results.items()},
        )


def names_of(*tables: Table) -> list[str]:
    """The record names in tables, in order of appearance."""
    columns = [table.column(name) for table in tables for name in NAMES if name in table.columns]
    return list(dict.fromkeys(name for column in columns for name in column))


def grouped(rows: Iterable[TableRow], *keys: str) -> dict[Any, list[TableRow]]:
    """Rows by their value of a key, or by the tuple of several, in order of appearance."""
    groups: dict[Any, list[TableRow]] = {}
    for row in rows:
        values = tuple(row[key] for key in keys)
        groups.setdefault(values if len(keys) > 1 else values[0], []).append(row)
    return groups


def fullest(blocks: Iterable[int], most: int) -> list[int]:
    """The ``most`` most frequent of the ``blocks`` of a table's rows, in order; ties are resolved evenly over the
    depth.

    Example:
        >>> fullest([0, 1, 1, 2, 3, 3, 3], 2), fullest([0, 1, 2, 3], 2)
        ([1, 3], [1, 3])
    """
    counts, chosen = Counter(blocks), list[int]()
    for count in sorted(set(counts.values()), reverse=True):
        equal = sorted(block for block in counts if counts[block] == count)
        left = min(most - len(chosen), len(equal))
        # The ends of equal parts: the last block is always among them.
        chosen += [equal[(number + 1) * len(equal) // left - 1] for number in range(left)]
    return sorted(chosen)


# ---- maps over the image: arrays NAME/KIND, with one map for each of NAME/blocks -------------------------------------

EXAMPLES_DRAWN = 2


def note_blocks(result: FamilyResult, asked: Sequence[int], found: Mapping[str, Iterable[int]]) -> None:
    """Store the blocks that were asked for, if any, with a note on each record of ``found`` that has no map of one."""
    if not asked:
        return
    result.arrays["drawn"] = np.array(sorted(set(asked)))
    for name, blocks in found.items():
        missing = [str(block) for block in sorted(set(asked)) if block not in set(blocks)]
        if missing:
            result.notes.append(f"{name} has no map of block {', '.join(missing)} to draw")


def drawn_blocks(arrays: Mapping[str, NDArray[Any]], name: str, most: int) -> dict[int, int]:
    """The blocks of a record to draw, each with its index among the blocks that have maps.

    ``arrays`` have ``NAME/blocks``, and ``drawn`` if blocks were requested; else at most ``most`` are drawn.
    """
    blocks: list[int] = arrays[f"{name}/blocks"].tolist()
    wanted = arrays["drawn"].tolist() if "drawn" in arrays else fullest(blocks, most)
    return {block: blocks.index(block) for block in wanted if block in blocks}


def example_maps(
    arrays: Mapping[str, NDArray[Any]], kinds: Sequence[str], methods: int, blocks: int
) -> Iterator[tuple[str, dict[int, int], NDArray[Any], list[NDArray[Any]]]]:
    """Yield maps to draw, for two images of each of the first ``methods``: method, blocks (see `drawn_blocks`), image,
    maps.

    The maps of a method are ``arrays["NAME/KIND"]`` of each of the ``kinds``, images first.
    """
    names = [name.removesuffix(f"/{kinds[0]}") for name in arrays if name.endswith(f"/{kinds[0]}")]
    for name in names[:methods]:
        shown = drawn_blocks(arrays, name, blocks)
        for example, image in enumerate(arrays["images"][:EXAMPLES_DRAWN]):
            yield name, shown, image, [arrays[f"{name}/{kind}"][example] for kind in kinds]
