"""``vitrim tune``: a value per block that damages a model least at a target, as a file that every command reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.options import MODEL_NAMES, BatchSize, Data, Machine, Model, Setup, Workers
from vitrim.cli.output import Output, resumable
from vitrim.cli.progress import progress

Name = Annotated[str, typer.Argument(metavar="[MODEL]", help=f"{MODEL_NAMES}; none with --train")]


@dataclass(frozen=True, kw_only=True)
class AnyModel(Model):
    """One model and its weights, or none."""

    name: Name = ""


@dataclass(frozen=True, kw_only=True)
class SearchSetup(Setup):
    """The search: what for, over what, and into which folder."""

    methods: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", metavar="METHOD", help="e.g. tome; several race each other; all: all that fit"),
    ] = None
    target: Annotated[
        str | None, typer.Option("--target", help="macs=0.5 (share of dense), speedup=1.5 or agree=0.98")
    ] = None
    front: Annotated[str | None, typer.Option("--front", help="several targets: 0.35,0.5 or speedup=1.2,1.5")] = None
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            help="every combination, e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02, or a paper's: atm, study, "
            "study_imagenet, cropr_r; with --train key=a|b of the recipe, may repeat",
        ),
    ] = None
    train: Annotated[str | None, typer.Option("--train", help="train this recipe at every point of --grid")] = None
    evaluations: Annotated[
        int | None,
        typer.Option("--evaluations", min=1, max=100_000, help="most settings to try; default 60, of a grid all"),
    ] = None
    proxy: Annotated[str, typer.Option("--proxy", help="what is minimised: feature, kl, cosine, agree")] = "feature"
    search: Annotated[str, typer.Option("--search", help="evolution, random, optuna's gp or tpe")] = "evolution"
    shape: Annotated[str, typer.Option("--shape", help="slope, curve (2 numbers) or free (per block)")] = "free"
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.0, max=60 * 24 * 365.0, help="end the search after so long")
    ] = None
    engine: Annotated[
        str | None, typer.Option("--engine", help="to be fast on, as of `vitrim bench`; default: eager")
    ] = None
    precision: Annotated[
        str | None, typer.Option("--precision", help="of the engine: fp32, bf16, fp16, int8 or several")
    ] = None
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="DATA[:SPLIT]", help="at the end, score all settings on these images"),
    ] = None
    batch_size: BatchSize = 32
    workers: Workers = 0
    out: Annotated[Path, typer.Option("--out", help="folder for the results and study.jsonl")] = Path("tuned")
    resume: Annotated[bool, typer.Option("--resume", help="go on from the study in --out, if any")] = False


def tune(*, model: AnyModel, data: Data, how: SearchSetup, machine: Machine, output: Output) -> None:
    """Search a value per block that damages a model least at a target. Compare it with one value for all blocks.

    A third of the images is for searching, one for selecting, one for checking. The searched setting is returned if it
    beats the constant one beyond noise on the last. Use it as -m @tuned/best.json.
    """
    unit = "settings" if how.grid is None else "points" if how.train is None else "runs"
    with resumable(how.out / "study.jsonl"), progress(f"loading {model.name or how.train}", unit) as signs:
        from vitrim.measure.records import Processes
        from vitrim.tuning.tune import tune

        report = tune(
            model.name or None,
            data=data.source,
            **how.arguments,
            **data.arguments,
            **model.arguments,
            **machine.arguments,
            on_progress=signs.move,
        )
    if Processes.launched(machine.device).index == 0:
        output.finish(report)
