"""``vitrim train``: fine-tune or train any host with any method, by a recipe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitrim.cli import listing
from vitrim.cli.options import MAX_BATCH, Setup, Threads, Workers
from vitrim.cli.output import Output, resumable
from vitrim.errors import VitrimError, check_known
from vitrim.progress import progress
from vitrim.report import Table
from vitrim.report import show as print_report

if TYPE_CHECKING:
    from vitrim.training.recipe import Resolved
    from vitrim.training.train import TrainReport


@dataclass(frozen=True, kw_only=True)
class RunOptions(Setup):
    out: Annotated[Path, typer.Option(help="folder of checkpoints, logs and weights")] = Path("runs/train")
    resume: Annotated[bool, typer.Option("--resume", help="continue from the last checkpoint in --out")] = False
    workers: Workers = 0
    save_minutes: Annotated[float, typer.Option(min=0.0, help="minutes between checkpoints")] = 10.0
    log_every: Annotated[int, typer.Option(min=1, help="updates between rows of the log")] = 10
    eval_batch: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="images per batch in evaluations")] = 64
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="also write TensorBoard files")] = False
    log_with: Annotated[
        list[str] | None, typer.Option(help="also log to this tracker of accelerate, e.g. wandb or mlflow; may repeat")
    ] = None
    max_updates: Annotated[int | None, typer.Option(min=1, help="stop there, to resume later")] = None


@dataclass(frozen=True, kw_only=True)
class OnDevice(Setup):
    device: Annotated[str | None, typer.Option(help="cpu; default: what accelerate finds")] = None
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Setup):
    model: Annotated[str | None, typer.Option(help="the model, as for `vitrim eval`; same as model=NAME")] = None
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", help="e.g. tome:r=8, or @FILE; same as method=TEXT")
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="number of images of every split, spread evenly; same as limit=N")
    ] = None

    def before(self, changes: list[str] | None) -> list[str]:
        if self.method is not None and len(self.method) > 1:
            raise VitrimError(f"a run trains one method, got {len(self.method)}: {', '.join(self.method)}")
        own = {**vars(self), "method": None if self.method is None else self.method[0]}
        return [*(f"{key}={value}" for key, value in own.items() if value is not None), *(changes or ())]


def train(
    *,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="a name from --list, or a YAML file")] = None,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="changes, e.g. epochs=5 optimizer.lr=1e-4")
    ] = None,
    named: RecipeOptions,
    data: Annotated[str | None, typer.Option(help="as for eval; the recipe names the splits")] = None,
    how: RunOptions,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="start from this file (safetensors or .pth), or the folder of a finished run"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check data, shapes, memory and time on two batches; write nothing")
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="list the recipes, like `vitrim list recipes`")] = False,
    show: Annotated[bool, typer.Option("--show", help="print the recipe's values and the file of each")] = False,
    machine: OnDevice,
    output: Output,
) -> None:
    """Train or fine-tune a model with a method, by a recipe. Ours, one of the papers', or your own YAML file.

    A run can be stopped at any time and resumed exactly. Several processes: accelerate launch -m vitrim train ...
    """
    if list_recipes:
        if recipe is not None:
            raise VitrimError(f"--list takes no recipe; for the values of one: vitrim train {recipe} --show")
        listing.list_(kind="recipes", output=output)
        return
    if recipe is None:
        raise VitrimError(
            "name a recipe, which says how to train, e.g. finetune (your own images): `vitrim train --list` shows them"
        )
    changes = named.before(changes)
    if show or data is None:
        from vitrim.training.recipe import load_recipe

        resolved = load_recipe(recipe, changes)
        if not show:
            wanted = resolved.recipe.dataset or "images with labels"
            raise VitrimError(f"--data is missing: {resolved.name} wants {wanted}")
        _show(resolved, output)
        return
    out = output.console()
    with resumable(how.out / "checkpoints"):
        with progress(f"loading {named.model or recipe}"):
            from vitrim.engines.machine import set_threads
            from vitrim.training import train as training
            from vitrim.training.running import Running

            set_threads(machine.threads)
            running = Running(**{**vars(how), "log_with": tuple(how.log_with or ())})
        report = training.train(
            recipe, data, changes=changes, out=running, checkpoint=checkpoint, dry_run=dry_run,
            device=machine.device,  # type: ignore[arg-type]
            console=out,
        )  # fmt: skip
    if report.is_first:
        print_report(out, report)
        output.print(*_next(report, data, how.out))
        output.write(**report.record)


def _next(report: TrainReport, data: str, out: Path) -> list[str]:
    """The file of weights of a finished run, and the next commands."""
    from vitrim.weights import WEIGHTS_FILE

    weights = next((file for file in report.files if file.name == WEIGHTS_FILE), None)
    if weights is None:
        return []
    recipe, splits = report.facts["recipe"], report.facts["splits"]
    method = "" if recipe["method"] == "none" else f" -m {shlex.quote(recipe['method'])}"
    held = (splits["test"], splits["eval"])
    # Images that were not trained on, if the run held some out: only their score is of use.
    unseen = next((name for name in held if isinstance(name, str) and name != splits["train"]), None)
    if unseen is None and isinstance(splits["eval"], float) and recipe["limit"] is None:
        unseen = ":".join(str(part) for part in (splits["train"], splits["eval"]) if part is not None)
    split = unseen or splits["train"]  # data with splits need the name of one
    split_option = "" if split is None else f" --split {shlex.quote(split)}"
    lines = [
        f"wrote {weights}",
        f"next: vitrim eval run:{shlex.quote(str(out))}{method} --data {shlex.quote(data)}{split_option}",
        f"      vitrim export run:{shlex.quote(str(out))}{method} --out model.onnx",
    ]
    if unseen is None:
        lines.append("note: most of these images were trained on, so their score is too good: give --data others")
    return lines


def _show(resolved: Resolved, output: Output) -> None:
    """Print the values of a recipe, after a check of its method, model and optimiser."""
    from timm.optim import list_optimizers

    from vitrim.core.registry import parse_method
    from vitrim.loading import check_name

    parse_method(resolved.recipe.method)
    check_name(resolved.recipe.model)
    check_known("optimizer", resolved.recipe.optimizer.name, list_optimizers())  # type: ignore[arg-type]
    rows = [(name, "null" if value is None else str(value), origin) for name, value, origin in resolved.rows()]
    columns = ("key", "value", "from")
    output.console().print(Table("", f"Recipe {resolved.name}", columns, rows, text_columns=3))
    entries = [dict(zip(columns, row, strict=True)) for row in resolved.rows()]
    output.write("train --show", recipe=resolved.name, values=entries)
