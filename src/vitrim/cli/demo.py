"""``vitrim demo``: accuracy and speed of reduction, offline, in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.options import Compute
from vitrim.cli.output import Output
from vitrim.errors import VitrimError
from vitrim.progress import progress


def demo(
    *,
    out: Annotated[Path, typer.Option(help="folder for demo.json and the figures")] = Path("vitrim-demo"),
    cifar10: Annotated[
        str | None,
        typer.Option(help="your copy of CIFAR-10 (parquet files or folders): also score the shipped model on it"),
    ] = None,
    compute: Compute,
    output: Output,
) -> None:
    """Try vitrim offline: accuracy on handwritten digits, speed here.

    It reduces and scores a small ViT, times DeiT-S on this machine, and draws both.
    """
    with progress("loading the models of the demo") as signs:
        try:
            from vitrim.app import demo as run
        except ModuleNotFoundError as error:
            raise VitrimError(f"the demo needs {error.name}: pip install '.[demo]'") from error
        report = run.demo(out, cifar10=cifar10, threads=compute.threads, seed=compute.seed, on_progress=signs.tell)
    output.finish(report)
