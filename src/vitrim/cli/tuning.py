"""The work of ``vitrim tune``: searches for a target or a front, sweeps of a grid; their tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.measuring import task_and_data
from vitrim.cli.setup import Data, Machine, Model, Record, Setup
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from torch import nn

    from vitrim.core.config import MethodConfig
    from vitrim.tune import Front, Result
    from vitrim.tune.finder import Trial
    from vitrim.tune.search import Options
    from vitrim.tune.sweep import Swept

IMAGES = 3 * 2048
"""Images that are read where --limit does not say: 2,048 each for searching, selecting and checking."""

PROXIES = ("feature", "kl", "cosine", "agree")
SHOWN = 20
"""Rows of a grid's table, at most; the files have all."""


# ---- options ---------------------------------------------------------------------------------------------------------

Evaluations = Annotated[
    int | None,
    typer.Option("--evaluations", min=1, max=100_000, help="most settings to try; default 60, of a grid all"),
]
ProxyName = Annotated[
    str, typer.Option("--proxy", help="the damage that is minimised: feature, kl, cosine or agree (1 - agreement)")
]
SearchName = Annotated[
    str, typer.Option("--search", help="where settings come from: evolution, random, or optuna's gp or tpe")
]
Out = Annotated[Path, typer.Option("--out", help="folder for the results and study.jsonl")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the study in --out")]


@dataclass(frozen=True, kw_only=True)
class Effort(Setup):
    """The way a search is made, and where it leaves its files."""

    evaluations: Evaluations = None
    proxy: ProxyName = "feature"
    search: SearchName = "evolution"
    batch_size: common.BatchSize = 32
    workers: common.Workers = 0
    out: Out = Path("tuned")
    resume: Resume = False


def parse_methods(methods: Sequence[str]) -> list[MethodConfig] | None:
    """The methods; None for all that need no training.

    Raises:
        VitrimError: an unknown one, or others beside all.
    """
    if "all" not in methods:
        return common.parse_methods(methods)
    if len(methods) > 1:
        raise VitrimError("-m all has the other methods already: leave them out")
    return None


# ---- what is done ----------------------------------------------------------------------------------------------------


def find(
    model: Model,
    data: Data,
    methods: Sequence[str],
    target: str | None,
    front: str | None,
    effort: Effort,
    machine: Machine,
    record: Record,
) -> None:
    """Search for a target, or for several."""
    from vitrim import tune
    from vitrim.tune.fitting import training_free
    from vitrim.tune.proxy import DatasetImages, check_proxy
    from vitrim.tune.strategies import make_strategy

    targets, configs = _targets(target, front), parse_methods(methods)
    check_proxy(effort.proxy), make_strategy(effort.search)
    dense, processes = _start(model, effort, machine)
    if configs is None:
        configs = training_free(dense, counted=targets[0].kind == "speedup")
    task, dataset = task_and_data(dense, model, data, None)
    each = max((data.limit or IMAGES) // 3, 1)
    batch_size = task.eval_batch(effort.batch_size)
    images = DatasetImages(dataset, each, batch_size, workers=effort.workers, collate=task.collate)
    about = {"data": data.source, "split": dataset.split, "device": machine.device, "weights": model.weights}
    evaluations = effort.evaluations or 60
    with _progress(evaluations * len(targets), effort.proxy, shown=processes.index == 0) as told:
        options: Options = {
            "task": task, "proxy": effort.proxy, "evaluations": evaluations, "strategy": effort.search,
            "seed": machine.seed, "study": effort.out / "study.jsonl", "resume": effort.resume, "about": about,
            "processes": processes, "on_trial": told,
        }  # fmt: skip
        found = tune.front(dense, configs, images, targets=targets, **options) if front else None
        result = None if found else tune.search(dense, configs, images, target=targets[0], **options)
    if processes.index > 0:
        return
    facts = {"model": model.name, "environment": machine.environment("float32"), "processes": processes.count}
    if result is not None:
        result.save(effort.out / "best.json")
        _show(result, dense, effort.out, record)
        record.write("tune", **facts, **result.record())
    if found is not None:
        files = found.save(effort.out)
        _show_front(found, dense, effort.out, files, record)
        record.write("tune --front", **facts, **found.record())


def sweep_grid(
    model: Model, data: Data, texts: Sequence[str], effort: Effort, machine: Machine, record: Record
) -> None:
    """Evaluate a method at the points of a grid."""
    from vitrim.tune import grid as grids
    from vitrim.tune.sweep import sweep

    grid = grids.parse(grids.texts_of(texts))
    for point in grid.points(1):
        grid.config(point)
    number = len(grid.points(effort.evaluations, machine.seed))
    dense, processes = _start(model, effort, machine)
    task, dataset = task_and_data(dense, model, data, None)
    about = {"data": data.source, "split": dataset.split, "device": machine.device, "weights": model.weights}
    with _bar("points", number, shown=processes.index == 0) as advance:
        found = sweep(
            dense, grid, dataset, task, number=effort.evaluations, limit=data.limit,
            batch_size=task.eval_batch(effort.batch_size), workers=effort.workers, seed=machine.seed,
            study=effort.out / "study.jsonl", resume=effort.resume, about=about, processes=processes, on_point=advance,
        )  # fmt: skip
    if processes.index == 0:
        _show_sweep(found, effort.out, {"model": model.name, **about, "grid": list(texts)}, record)


def train_grid(recipe: str, texts: Sequence[str], data: Data, effort: Effort, machine: Machine, record: Record) -> None:
    """Train a recipe at the points of a grid."""
    from vitrim.files import check_folder
    from vitrim.training.running import Running
    from vitrim.tune import grid as grids
    from vitrim.tune.sweep import train_sweep

    grid = grids.parse(grids.texts_of(texts), recipe=True)
    number = len(grid.points(effort.evaluations, machine.seed))
    check_folder(effort.out)
    machine.select()
    running = Running(effort.out, resume=effort.resume, workers=effort.workers)
    with _bar("runs", number) as advance:
        found = train_sweep(
            recipe, grid, data.source, running, number=effort.evaluations, seed=machine.seed,
            cpu=machine.device == "cpu", on_point=advance,
        )  # fmt: skip
    _show_sweep(found, effort.out, {"train": recipe, "data": data.source, "grid": list(texts)}, record)


def _start(model: Model, effort: Effort, machine: Machine) -> tuple[nn.Module, Any]:
    """The dense model on its device, and this process and its like."""
    from vitrim.files import check_folder
    from vitrim.measure.processes import Processes

    check_folder(effort.out)
    device = machine.select()
    processes = Processes.launched(machine.device)
    return model.load(processes.device or device), processes


def _targets(target: str | None, front: str | None) -> list[Any]:
    from vitrim.tune import Target

    if front is None:
        return [Target.parse(target or "")]
    kind, equals, values = front.partition("=")
    texts = (values if equals else front).split(",")
    found = [Target.parse(f"{kind if equals else 'macs'}={text.strip()}") for text in texts]
    if len({one.value for one in found}) < len(found):
        raise VitrimError(f"--front {front} has a target twice")
    return found


# ---- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(evaluations: int, proxy: str, *, shown: bool) -> Iterator[Callable[[Trial], None]]:
    """A bar of the evaluations on standard error, with the time that is left; every improvement is a line."""
    from rich.console import Console

    console, best = Console(stderr=True), list[float]()
    with _bar("settings", evaluations, shown=shown) as advance:
        count = 0

        def told(trial: Trial) -> None:
            nonlocal count
            count += 1
            advance(count)
            score = trial.scores[proxy]
            if trial.number == 0:  # another method, or another target
                best.clear()
            if shown and (not best or score < best[-1]):
                best.append(score)
                text = f"{proxy} {score:.4g} at {trial.share:.1%}: {trial.config.describe()} ({trial.source})"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield told


@contextmanager
def _bar(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; it is told how many are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda done: progress.update(bar, completed=done)


# ---- tables and pictures ---------------------------------------------------------------------------------------------


def _show(result: Result, model: nn.Module, out: Path, record: Record) -> None:
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
    common.print_table(console, "", ["setting", "method", f"{result.cost.unit} %", *names], rows, text_columns=2)
    notes = [
        f"means over the {'check' if checked else 'search'} images, less is better; {result.cost.unit} as a share of "
        "the dense model's"
        + (f", predicted with a mean error of {result.cost.error:.1%}" if result.cost.error else ""),
        f"returned: {result.verdict}",
        f"use it as -m @{out / 'best.json'}",
    ]
    _say(record, notes + _draw_schedule(result, model, out / "schedule.png"))


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
        result.proxy,
        "behind the leader",
    ]
    common.print_table(record.console(), "", columns, rows, text_columns=3)
    note = (
        f"{result.proxy}: mean over the images of the race, of methods that were searched over the selection images; "
        "behind: paired difference at the end of the race"
    )
    _say(record, [note])


def _show_front(found: Front, model: nn.Module, out: Path, files: Sequence[Path], record: Record) -> None:
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
    columns = ["target", "setting", "method", "front", "returned", f"{unit} %", *names]
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


def _show_sweep(found: Swept, out: Path, about: dict[str, Any], record: Record) -> None:
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
    from vitrim.tune import Space

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
