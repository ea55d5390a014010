"""Proxies: does similarity to one record, the anchor, predict the accuracy of the others? "Which Tokens to Use?",
section 5.5, supplement J and K.

A family provides a table of pairs of records, with measures and the signed difference in accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vitrim.analysis.family import TableRow, Tables, names_of
from vitrim.analysis.figures import styles
from vitrim.analysis.record import Record
from vitrim.analysis.statistics import Floats, spearman_kendall
from vitrim.plots.charts import short
from vitrim.style import SMALL, TEXT, names_below, panels

FEWEST_PAIRS = 4
"""Fewest points for a rank correlation; with three points, every order is likely."""
GREY = "#9a9a9a"
RHO, TAU = "\N{GREEK SMALL LETTER RHO}", "\N{GREEK SMALL LETTER TAU}"


def scores_of(records: Sequence[Record]) -> tuple[dict[str, float], str]:
    """Top-1 by record name or, without labels, agreement with the first dense record; and the kind of score."""
    # Labels decide if all records have them: two kinds of score cannot be compared.
    correct = {record.name: record.correct() for record in records}
    if all(one is not None for one in correct.values()):
        return {name: float(np.mean(one)) for name, one in correct.items() if one is not None}, "top-1"
    dense = next((record.first() for record in records if record.header["kind"] == "none"), None)
    firsts = {record.name: record.first() for record in records}
    if dense is None or any(first is None for first in firsts.values()):
        return {}, "nothing: no labels and no dense model"
    return {name: float(np.mean(first == dense)) for name, first in firsts.items()}, "agreement"


def with_differences(
    rows: Sequence[TableRow], measures: Sequence[str], anchor: str | None = None
) -> Iterator[tuple[Any, str, Floats]]:
    """Yield block, measure and (n, 2) pairs of measure and difference, where there are enough: over all pairs or, with
    an anchor, over its pairs with the signed difference of the other record."""
    own = [row for row in rows if anchor is None or anchor in (row["method_a"], row["method_b"])]
    for block, measure in product(dict.fromkeys(row["block"] for row in own), measures):
        pairs = [
            # The difference is that of the second record of a pair: turned where the anchor is the second.
            (row[measure], row["difference" if anchor is None else "signed"] * (-1 if row["method_b"] == anchor else 1))
            for row in own
            if row["block"] == block and row[measure] is not None and row["signed"] is not None
        ]
        if len(pairs) >= FEWEST_PAIRS:
            yield block, measure, np.array(pairs)


def anchor_rows(rows: Sequence[TableRow], measures: Sequence[str], records: Sequence[Record]) -> list[TableRow]:
    """Rank correlations of the measures with the signed difference in accuracy of the others, for every record in
    enough pairs."""
    return [
        {"method": record.name, "block": block, "measure": measure, "others": len(pairs)}
        | spearman_kendall(*pairs.T)._asdict()
        for record in records
        for block, measure, pairs in with_differences(rows, measures, record.name)
    ]


def draw_anchors(tables: Tables, pairs: str, anchors: str, labels: Mapping[str, str], block: object) -> Any:
    """Scatter plots, one panel per measure and anchor: the measure against the difference in accuracy.

    ``pairs`` and ``anchors`` are names of the tables of pairs, and of `anchor_rows`; ``labels`` are of the measures, by
    column.
    """
    own = [row for row in tables[anchors].records() if row["block"] == block]
    given = [row for measure in labels for row in own if row["measure"] == measure]
    if not given:
        return None
    colour, marker = styles(tables)
    names = names_of(tables[pairs])
    figure, axes = panels(len(given), across=3, size=(2.6, 2.3), above=0.2 + 0.17 * -(-len(names) // 3))
    for axis, anchor in zip(axes, given, strict=True):
        for row in tables[pairs].records():
            ends = (row["method_a"], row["method_b"])
            if (
                row["block"] == block
                and anchor["method"] in ends
                and None not in (row["signed"], row[anchor["measure"]])
            ):
                sign, name = (1, ends[1]) if ends[0] == anchor["method"] else (-1, ends[0])
                look = {"color": colour[name], "marker": marker[name], "linestyle": "none", "markersize": 5}
                axis.plot(row[anchor["measure"]], 100 * sign * row["signed"], label=name, **look)
        axis.axhline(0, color=GREY, linewidth=0.7)
        rho = "" if anchor["spearman"] is None else f"{RHO} = {anchor['spearman']:.2f}, {TAU} = {anchor['kendall']:.2f}"
        axis.set_title(f"{short(anchor['method'])}\n{rho}", fontsize=SMALL)
        axis.set_xlabel(labels[anchor["measure"]], fontsize=TEXT)
    for axis in axes[::3]:
        axis.set_ylabel("difference, points", fontsize=TEXT)
    names_below(figure, axes, names)
    return figure
