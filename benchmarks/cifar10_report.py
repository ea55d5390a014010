"""The tables of a record that benchmarks/cifar10.py wrote, as Markdown; of `cuts` also a figure.

    python benchmarks/cifar10_report.py cuts.json --figure docs/images/cifar10_all_methods.png

The tables go to standard output.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from script import from_shell
from vitrim.core.registry import parse_method
from vitrim.plots.charts import plot_accuracy_over_macs

Row = dict[str, Any]

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "method": ("method", lambda value: f"`{value}`"),
    "before": ("top-1 % without training", "{:.2f}".format),
    "after": ("after it", "{:.2f}".format),
    "top1": ("top-1 %", "{:.2f}".format),
    "change": ("change", "{:+.2f}".format),
    "error": ("standard error", "{:.2f}".format),
    "printed": ("change as printed", "{:+.2f}".format),
    "spread": ("range", str),
    "agreement": ("agrees with dense %", "{:.1f}".format),
    "kl": ("KL", "{:.3f}".format),
    "cosine": ("cosine", "{:.3f}".format),
    "macs_saved": ("MACs saved %", "{:.1f}".format),
    "gmacs": ("GMACs", "{:.2f}".format),
    "printed_gmacs": ("as printed", "{:.2f}".format),
    "images_per_second": ("images/s", "{:.0f}".format),
    "speedup": ("speed-up", "{:.2f}".format),
    "minutes": ("minutes", "{:.0f}".format),
}
"""Heading and format of every column that is shown."""


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a table, the columns in the order of `COLUMNS`; what a row lacks is empty."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    lines = [f"| {' | '.join(COLUMNS[key][0] for key in keys)} |", "|" + "---|" * len(keys)]
    lines += [f"| {' | '.join(_cell(row, key) for key in keys)} |" for row in rows]
    return "\n".join(lines)


def _cell(row: Row, key: str) -> str:
    value = row.get(key)
    return "" if value is None else COLUMNS[key][1](value)


def by_cut(rows: Sequence[Row]) -> dict[float, list[Row]]:
    """The rows of every cut, with the range of those that were drawn with several seeds."""
    cuts: dict[float, list[Row]] = {}
    for row in with_spread(rows, "top1_range"):
        cuts.setdefault(row["cut"], []).append(row)
    return cuts


def with_spread(rows: Sequence[Row], key: str) -> list[Row]:
    """The rows, those of several seeds with their range, which is under ``key``."""
    spreads = [{"spread": f"{row[key]:.2f} over {row['seeds']} seeds"} if row["seeds"] > 1 else {} for row in rows]
    return [{**row, **spread} for row, spread in zip(rows, spreads, strict=True)]


def overview(rows: Sequence[Row]) -> str:
    """Top-1 of every method at every cut."""
    top1: dict[str, dict[float, float]] = {}
    for row in rows:
        top1.setdefault(_name(row), {})[row["cut"]] = row["top1"]
    cuts = sorted({row["cut"] for row in rows})
    lines = [f"| top-1 % at | {' | '.join(f'{100 * cut:.0f} % fewer MACs' for cut in cuts)} |"]
    lines.append("|" + "---|" * (len(cuts) + 1))
    for name in ranked(rows):
        cells = [f"{top1[name][cut]:.1f}" if cut in top1[name] else "" for cut in cuts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ranked(rows: Sequence[Row]) -> list[str]:
    """The methods, best first at the cut of a half, or at the largest there is."""
    cuts = {row["cut"] for row in rows}
    shown = 0.5 if 0.5 in cuts else max(cuts)
    found = {_name(row): row["top1"] for row in rows if row["cut"] == shown}
    return sorted({_name(row) for row in rows}, key=lambda name: (-found.get(name, 0.0), name))


def _name(row: Row) -> str:
    return str(row["method"]).partition(":")[0]


TITLE = "CIFAR-10 ViT, without retraining: 10,000 test images (dashed: pruning)"


def figure(rows: Sequence[Row], path: Path, title: str = TITLE) -> None:
    """Top-1 over MACs; lines of methods that only prune are dashed."""
    dense = next(row for row in rows if row["method"] == "dense")
    order = ranked(rows)
    reduced = sorted((row for row in rows if row["method"] != "dense"), key=lambda row: order.index(_name(row)))
    points = [(_name(row), 100 - row["macs_saved"], row["top1"] / 100) for row in reduced]
    pruning = {_name(row) for row in reduced if parse_method(row["method"]).kind == "prune"}
    plot_accuracy_over_macs(
        points,
        (100.0, dense["top1"] / 100),
        path,
        title=title,
        dashed=pruning,
    )


def sweep(rows: Sequence[Row]) -> str:
    """A table of ATM's sweep for every theta_min: top-1 and fewer MACs by alpha (down) and beta (across)."""
    found = {_atm(row): row for row in rows if row["method"] != "dense"}
    alphas, betas, floors = (sorted({key[place] for key in found}) for place in range(3))
    tables = []
    for floor in floors:
        lines = [f"| theta_min = {floor:g} | {' | '.join(f'beta = {beta:g}' for beta in betas)} |"]
        lines.append("|" + "---|" * (len(betas) + 1))
        for alpha in reversed(alphas):
            cells = [found[alpha, beta, floor] for beta in betas]
            shown = [f"{cell['top1']:.2f} at {cell['macs_saved']:.0f} % fewer" for cell in cells]
            lines.append(f"| alpha = {alpha:g} | {' | '.join(shown)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _atm(row: Row) -> tuple[float, float, float]:
    config: Any = parse_method(row["method"])
    return config.alpha, config.beta, config.theta_min


def report(command: str, rows: Sequence[Row]) -> str:
    """All tables of the record of a ``command`` of benchmarks/cifar10.py: cuts, stress, atm or finetune."""
    if command == "atm":
        return sweep(rows)
    if command == "finetune":
        return markdown(with_spread(rows, "after_range"))
    if command == "stress":
        return markdown(rows)
    tables = [f"About {100 * cut:.0f} % fewer MACs:\n\n{markdown(found)}" for cut, found in by_cut(rows).items()]
    return "\n\n".join([overview(rows), *tables])


def main() -> None:
    """Print a record's tables and draw its figure."""
    parser = argparse.ArgumentParser(description="The tables of a record of benchmarks/cifar10.py.")
    parser.add_argument("record", type=Path, help="what it wrote with --json")
    parser.add_argument("--figure", type=Path, help="of `cuts`: the file to draw top-1 over MACs into")
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text())
    rows = record["rows"]
    print(report(record["command"].removeprefix("cifar10 "), rows))
    if arguments.figure is not None:
        figure(rows, arguments.figure)


if __name__ == "__main__":
    from_shell(main)
