"""``vitrim optimize``: the fastest file for a model on this machine, with its loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.options import (
    Compute,
    DataOptions,
    Limit,
    MethodsBesideDense,
    Model,
    NeededImages,
    Preprocess,
    Setup,
    Sizes,
)
from vitrim.cli.output import Output, resumable
from vitrim.progress import progress


@dataclass(frozen=True, kw_only=True)
class LabelledImages(NeededImages):
    data_option: DataOptions = None


@dataclass(frozen=True, kw_only=True)
class RacedSizes(Sizes):
    img_size: Annotated[
        str | None,
        typer.Option(
            metavar="PIXELS",
            help="image sizes to try, e.g. 192,208; the model's own alone: no others; default: 0.7 to 1.15 of it",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Aim(Setup):
    labels: Annotated[
        bool,
        typer.Option(help="measure top-1; --no-labels: agreement with the dense model, for images of other classes"),
    ] = True
    max_loss: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, help="largest loss of top-1 in points; default: 1.0")
    ] = None
    speedup: Annotated[
        float | None,
        typer.Option(help="instead of --max-loss: lose least at this speed-up over the fastest dense model"),
    ] = None
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="images per batch, to optimise for")] = 1
    methods: MethodsBesideDense = None
    engine: Annotated[
        str | None,
        typer.Option(help="onnxruntime, openvino, torch.export, aoti; default: the first two, if installed"),
    ] = None
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16, int8; default: all that the engines support here")
    ] = None
    out: Annotated[Path, typer.Option(help="folder for the file, report.json and the figure")] = Path("optimized")
    preprocess: Preprocess = False
    few_images: Annotated[
        bool, typer.Option("--few-images", help="continue although so few images cannot show a loss within the bound")
    ] = False
    resume: Annotated[bool, typer.Option("--resume", help="continue the study in --out, if there is one")] = False


def optimize(
    *,
    model: Model,
    sizes: RacedSizes,
    images: LabelledImages,
    aim: Aim,
    limit: Limit = None,
    compute: Compute,
    output: Output,
) -> None:
    """Find the fastest file for a model on this machine. It chooses engine, precision, image size, method, schedule.

    Methods race on a third of the images. The dense model is timed on every engine in every precision. The file is
    chosen on the second third, and scored once on the last.
    """
    with resumable(aim.out / "study.jsonl"), progress(f"loading {model.name}") as signs:
        from vitrim.measure.inputs import JudgedData
        from vitrim.results import FileResults
        from vitrim.tuning.optimize import optimize

        compute.start()
        report = optimize(
            model.spec(model.name, seed=compute.seed, img_sizes=sizes.given),
            images.spec(images.source, JudgedData, limit=limit, labels=aim.labels, few=aim.few_images),
            max_loss=aim.max_loss,
            speedup=aim.speedup,
            batch_size=aim.batch_size,
            methods=aim.methods,
            engine=aim.engine,
            precision=aim.precision,
            out=FileResults(aim.out, aim.resume, preprocess=aim.preprocess),
            on_progress=signs.tell,
        )
    output.finish(report)
