"""``vitrim tune``: a value per block that damages a model least at a target, as a file that every command reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.options import MODEL_NAMES, BatchSize, Data, Machine, Model, Workers, parse_options
from vitrim.cli.output import Output, progress_bar

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
TargetText = Annotated[
    str | None,
    typer.Option("--target", help="macs=0.5 (share of the dense MACs), speedup=1.5 (on this device) or agree=0.98"),
]
Front = Annotated[
    str | None,
    typer.Option("--front", help="several targets, e.g. 0.35,0.5,0.65 (shares of the dense MACs) or speedup=1.2,1.5,2"),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        help="try every combination, e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02; with --train key=a|b of the recipe, may "
        "repeat; or the name of a paper's sweep: atm, study, study_imagenet, cropr_r",
    ),
]
Train = Annotated[str | None, typer.Option("--train", help="train this recipe at every point of --grid")]
Evaluations = Annotated[
    int | None,
    typer.Option("--evaluations", min=1, max=100_000, help="most settings to try; default 60, of a grid all"),
]
Proxy = Annotated[
    str, typer.Option("--proxy", help="the damage that is minimised: feature, kl, cosine or agree (1 - agreement)")
]
Search = Annotated[
    str, typer.Option("--search", help="where settings come from: evolution, random, or optuna's gp or tpe")
]
Shape = Annotated[
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
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="for speedup: the engine to be fast on, as of `vitrim bench`; of several the one that is the fastest for "
        "the dense model; default: eager",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision", help="for speedup: fp32, bf16, fp16, int8 or several, as --engine; damage is measured in fp32"
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
class AnyModel(Model):
    """One model and its weights, or none."""

    name: Name = ""


def tune(
    *,
    model: AnyModel,
    data: Data,
    methods: Methods = None,
    target: TargetText = None,
    front: Front = None,
    grid: Grid = None,
    train: Train = None,
    evaluations: Evaluations = None,
    proxy: Proxy = "feature",
    search: Search = "evolution",
    shape: Shape = "free",
    minutes: Minutes = None,
    engine: Engine = None,
    precision: Precision = None,
    check: Check = None,
    batch_size: BatchSize = 32,
    workers: Workers = 0,
    out: Out = Path("tuned"),
    resume: Resume = False,
    machine: Machine,
    output: Output,
) -> None:
    """Search a value per block that damages a model least at a target, and compare it with one value for all blocks.

    A third of the images is for searching, one for selecting and one for checking. The searched setting is returned if
    it beats the constant one beyond noise on the last third. Use the file as -m @tuned/best.json.
    """
    from vitrim.measure.records import Processes
    from vitrim.report import show
    from vitrim.tuning.tune import tune

    with progress_bar("settings" if grid is None else "points" if train is None else "runs") as on_progress:
        report = tune(
            model.name or None, methods, data.source, target=target, front=front, grid=grid, train=train,
            evaluations=evaluations, proxy=proxy, search=search, shape=shape, minutes=minutes, engine=engine,
            precision=precision, check=check, batch_size=batch_size, workers=workers, out=out, resume=resume,
            limit=data.limit, **data.reading,
            data_options=parse_options(data.data_option, "data option"), task=data.task,
            **model.arguments,
            **machine.arguments, on_progress=on_progress,
        )  # fmt: skip
    if Processes.launched(machine.device).index == 0:
        show(output.console(), report)
        output.write(**report.record)
