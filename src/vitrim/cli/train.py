"""``vitrim train``: fine-tune or train any host under any method, following a recipe."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common, listing
from vitrim.cli.setup import Record, Setup, Threads
from vitrim.errors import MissingPackageError, VitrimError

if TYPE_CHECKING:
    from rich.console import Console

    from vitrim.training.loop import Running, Trainer
    from vitrim.training.recipe import Recipe, Resolved

Name = Annotated[str | None, typer.Argument(metavar="RECIPE", help="a name of --list, or a YAML file")]
Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes, e.g. epochs=5 optimizer.lr=1e-4")
]
Data = Annotated[str | None, typer.Option("--data", help="as for eval; the recipe says which splits")]
Checkpoint = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="start from this file (safetensors or .pth), or the folder of a finished run"),
]
Out = Annotated[Path, typer.Option("--out", help="folder of checkpoints, logs and weights")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in --out")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check data, shapes, memory and time on two batches; write nothing")
]
List = Annotated[bool, typer.Option("--list", help="list the recipes, as `vitrim list recipes`")]
Show = Annotated[bool, typer.Option("--show", help="print the recipe's values and where each is from")]
SaveMinutes = Annotated[float, typer.Option("--save-minutes", min=0.0, help="minutes between checkpoints")]
LogEvery = Annotated[int, typer.Option("--log-every", min=1, help="updates between rows of the log")]
EvalBatch = Annotated[
    int, typer.Option("--eval-batch", min=1, max=common.MAX_BATCH, help="images at once in evaluations")
]
Tensorboard = Annotated[bool, typer.Option("--tensorboard", help="also write TensorBoard's files")]
LogWith = Annotated[
    list[str] | None,
    typer.Option("--log-with", help="also log with this tracker of accelerate, e.g. wandb or mlflow; may be repeated"),
]
MaxUpdates = Annotated[int | None, typer.Option("--max-updates", min=1, help="stop there, to be resumed later")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, or what accelerate finds if left out")]


PATIENCE = 5.0
"""Seconds after a first request to stop during which another counts as the same."""


@dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """Options for running a recipe; none of them changes what is learned."""

    out: Out = Path("runs/train")
    resume: Resume = False
    workers: common.Workers = 0
    save_minutes: SaveMinutes = 10.0
    log_every: LogEvery = 10
    eval_batch: EvalBatch = 64
    tensorboard: Tensorboard = False
    log_with: LogWith = None
    max_updates: MaxUpdates = None

    def running(self) -> Running:
        """The same options, as the loop takes them."""
        from vitrim.training.loop import Running

        return Running(**{**dataclasses.asdict(self), "log_with": tuple(self.log_with or ())})


def train(
    *,
    recipe: Name = None,
    changes: Changes = None,
    data: Data = None,
    how: Run,
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    list_recipes: List = False,
    show: Show = False,
    device: Device = None,
    threads: Threads = None,
    record: Record,
) -> None:
    """Train or fine-tune a model under a method, by a recipe: one of the papers', or your own YAML file.

    A run is stopped at any time and resumed exactly. Many processes: accelerate launch -m vitrim train ...
    """
    if list_recipes:
        if recipe is not None:
            raise VitrimError(f"--list takes no recipe; for the values of one: vitrim train {recipe} --show")
        listing.list_(kind="recipes", record=record)
        return
    if recipe is None:
        raise VitrimError("name a recipe: `vitrim train --list` shows them")
    from vitrim.training.recipe import load_recipe

    resolved = load_recipe(recipe, changes or [])
    if show:
        _check_names(resolved.recipe)
        _show(resolved, record)
        return
    if data is None:
        raise VitrimError(f"--data is missing: {resolved.name} wants {resolved.recipe.dataset or 'images with labels'}")
    _require("accelerate", "torchmetrics")
    if device not in (None, "cpu"):
        raise VitrimError(f"--device is cpu or left out, not '{device}': accelerate launch chooses devices")
    from vitrim.measure.machine import set_threads

    set_threads(threads)
    from vitrim.training.build import build_trainer

    running = how.running()
    if Path(data).expanduser().resolve() == how.out.resolve():
        raise VitrimError(f"--out is the folder of the data, {data}: name another")
    out = record.console()
    trainer = build_trainer(resolved, data, running, checkpoint=checkpoint, cpu=device == "cpu", console=out)
    found = run(trainer, data, dry_run=dry_run, console=out)
    if found is not None:
        record.write("train", **found)


def run(trainer: Trainer, data: str, *, dry_run: bool, console: Console) -> dict[str, Any] | None:
    """Run and print the results; return the record, or None in processes other than the first."""
    if dry_run:
        result = trainer.dry_run()
    else:
        with _stoppable(trainer):
            result = trainer.run()
    accelerator, recipe, running = trainer.accelerator, trainer.recipe, trainer.running
    if not accelerator.is_main_process:
        return None
    from vitrim.measure.machine import environment

    for name, value in result.items():
        console.print(f"{name}: {_short(value)}", highlight=False)
    return {
        "environment": environment(device=str(accelerator.device), dtype=recipe.precision, seed=recipe.seed),
        "recipe": {"name": trainer.resolved.name, **recipe.model_dump(mode="json")},
        "running": {**dataclasses.asdict(running), "out": str(running.out)},
        "processes": accelerator.num_processes,
        "data": data,
        "dry_run": dry_run,
        "result": result,
    }


@contextmanager
def _stoppable(trainer: Trainer) -> Iterator[None]:
    """A scheduler's request to end, and Ctrl-C: save after the update that is being made, then end with the exit code
    of the signal that came first.

    Asked again later, end at once: an evaluation or a stalled stream does not look. Not at the second request as such,
    for launchers pass on the Ctrl-C that the terminal has sent to all processes.
    """
    asked: list[tuple[int, float]] = []

    def ask(number: int, _: object) -> None:
        asked.append((number, time.monotonic()))
        if asked[-1][1] - asked[0][1] > PATIENCE:
            raise KeyboardInterrupt
        trainer.request_stop()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        if asked and asked[0][0] == signal.SIGTERM:
            raise typer.Exit(common.TERMINATED) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _require(*packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise MissingPackageError(f"training needs the package '{package}': pip install 'vitrim[train]'")


def _check_names(recipe: Recipe) -> None:
    """Check first what a run would refuse first: an unknown method, model or optimiser."""
    from vitrim.core.registry import parse_method
    from vitrim.loading import check_name
    from vitrim.training.optim import check_optimizer

    parse_method(recipe.method)
    check_name(recipe.model)
    check_optimizer(recipe.optimizer.name)


def _show(resolved: Resolved, record: Record) -> None:
    rows = [[name, "null" if value is None else str(value), origin] for name, value, origin in resolved.rows()]
    common.print_table(record.console(), f"Recipe {resolved.name}", ["key", "value", "from"], rows, text_columns=3)
    entries = [dict(zip(("key", "value", "from"), row, strict=True)) for row in resolved.rows()]
    record.write("train --show", recipe=resolved.name, values=entries)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "  ".join(f"{name} {_short(entry)}" for name, entry in value.items() if name != "classes")
    return str(value)
