"""``vitrim freeze``: an adaptive method with the mean counts of given images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrim.cli.options import Compute, Limit, Model, NeededImages
from vitrim.cli.output import Output
from vitrim.progress import progress


def freeze(
    *,
    model: Model,
    method: Annotated[
        str, typer.Option("--method", "-m", help="an adaptive method, e.g. atm:align=16, or @FILE with one")
    ],
    out: Annotated[Path, typer.Option(help="the file, for -m @FILE")] = Path("frozen.json"),
    images: NeededImages,
    limit: Limit = None,
    compute: Compute,
    output: Output,
) -> None:
    """Fix the token counts of an adaptive method to their means over --images. Use it as -m @frozen.json.

    The static setting runs at any batch size, compiles and exports. With align=16 it leaves multiples of 16 tokens,
    which engines compute faster. --limit sets the number of images; default: 512.
    """
    with progress(f"loading {model.name}") as signs:
        from vitrim.measure.freeze import freeze as fix

        output.spare(out)
        compute.start()
        report = fix(
            model.spec(model.name), method, images.read(limit=limit), out=out, seed=compute.seed,
            on_progress=signs.tell,
        )  # fmt: skip
    output.finish(report)
