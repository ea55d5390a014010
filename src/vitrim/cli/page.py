"""``vitrim app``: a page in the browser that shows the remaining tokens of an image."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from vitrim.cli.options import CLASSIFIERS, Threads, Weights, parse_options
from vitrim.progress import progress

DEFAULT_MODEL = "vitrim:cifar10_vit"
LARGEST_UPLOAD = 1000.0


def app(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help=f"models to choose from, default {DEFAULT_MODEL}: {CLASSIFIERS}"),
    ] = None,
    weights: Weights,
    port: Annotated[int, typer.Option(min=1, max=65535, help="of the page")] = 7860,
    host: Annotated[str, typer.Option(help="address of the page; 0.0.0.0 lets other machines reach it")] = "127.0.0.1",
    max_upload: Annotated[float, typer.Option(min=0.01, max=LARGEST_UPLOAD, help="largest upload in MB")] = 5.0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="open the page in the browser")] = True,
    threads: Threads = None,
) -> None:
    """Serve a page that shows the remaining tokens of an image. A slider sets the amount.

    For classifiers and embedding towers, and methods that need no training. The page sends no data anywhere and stores
    none. Ctrl-C ends it.
    """
    with progress("loading the page"):
        from vitrim.app.serving import serve

    serve(
        models or (DEFAULT_MODEL,),
        pretrained=weights.pretrained,
        checkpoint=weights.checkpoint,
        model_options=parse_options(weights.model_option),
        host=host,
        port=port,
        max_upload=max_upload,
        browser=browser,
        threads=threads,
        on_progress=partial(print, flush=True),
    )
