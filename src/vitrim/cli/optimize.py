"""``vitrim optimize``: the fastest file for a model on this machine, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.bench import Suggested, progress
from vitrim.cli.options import Compute, Images, Limit, Model
from vitrim.cli.output import Output, resumable
from vitrim.errors import VitrimError

MaxLoss = Annotated[
    float | None,
    typer.Option("--max-loss", min=0.0, max=100.0, help="points of top-1 that may be lost; default: 1.0"),
]
Labels = Annotated[
    bool, typer.Option(help="top-1 decides; --no-labels: agreement with the dense model, for images of other classes")
]
Speedup = Annotated[
    float | None,
    typer.Option("--speedup", help="in place of --max-loss: lose least at this speed-up over the fastest dense model"),
]
OneBatch = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="images per batch to be fast at")]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="onnxruntime, openvino, torch.export, aoti; default: the first two, as installed"),
]
Precision = Annotated[
    str | None, typer.Option("--precision", help="fp32, bf16, int8; default: what the engines have here")
]
Out = Annotated[Path, typer.Option("--out", help="folder for the file, report.json and the picture")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the study in --out; start one if there is none")]


def optimize(
    *,
    model: Model,
    images: Images,
    labels: Labels = True,
    max_loss: MaxLoss = None,
    speedup: Speedup = None,
    batch_size: OneBatch = 1,
    method: Suggested = None,
    engine: Engine = None,
    precision: Precision = None,
    out: Out = Path("optimized"),
    resume: Resume = False,
    limit: Limit = None,
    compute: Compute,
    output: Output,
) -> None:
    """Find the fastest file for a model on this machine. Engine, precision, method and schedule are chosen.

    The dense model is timed on every engine in every precision. Methods race on the fastest on a third of the images,
    a file is chosen on the next third and scored once on the last.
    """
    from vitrim.report import show
    from vitrim.tuning.optimize import optimize

    if images.source is None:
        raise VitrimError("--images is missing: methods are compared on images, best with labels")
    with resumable(out / "study.jsonl"), progress() as tell:
        report = optimize(
            model.name, images.source, labels=labels, max_loss=max_loss, speedup=speedup, batch_size=batch_size,
            methods=method, engine=engine, precision=precision, out=out, resume=resume, limit=limit, **images.reading,
            **model.arguments, seed=compute.seed, threads=compute.threads, on_progress=tell,
        )  # fmt: skip
    show(output.console(), report)
    output.write(**report.record)
