"""The work of ``vitrim tune``: searches for a target or a front, sweeps of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.held_out import HeldOut
from vitrim.cli.measuring import task_and_data
from vitrim.cli.setup import Data, Machine, Model, Record, Setup
from vitrim.cli.tuned import show, show_front, show_sweep
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from torch import nn

    from vitrim.core.method import MethodConfig
    from vitrim.tuning.finder import Trial
    from vitrim.tuning.search import Options

IMAGES = 3 * 2048
"""Images that are read where --limit does not say: 2,048 each for searching, selecting and checking."""


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
ShapeName = Annotated[
    str,
    typer.Option(
        "--shape", help="amounts over the depth: slope (9 settings), curve (2 numbers), free (a number per block)"
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes", min=0.0, max=60 * 24 * 365.0, help="end the search after so long, if --evaluations do not"
    ),
]
Engines = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="for speedup: the engine to be fast on, as of `vitrim bench`; of several the one that is the fastest for "
        "the dense model; default: eager",
    ),
]
Check = Annotated[
    str | None,
    typer.Option(
        "--check",
        metavar="DATA[:SPLIT]",
        help="at the end, score dense, constant and searched settings on these images, read as --data is",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="folder for the results and study.jsonl")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the study in --out; start one if there is none")]


@dataclass(frozen=True, kw_only=True)
class Effort(Setup):
    """The way a search is made, and where it leaves its files."""

    evaluations: Evaluations = None
    proxy: ProxyName = "feature"
    search: SearchName = "evolution"
    shape: ShapeName = "free"
    minutes: Minutes = None
    engine: Engines = None
    check: Check = None
    batch_size: common.BatchSize = 32
    workers: common.Workers = 0
    out: Out = Path("tuned")
    resume: Resume = False

    @property
    def engines(self) -> list[str]:
        """The names of the engines."""
        return ["eager"] if self.engine is None else self.engine.replace(",", " ").split()


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
    from vitrim import tuning
    from vitrim.speed.engines import engines_named
    from vitrim.tuning.fitting import training_free
    from vitrim.tuning.proxy import DatasetImages, check_proxy
    from vitrim.tuning.shapes import check_shape
    from vitrim.tuning.strategies import make_strategy

    targets, configs = _targets(target, front), parse_methods(methods)
    check_proxy(effort.proxy), make_strategy(effort.search), check_shape(effort.shape, effort.search)
    engines = engines_named(effort.engines)
    dense, processes = _start(model, effort, machine)
    if configs is None:
        configs = training_free(dense, counted=targets[0].kind == "speedup")
        configs = [one for one in configs if all(engine.obstacle(one) is None for engine in engines)]
    task, dataset = task_and_data(dense, model, data, None)
    held = None if effort.check is None else HeldOut.open(effort.check, dense, model, data, dataset)
    each = max((data.limit or IMAGES) // 3, 1)
    batch_size = task.eval_batch(effort.batch_size)
    images = DatasetImages(dataset, each, batch_size, workers=effort.workers, collate=task.collate)
    about = {"data": data.source, "split": dataset.split, "device": machine.device, "weights": model.weights}
    evaluations = effort.evaluations or 60
    with _progress(evaluations * len(targets), effort.proxy, shown=processes.index == 0) as told:
        options: Options = {
            "task": task, "proxy": effort.proxy, "evaluations": evaluations, "strategy": effort.search,
            "seed": machine.seed, "study": effort.out / "study.jsonl", "resume": effort.resume, "about": about,
            "processes": processes, "on_trial": told, "engine": effort.engines,
            "shape": effort.shape, "seconds": None if effort.minutes is None else 60.0 * effort.minutes,
        }  # fmt: skip
        found = tuning.front(dense, configs, images, targets=targets, **options) if front else None
        result = None if found else tuning.search(dense, configs, images, target=targets[0], **options)
    if processes.index > 0:
        return
    results = [result] if result is not None else list(found.results if found else ())
    facts = {"model": model.name, "environment": machine.environment("float32"), "processes": processes.count}
    if result is not None:
        result.save(effort.out / "best.json")
        show(result, dense, effort.out, record)
        record.write("tune", **facts, **result.record())
    if found is not None:
        files = found.save(effort.out)
        show_front(found, dense, effort.out, files, record)
        record.write("tune --front", **facts, **found.record())
    if held is not None:
        rows = held.score(dense, results, effort.batch_size, effort.workers, machine.seed)
        held.show(rows, results, effort.out, record)


def sweep_grid(
    model: Model, data: Data, texts: Sequence[str], effort: Effort, machine: Machine, record: Record
) -> None:
    """Evaluate a method at the points of a grid."""
    from vitrim.tuning import grid as grids
    from vitrim.tuning.sweep import sweep

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
        show_sweep(found, effort.out, {"model": model.name, **about, "grid": list(texts)}, record)


def train_grid(recipe: str, texts: Sequence[str], data: Data, effort: Effort, machine: Machine, record: Record) -> None:
    """Train a recipe at the points of a grid."""
    from vitrim.files import check_folder
    from vitrim.training.loop import Running
    from vitrim.tuning import grid as grids
    from vitrim.tuning.sweep import train_sweep

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
    show_sweep(found, effort.out, {"train": recipe, "data": data.source, "grid": list(texts)}, record)


def _start(model: Model, effort: Effort, machine: Machine) -> tuple[nn.Module, Any]:
    """The dense model on its device, and this process and its like."""
    from vitrim.files import check_folder
    from vitrim.measure.records import Processes

    check_folder(effort.out)
    device = machine.select()
    processes = Processes.launched(machine.device)
    return model.load(processes.device or device), processes


def _targets(target: str | None, front: str | None) -> list[Any]:
    from vitrim.tuning import Target

    if front is None:
        return [Target.parse(target or "")]
    kind, equals, values = front.partition("=")
    equals = "" if "," in kind else equals
    texts = (values if equals else front).split(",")
    wrong = next((text for text in texts if "=" in text or not text.strip()), None)
    if wrong is not None:
        raise VitrimError(
            f"cannot read '{wrong}' of --front '{front}': write values of one kind, e.g. 0.35,0.5 or speedup=1.2,1.5"
        )
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
