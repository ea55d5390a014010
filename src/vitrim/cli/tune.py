"""``vitrim tune``: a value per block that damages a model least at a target, as a file that every command reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from vitrim.cli import tuning
from vitrim.cli.setup import MODEL_NAMES, Data, Machine, Model, Record, Setup
from vitrim.errors import VitrimError

Name = Annotated[str, typer.Argument(metavar="[MODEL]", help=f"model {MODEL_NAMES}; none with --train")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        help="name:key=value,key=value, e.g. tome, or @FILE; several race each other; all: every one that needs no "
        "training and fits the model",
    ),
]
Targets = Annotated[
    str | None,
    typer.Option("--target", help="macs=0.5 (share of the dense MACs), speedup=1.5 (on this device) or agree=0.98"),
]
Fronts = Annotated[
    str | None,
    typer.Option("--front", help="several targets, e.g. 0.35,0.5,0.65 (shares of the dense MACs) or speedup=1.2,1.5,2"),
]
Grids = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        help="try every combination, e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02; with --train key=a|b of the recipe, may "
        "repeat; or the name of a paper's sweep: atm, study, study_imagenet, cropr_r",
    ),
]
Train = Annotated[str | None, typer.Option("--train", help="train this recipe at every point of --grid")]


SEARCHING = ("engine", "check", "minutes", "shape", "proxy", "search")
"""Fields of `vitrim.cli.tuning.Effort` that only a search reads."""


@dataclass(frozen=True, kw_only=True)
class AnyModel(Model):
    """One model and its weights, or none."""

    name: Name = ""


def tune(
    *,
    model: AnyModel,
    data: Data,
    methods: Methods = None,
    target: Targets = None,
    front: Fronts = None,
    grid: Grids = None,
    train: Train = None,
    effort: tuning.Effort,
    machine: Machine,
    record: Record,
) -> None:
    """Search a value per block that damages a model least at a target, and compare it with one value for all blocks.

    A third of the images is for searching, one for selecting and one for checking. The searched setting is returned if
    it beats the constant one beyond noise on the last third. Use the file as -m @tuned/best.json.
    """
    _check(model.name, methods, {"--target": target, "--front": front, "--grid": grid}, train)
    if grid is not None:
        _check_unread(_given(effort, *SEARCHING), "for a search with --target or --front")
    if train is not None:
        _check_training(model, data, effort, machine)
        tuning.train_grid(train, grid or [], data, effort, machine, record)
    elif grid is not None:
        tuning.sweep_grid(model, data, grid, effort, machine, record)
    else:
        tuning.find(model, data, methods or [], target, front, effort, machine, record)


def _check(model: str, methods: Sequence[str] | None, aims: dict[str, object], train: str | None) -> None:
    """Refuse options that do not go together.

    Raises:
        VitrimError: in one line.
    """
    given = [name for name, value in aims.items() if value is not None]
    if train is not None and given != ["--grid"]:
        raise VitrimError("--train RECIPE trains the points of a grid: give --grid with it, and nothing else to aim at")
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise VitrimError(f"give one of --target, --front and --grid, got {found}; e.g. --target macs=0.5")
    if (model == "") != (train is not None):
        raise VitrimError("MODEL is missing" if train is None else f"the recipe names the model: leave out '{model}'")
    if (methods is None) != (given == ["--grid"]):
        raise VitrimError(
            "name the method in --grid" if methods else "-m METHOD is missing: say what to tune, e.g. tome"
        )


def _check_training(model: AnyModel, data: Data, effort: tuning.Effort, machine: Machine) -> None:
    """Refuse options that have no effect where a recipe is trained: it says how the model is made and the data read.

    Raises:
        VitrimError: in one line.
    """
    unread = [
        *_given(model, "pretrained", "checkpoint", "model_option"),
        *_given(data, "limit", "split", "image_column", "label_column", "data_option", "task"),
        *_given(effort, "batch_size"),
    ]
    _check_unread(unread, "not for --train, whose recipe says how the model is made and the data are read")
    kind, colon, _ = machine.device.partition(":")
    if colon:
        raise VitrimError(
            f"--device {machine.device} names one of several devices, and with --train accelerate chooses it: write "
            f"--device {kind}"
        )


def _check_unread(options: Sequence[str], what: str) -> None:
    if len(options) == 1:
        raise VitrimError(f"{options[0]} is {what}: leave it out")
    if options:
        raise VitrimError(f"{', '.join(options)} are {what}: leave them out")


def _given(setup: Setup, *names: str) -> list[str]:
    """The options among these fields of a group whose values are not the defaults."""
    defaults = {field.name: field.default for field in fields(setup)}
    changed = [name for name in names if getattr(setup, name) not in (defaults[name], [])]
    return [f"--{name.replace('_', '-')}" for name in changed]
