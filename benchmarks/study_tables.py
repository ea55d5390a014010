"""Tables and figures of a study, from records alone: `study_records.py` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vitrim.analysis.families import results_of
from vitrim.analysis.families.depth import MeanDepth, depth_map, emd, js_bits, kl_bits, mean_depth, pcc, scc, sim
from vitrim.analysis.families.features import cca, cka, procrustes
from vitrim.analysis.families.patterns import iou, patterns, v_measure
from vitrim.analysis.output import write_report, write_tables
from vitrim.analysis.record import Record, titled
from vitrim.analysis.statistics import spearman_ci, spearman_kendall
from vitrim.errors import VitrimError
from vitrim.files import write_text
from vitrim.plots.charts import Line, heat, line
from vitrim.plots.style import SMALL, TEXT, below, colours, markers, method_of, panels, save, sheet
from vitrim.report import Table, cell

DENSE, TOPK, KMEDOIDS = "dense", "topk", "kmedoids"
FIXED = ("l1", "l2", "linf", "random")
MOST = 100
"""Rows of a table that is written out in Markdown."""
MAPS = {
    "kl_bits_ab": kl_bits,
    "kl_bits_ba": lambda a, b: kl_bits(b, a),
    "js_bits": js_bits,
    "pcc": pcc,
    "scc": scc,
    "sim": sim,
    "emd_patches": emd,
}
"""The measures between two averaged maps."""


def of_rate(records: Sequence[Record], rate: float) -> list[Record]:
    """The dense record and those of one keep rate."""
    return [record for record in records if record.header.get("rate", rate) == rate]


def write_parts(folder: Path, tables: Sequence[Table], figures: Mapping[str, Any]) -> None:
    """Write ``tables/*.csv``, ``figures/*.png`` and ``study.md`` with the short tables."""
    lines = ["# Tables of the study"]
    for table in tables:
        write_text(folder / "tables" / f"{table.name}.csv", table.csv())
        lines += ["", f"## {table.title}", "", f"{len(table.rows)} rows: tables/{table.name}.csv"]
        if len(table.rows) <= MOST:
            lines += ["", *markdown(table)]
    for name, figure in figures.items():
        save(figure, folder / "figures" / f"{name}.png")
    write_text(folder / "study.md", "\n".join(lines) + "\n")


def markdown(table: Table) -> Iterator[str]:
    """The lines of a table in Markdown."""
    names = table.columns if table.shown is None else table.shown
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in zip(*map(table.column, names), strict=True):
        yield "| " + " | ".join(map(cell, row)) + " |"


def write_reports(folder: Path, records: Sequence[Record], rates: Sequence[float], found: Mapping[str, Any]) -> None:
    """The report of `vitrim analyze` over all methods at one rate, in ``rate_RATE/``, for each rate."""
    for rate in rates:
        own = of_rate(records, rate)
        results, place = results_of(own), folder / f"rate_{rate}"
        summary = {"command": "study", **found, "records": [dict(one.header) for one in own]}
        write_tables(place, results, summary)
        write_report(place, results, found)


# ---- one data set, one model -----------------------------------------------------------------------------------------


def accuracy(records: Sequence[Record]) -> Table:
    """Top-1 with its standard error against the dense model's, agreement and likeness to it, of every record."""
    columns = ("method", "rate", "images", "tokens", "top1", "change", "change_error", "agreement", "cosine", "kl_nats")
    dense, rows = records[0], []
    for record in records:
        right, was = correct(record), correct(dense)
        change = 100 * (right - was)
        error = float(change.std(ddof=1) / len(change) ** 0.5)
        agreement = 100 * float((record.first() == dense.first()).mean())
        near = float(record.arrays["head_cosine"].mean()), float(record.arrays["kl"].mean())
        name, rate = method_of(record.name), record.header.get("rate")
        tokens, top1 = float(record.tokens()[:, -1].mean()), 100 * float(right.mean())
        rows.append((name, rate, len(record), tokens, top1, float(change.mean()), error, agreement, *near))
    return Table("accuracy", "Accuracy of every method at every keep rate", columns, rows)


def correct(record: Record) -> Any:
    """(I,) 1.0 where the first class is the label.

    Raises:
        VitrimError: the record has no labels of the model's classes.
    """
    found = record.correct()
    if found is None:
        raise VitrimError(f"the record of {record.name} has no labels, which accuracy needs")
    return found.astype(float)


def across_rates(records: Sequence[Record]) -> list[Table]:
    """The patterns of every pair of rates of each method: overlap of what is kept, agreement of what is merged."""
    found: dict[str, list[Table]] = {}
    for name in dict.fromkeys(method_of(record.name) for record in records[1:]):
        own = titled([record for record in records[1:] if method_of(record.name) == name])
        for table in patterns(sorted(own, key=lambda one: -one.header["rate"])).tables:
            found.setdefault(table.name, []).append(table)
    titles = {"overlap": "Kept patches across rates of one method", "clusters": "Clusters across rates of one method"}
    return [
        replace(parts[0], name=f"rates_{name}", title=titles[name], rows=[row for part in parts for row in part.rows])
        for name, parts in found.items()
    ]


def last(record: Record, *, merged: bool) -> Any:
    """(I, P), the clusters after the last block that changed them, or the patches that are kept."""
    return record.labels()[:, -1] if merged else record.kept()[:, -1]


def anchored(records: Sequence[Record]) -> Table:
    """Rank correlation of likeness to an anchor with the signed difference in accuracy from it, over all settings.

    Features are compared with the dense model, Top-K and K-Medoids, kept patches with Top-K and clusters with
    K-Medoids, each at every rate (the paper's section 5.5).
    """
    columns = ("anchor", "measure", "settings", "spearman", "spearman_low", "spearman_high", "kendall")
    rows: list[tuple[Any, ...]] = []
    for anchor in (record for record in records if method_of(record.name) in (DENSE, TOPK, KMEDOIDS)):
        others = [record for record in records[1:] if method_of(record.name) != method_of(anchor.name)]
        for name, measure, able in _likenesses(anchor):
            usable = [other for other in others if able(other)]
            pairs = np.array([(measure(other), _gap(other, anchor)) for other in usable])
            if len(pairs) < 3:
                continue
            ranks, (low, high) = spearman_kendall(*pairs.T), spearman_ci(pairs)
            rows.append((anchor.name, name, len(pairs), ranks.spearman, float(low), float(high), ranks.kendall))
    return Table("anchors", "Likeness to an anchor against the difference in accuracy", columns, rows)


def _likenesses(anchor: Record) -> Iterator[tuple[str, Any, Any]]:
    """The measures that an anchor takes part in: name, function of the other record, and whether it can be had."""
    own = anchor.feature(None)
    for name, distance in (("procrustes", procrustes), ("cka", cka), ("pwcca", lambda a, b: cca(a, b).pwcca_ab)):
        if name != "pwcca" or len(own) >= 2 * own.shape[1]:
            yield name, partial(_distance, distance, own), lambda other: True
    if method_of(anchor.name) == TOPK:
        kept = last(anchor, merged=False)
        yield "iou", lambda other: iou(kept, last(other, merged=False)).mean(), lambda other: "kept" in other.arrays
    if method_of(anchor.name) == KMEDOIDS:
        labels = last(anchor, merged=True)
        merging = ("merge", "mixed", "soft")
        yield (
            "nmi",
            lambda other: v_measure(labels, last(other, merged=True)).mean(),
            lambda other: other.header["kind"] in merging,
        )


def _distance(measure: Any, own: Any, other: Record) -> float:
    return float(measure(own, other.feature(None)))


def _gap(record: Record, anchor: Record) -> float:
    return 100 * float(correct(record).mean() - correct(anchor).mean())


def draw_accuracy(table: Table) -> Any:
    """Top-1 over the keep rate: methods that prune beside the fixed patterns, and methods that merge."""
    rows = [row for row in table.records() if row["rate"] is not None]
    dense = next(row["top1"] for row in table.records() if row["rate"] is None)
    names = list(dict.fromkeys(row["method"] for row in rows))
    colour, shape = colours(names), markers(names)
    pruning = [name for name in names if name in (*FIXED, TOPK, "evit", "ats")]
    figure, axes = panels(2, across=2, size=(3.9, 3.2), above=0.8)
    handles = {}
    for axis, shown in zip(axes, (pruning, [name for name in names if name not in pruning]), strict=True):
        for name in shown:
            own = sorted((row for row in rows if row["method"] == name), key=lambda row: row["rate"])
            given = Line([row["rate"] for row in own], [row["top1"] for row in own])
            handles[name] = line(axis, given, colour=colour[name], marker=shape[name], label=name)
            handles[name].set_linestyle("--" if name in FIXED else "-")
        axis.axhline(dense, color="black", linewidth=1)
        axis.set_title("pruning; fixed and random dashed" if shown is pruning else "merging", fontsize=TEXT)
        axis.set_xlabel("keep rate per stage", fontsize=TEXT)
        axis.set_ylim(0, 1.05 * max(1.0, dense, *(row["top1"] for row in rows)))
    axes[0].set_ylabel("top-1 accuracy, % (black: dense)", fontsize=TEXT)
    below(figure, list(handles.values()), 5)
    return figure


# ---- several data sets, or several models ----------------------------------------------------------------------------


def averaged(record: Record) -> MeanDepth:
    """The mean depth of every patch."""
    return mean_depth(depth_map(record.kept(), record.blocks, record.header["num_layers"]))


def across_data(groups: Mapping[str, Sequence[Record]]) -> Table:
    """Likeness of averaged maps of depth: the same setting on two data sets, and two methods on one data set.

    Fixed patterns are left out of the first: they are the same on all data, and so are random ones of one seed.
    """
    columns = ("compared", "method_a", "data_a", "method_b", "data_b", "rate", "images_a", "images_b", *MAPS)
    maps = {
        (data, record.name): (record, averaged(record).mean.reshape(record.header["grid"]))
        for data, records in groups.items()
        for record in records
        if "kept" in record.arrays and record.blocks
    }
    rows: list[tuple[Any, ...]] = []
    for ((data_a, name_a), (a, one)), ((data_b, name_b), (b, other)) in combinations(maps.items(), 2):
        same = method_of(name_a) == method_of(name_b)
        alike = method_of(name_a) in FIXED if same else data_a != data_b
        if a.header["rate"] != b.header["rate"] or alike:
            continue
        compared = "data sets" if same else "methods"
        measures = [measure(one, other) for measure in MAPS.values()]
        key = (compared, method_of(name_a), data_a, method_of(name_b), data_b, a.header["rate"])
        rows.append((*key, len(a), len(b), *measures))
    return Table("maps", "Averaged maps of depth compared", columns, rows)


def means(table: Table, names: Sequence[str]) -> Table:
    """The mean of every measure over the rows that agree in ``names``, with their number."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table.records():
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    rows = [(*key, len(own), *(_mean([row[name] for row in own]) for name in MAPS)) for key, own in groups.items()]
    return Table(f"{table.name}_{names[-1]}", f"{table.title}: means", (*names, "pairs", *MAPS), rows)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def draw_maps(groups: Mapping[str, Sequence[Record]], rate: float) -> Any:
    """Averaged maps of depth, a row per method and a column per data set, one colour scale per row."""
    found: dict[str, dict[str, MeanDepth]] = {}
    for data, records in groups.items():
        own = [one for one in records[1:] if one.header["rate"] == rate and "kept" in one.arrays]
        found[data] = {one.name: averaged(one) for one in own}
    names = list(next(iter(found.values())))
    figure = sheet(1.55 * len(found) + 1.6, 1.5 * len(names) + 0.3)
    axes = figure.subplots(len(names), len(found), squeeze=False)
    sides = {data: records[0].header["grid"] for data, records in groups.items()}
    for number, (row, name) in enumerate(zip(axes, names, strict=True)):
        limits = [(float(own[name].mean.min()), float(own[name].mean.max())) for own in found.values()]
        span = (min(low for low, _ in limits), max(high for _, high in limits))
        for axis, (data, own) in zip(row, found.items(), strict=True):
            image = heat(axis, own[name].mean.reshape(sides[data]), limits=span)
            if number == 0:
                axis.set_title(data, fontsize=TEXT)
        row[0].set_ylabel(method_of(name), fontsize=TEXT)
        figure.colorbar(image, ax=row.tolist(), shrink=0.85, aspect=12).ax.tick_params(labelsize=SMALL)
    return figure


def across_models(groups: Mapping[str, Sequence[Record]]) -> list[Table]:
    """The patterns of every method at every rate between two models of one grid and depth."""
    found: dict[str, list[Table]] = {}
    for (one, first), (other, second) in combinations(groups.items(), 2):
        for a, b in zip(first[1:], second[1:], strict=True):
            pair = [replace(each, header={**each.header, "model": model}) for each, model in ((a, one), (b, other))]
            for table in patterns(titled(pair)).tables:
                found.setdefault(table.name, []).append(table)
    titles = {"overlap": "Kept patches across models", "clusters": "Clusters across models"}
    return [
        replace(parts[0], name=f"models_{name}", title=titles[name], rows=[row for part in parts for row in part.rows])
        for name, parts in found.items()
    ]
