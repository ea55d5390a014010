"""``vitrim tune``: a value per block that damages a model least at a target, as a file that every command reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrim.cli import common
from vitrim.cli.measuring import task_and_data
from vitrim.cli.setup import Data, Machine, Model, Record
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from vitrim.tune import Result
    from vitrim.tune.evolution import Trial

IMAGES = 3 * 2048
"""Images that are read where --limit does not say: 2,048 each for searching, selecting and checking."""

Targets = Annotated[
    str, typer.Option("--target", help="macs=0.5 (share of the dense MACs), speedup=1.5 (on this device) or agree=0.98")
]
Evaluations = Annotated[int, typer.Option("--evaluations", min=1, max=100_000, help="most settings to try")]
ProxyName = Annotated[
    str, typer.Option("--proxy", help="the damage that is minimised: feature, kl, cosine or agree (1 - agreement)")
]
Out = Annotated[Path, typer.Option("--out", help="folder for best.json and study.jsonl")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the study in --out")]


def tune(
    *,
    model: Model,
    data: Data,
    methods: common.Methods,
    target: Targets,
    evaluations: Evaluations = 60,
    proxy: ProxyName = "feature",
    batch_size: common.BatchSize = 32,
    workers: common.Workers = 0,
    out: Out = Path("tuned"),
    resume: Resume = False,
    machine: Machine,
    record: Record,
) -> None:
    """Search a value per block that damages a model least at a target, and compare it with one value for all blocks.

    A third of the images is for searching, one for selecting and one for checking. The searched setting is returned if
    it beats the constant one beyond noise on the last third. Use the file as -m @tuned/best.json.
    """
    configs = common.parse_methods(methods)
    if len(configs) > 1:
        raise VitrimError(f"one method is tuned at a time, got {len(configs)}")
    from vitrim.files import check_folder
    from vitrim.tune import Target, search
    from vitrim.tune.proxy import DatasetImages, check_proxy

    wanted, _ = Target.parse(target), check_proxy(proxy)
    check_folder(out)
    dense = model.load(machine.select())
    task, dataset = task_and_data(dense, model, data, None)
    images = DatasetImages(
        dataset, max((data.limit or IMAGES) // 3, 1), task.eval_batch(batch_size), workers=workers, collate=task.collate
    )
    about = {"data": data.source, "split": dataset.split, "device": machine.device, "weights": model.weights}
    with _progress(evaluations, proxy) as told:
        result = search(
            dense, configs[0], images, target=wanted, task=task, proxy=proxy, evaluations=evaluations,
            seed=machine.seed, study=out / "study.jsonl", resume=resume, about=about, on_trial=told,
        )  # fmt: skip
    result.save(out / "best.json")
    _show(result, out, record)
    record.write("tune", model=model.name, environment=machine.environment("float32"), **result.record())


@contextmanager
def _progress(evaluations: int, proxy: str) -> Iterator[Callable[[Trial], None]]:
    """A bar of the evaluations on standard error, with the time that is left; every improvement is a line."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("settings", total=evaluations)
        best: list[float] = []

        def told(trial: Trial) -> None:
            progress.advance(bar)
            score = trial.scores[proxy]
            if not best or score < best[-1]:
                best.append(score)
                text = f"{proxy} {score:.4g} at {trial.share:.1%}: {trial.config.describe()} ({trial.source})"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield told


def _show(result: Result, out: Path, record: Record) -> None:
    """Print the constant setting next to the searched one, and which is returned."""
    from rich.markup import escape

    console, outcome = record.console(), result.outcome
    names = [name for name in ("feature", "kl", "cosine", "agree") if name in outcome.constant.scores]
    rows = [
        [label, escape(trial.config.describe()), f"{100 * trial.share:.1f}", *(f"{trial.scores[n]:.4f}" for n in names)]
        for label, trial in (("constant", outcome.constant), ("searched", outcome.searched))
    ]
    common.print_table(console, "", ["setting", "method", f"{result.cost.unit} %", *names], rows, text_columns=2)
    notes = [
        f"means over the search images, less is better; {result.cost.unit} as a share of the dense model's"
        + (f", predicted with a mean error of {result.cost.error:.1%}" if result.cost.error else ""),
        f"returned: {result.verdict}",
        f"use it as -m @{out / 'best.json'}",
    ]
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
