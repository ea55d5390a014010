"""The output of ``vitrim tune``: tables, notes and pictures of searches and sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrim.cli import common
from vitrim.cli.setup import Record

if TYPE_CHECKING:
    from torch import nn

    from vitrim.tuning import Front, Result
    from vitrim.tuning.finder import Trial
    from vitrim.tuning.sweep import Swept

PROXIES = ("feature", "kl", "cosine", "agree")
HEADS = {"agree": "disagree"}
"""Heads of columns that show not what the option names but the damage that is minimised."""
SHOWN = 20
"""Rows of a grid's table, at most; the files have all."""


def show(result: Result, model: nn.Module, out: Path, record: Record) -> None:
    """Print the constant setting next to the searched one, and which is returned; of a race, all methods."""
    from rich.markup import escape

    console, outcome = record.console(), result.outcome
    if result.race:
        _show_race(result, record)
    checked = bool(outcome.levels)
    scores = [outcome.levels.get(label, trial.scores) for label, trial in _pair(result)]
    names = [name for name in PROXIES if name in scores[0]]
    rows = [
        [label, escape(trial.config.describe()), f"{100 * trial.share:.1f}", *(f"{values[n]:.4f}" for n in names)]
        for (label, trial), values in zip(_pair(result), scores, strict=True)
    ]
    common.print_table(
        console, "", ["setting", "method", f"{result.cost.unit} %", *_heads(names)], rows, text_columns=2
    )
    notes = [
        f"means over the {'check' if checked else 'search'} images, less is better; {result.cost.unit} as a share of "
        "the dense model's"
        + (f" on {result.about['engine']}" if "engine" in result.about else "")
        + (f", predicted with a mean error of {result.cost.error:.1%}" if result.cost.error else ""),
        *_timed(result),
        f"returned: {result.verdict}",
        f"use it as -m @{out / 'best.json'}",
    ]
    _say(record, notes + _draw_schedule(result, model, out / "schedule.png"))


def _timed(result: Result) -> list[str]:
    """A line on how fast the settings were, where the search only predicted it."""
    best = result.best.measured
    if best is None:
        return []
    others = [f"{label} {1 / trial.measured:.2f}" for label, trial in _pair(result) if trial.measured is not None]
    within = best <= result.target.limit * (1.0 + result.cost.error)
    return [
        f"measured speed over dense: {', '.join(others)}; asked for {result.target.value:g}"
        + ("" if within else ", which the returned setting misses by more than the error of predictions")
    ]


def _heads(names: Sequence[str]) -> list[str]:
    return [HEADS.get(name, name) for name in names]


def _pair(result: Result) -> list[tuple[str, Trial]]:
    return [("constant", result.outcome.constant), ("searched", result.outcome.searched)]


def _show_race(result: Result, record: Record) -> None:
    from rich.markup import escape

    rows = []
    for row in result.race:
        behind = "" if row.behind is None else f"{row.behind.mean:+.4f} +- {row.behind.error:.4f}"
        setting = escape(row.note if row.config is None else row.config.describe())
        share = "" if row.share is None else f"{100 * row.share:.1f}"
        score = "" if row.score is None else f"{row.score:.4f}"
        rows.append([escape(row.method), row.state, setting, share, str(row.images or ""), score, behind])
    columns = [
        "method",
        "state",
        "best setting",
        f"{result.cost.unit} %",
        "raced on",
        *_heads([result.proxy]),
        "behind the leader",
    ]
    common.print_table(record.console(), "", columns, rows, text_columns=3)
    note = (
        f"{result.proxy}: mean over the images of the race, of methods that were searched over the selection images; "
        "behind: paired difference at the end of the race"
    )
    _say(record, [note])


def show_front(found: Front, model: nn.Module, out: Path, files: Sequence[Path], record: Record) -> None:
    from rich.markup import escape

    proxy, names = found.results[0].proxy, [name for name in PROXIES if name in found.points[0].scores]
    rows = [
        [
            *(one.target, one.setting, escape(one.config.describe()), "*" if one.on_front else ""),
            *("yes" if one.returned else "", f"{100 * one.share:.1f}", *(f"{one.scores[name]:.4f}" for name in names)),
        ]
        for one in found.points
    ]
    unit = found.results[0].cost.unit
    columns = ["target", "setting", "method", "front", "returned", f"{unit} %", *_heads(names)]
    common.print_table(record.console(), "", columns, rows, text_columns=5)
    notes = ["means over the check images, less is better; front: no other is as cheap and does as little damage"]
    notes += [f"{result.target}: {result.verdict}" for result in found.results]
    notes += [f"use them as {', '.join(f'-m @{file}' for file in files)}"]
    if _can_draw():
        from vitrim.plots.tuning import plot_front

        points = [(one.setting, one.share, one.scores[proxy]) for one in found.points]
        front = [(one.share, one.scores[proxy]) for one in found.points if one.on_front]
        cost = "MACs" if unit == "macs" else unit
        plot_front(points, out / "front.png", front=front, cost=cost, damage=proxy)
        notes.append(f"picture: {out / 'front.png'}")
        for result, file in zip(found.results, files, strict=True):
            notes += _draw_schedule(result, model, file.with_suffix(".png"))
    _say(record, notes)


def show_sweep(found: Swept, out: Path, about: dict[str, Any], record: Record) -> None:
    from rich.markup import escape

    found.save(out, about)
    best = found.best()
    numbers = [name for name, value in best[0].items() if isinstance(value, float) and name != "epoch"]
    rows = [
        [*(escape(row["values"][key]) for key in found.grid.axes), *(f"{100 * row[name]:.2f}" for name in numbers)]
        for row in best[:SHOWN]
    ]
    common.print_table(record.console(), "", [*found.grid.axes, *numbers], rows, text_columns=len(found.grid.axes))
    kept = "that no other dominates" if "share" in best[0] else f"best {found.metric} first"
    notes = [
        f"in %; {len(rows)} of {len(found.rows)} points, {kept}; all of them: {out / 'grid.csv'}, {out / 'grid.json'}"
    ]
    table = found.table()
    if table is not None and _can_draw():
        from vitrim.plots.tuning import plot_heat

        values, down, across = table
        percent = [[100 * value for value in row] for row in values]
        others = ", best over the other options" if len(found.varied) > 2 else ""
        plot_heat(percent, down, across, out / "grid.png", label=f"{found.metric}, %{others}")
        notes.append(f"picture: {out / 'grid.png'}")
    _say(record, notes)
    record.write("tune --grid", **about, metric=found.metric, rows=[dict(row) for row in found.rows])


def _draw_schedule(result: Result, model: nn.Module, file: Path) -> list[str]:
    """Draw the tokens per block of the best setting against the constant one, and say where."""
    from vitrim.tuning import Space

    settings = {"constant": result.outcome.constant.config, "searched": result.outcome.searched.config}
    counts = {name: Space.of(model, config).counts(config) for name, config in settings.items()}
    if not _can_draw() or None in counts.values():
        return []  # counts that follow from the images have no one schedule
    from vitrim.plots.tuning import plot_schedule

    patches = Space.of(model, settings["constant"]).patches
    names = {name: f"{name}: {config.name}" for name, config in settings.items()}
    plot_schedule({names[name]: found or [] for name, found in counts.items()}, patches, file, title=str(result.target))
    return [f"picture: {file}"]


def _can_draw() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def _say(record: Record, notes: Sequence[str]) -> None:
    for note in notes:
        record.console().print(note, markup=False, highlight=False, soft_wrap=True)
