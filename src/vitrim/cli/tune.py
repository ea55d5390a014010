"""``vitrim tune``: a search for the value per block that damages a model least at a target."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from vitrim.cli.options import MODEL_NAMES, BatchSize, Data, Machine, Model, Setup, Sizes, Workers
from vitrim.cli.output import Output, resumable
from vitrim.errors import VitrimError
from vitrim.progress import is_first_process, progress


@dataclass(frozen=True, kw_only=True)
class TunedModel(Model):
    name: Annotated[str, typer.Argument(metavar="[MODEL]", help=f"{MODEL_NAMES}; none with --train")] = ""


@dataclass(frozen=True, kw_only=True)
class SearchedSize(Sizes):
    img_size: Annotated[
        str | None, typer.Option(metavar="PIXELS", help="another image size to search at, e.g. 208")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SearchSetup(Setup):
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", metavar="METHOD", help="e.g. tome; several race; all: all that fit"),
    ] = None
    target: Annotated[str | None, typer.Option(help="macs=0.5 (share of dense), speedup=1.5 or agree=0.98")] = None
    front: Annotated[str | None, typer.Option(help="several targets: 0.35,0.5 or speedup=1.2,1.5")] = None
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="every combination, e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02, or a paper's: atm, study, "
            "study_imagenet, cropr_r; with --train key=a|b of the recipe, may repeat",
        ),
    ] = None
    train: Annotated[str | None, typer.Option(help="train this recipe at every point of --grid")] = None
    evaluations: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="most settings to try; default 60, of a grid all")
    ] = None
    proxy: Annotated[str, typer.Option(help="damage to minimise: feature, kl, cosine, agree")] = "feature"
    minutes: Annotated[
        float | None, typer.Option(min=0.0, max=60 * 24 * 365.0, help="end the search after this time")
    ] = None
    engine: Annotated[str | None, typer.Option(help="for speedup, as for `vitrim bench`; default: eager")] = None
    precision: Annotated[str | None, typer.Option(help="of the engine: fp32, bf16, fp16, int8 or several")] = None
    check: Annotated[
        str | None, typer.Option(metavar="DATA[:SPLIT]", help="at the end, score all settings on these images")
    ] = None
    batch_size: BatchSize = 32
    workers: Workers = 0
    out: Annotated[Path, typer.Option(help="folder for the results and study.jsonl")] = Path("tuned")
    resume: Annotated[bool, typer.Option("--resume", help="continue the study in --out, if any")] = False

    def check_options(self, model: TunedModel, size: SearchedSize, data: Data) -> None:
        aims = [f"--{name}" for name in ("target", "front", "grid") if getattr(self, name) is not None]
        if self.train is not None and aims != ["--grid"]:
            raise VitrimError(
                "--train RECIPE trains the points of a grid: give --grid with it, and nothing else to aim at"
            )
        if len(aims) != 1:
            found = " and ".join(aims) or "none"
            raise VitrimError(f"give one of --target, --front and --grid, got {found}; e.g. --target macs=0.5")
        if (not model.name) != (self.train is not None):
            missing = self.train is None
            raise VitrimError(
                "MODEL is missing" if missing else f"the recipe names the model: leave out '{model.name}'"
            )
        if (not self.methods) != (aims == ["--grid"]):
            raise VitrimError(
                "name the method in --grid" if self.methods else "-m METHOD is missing: say what to tune, e.g. tome"
            )
        if self.grid is not None:
            others = ("engine", "precision", "check", "minutes", "proxy")
            refuse(self, "for a search with --target or --front", *others)
        if self.train is not None:
            what = "not for --train, whose recipe says how the model is made and the data are read"
            refuse(model, what, "pretrained", "checkpoint", "model_option")
            refuse(size, what, "img_size")
            refuse(data, what, "limit", "split", "image_column", "label_column", "data_option", "task")
            refuse(self, what, "batch_size")


def refuse(group: Setup, what: str, *names: str) -> None:
    """Refuse options of a group that are set and have no effect."""
    defaults = {field.name: field.default for field in fields(group)}
    options = [f"--{name}".replace("_", "-") for name in names if getattr(group, name) not in (defaults[name], [])]
    if options:
        verb, rest = ("is", "it") if len(options) == 1 else ("are", "them")
        raise VitrimError(f"{', '.join(options)} {verb} {what}: leave {rest} out")


def tune(
    *, model: TunedModel, size: SearchedSize, data: Data, how: SearchSetup, machine: Machine, output: Output
) -> None:
    """Find the value per block that damages a model least at a target. Use it as -m @tuned/best.json.

    A third of the images each is for search, selection and check. The result must beat a constant value on the last.
    """
    unit = "settings" if how.grid is None else "points" if how.train is None else "runs"
    how.check_options(model, size, data)
    with resumable(how.out / "study.jsonl"), progress(f"loading {model.name or how.train}", unit) as signs:
        from vitrim.results import Results
        from vitrim.tuning.result import Target
        from vitrim.tuning.search import SearchSpec
        from vitrim.tuning.tune import train_grid, tune, tune_grid

        machine.start()
        device = machine.device
        common: dict[str, Any] = {"seed": machine.seed, "on_progress": signs.move}
        if how.train is not None:
            report = train_grid(
                how.train, how.grid or (), data.source, number=how.evaluations, out=how.out, resume=how.resume,
                workers=how.workers, device=device, **common,
            )  # fmt: skip
        else:
            spec, images = (
                model.spec(model.name, "PlacedModel", device=device, img_sizes=size.given),
                data.read(batch_size=how.batch_size, workers=how.workers),
            )
            common["out"] = Results(how.out, how.resume)
            if how.grid is not None:
                report = tune_grid(spec, how.grid, images, number=how.evaluations, **common)
            else:
                found = SearchSpec(how.proxy, how.minutes, how.engine, how.precision)  # type: ignore[arg-type]
                front = how.front or ""
                alone = "," not in front and "=" in front
                aim: Any = Target.parse(how.target) if how.target is not None else [front] if alone else front
                report = tune(
                    spec, how.methods or (), images, target=aim, evaluations=how.evaluations, search=found,
                    check=how.check, **common,
                )  # fmt: skip
    if is_first_process():
        output.finish(report)
