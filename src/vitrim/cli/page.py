"""``vitrim app``: a page in the browser that shows what methods leave of an image."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from vitrim.cli.options import CLASSIFIERS, Threads, Weights, parse_options
from vitrim.progress import progress

DEFAULT_MODEL = "vitrim:cifar10_vit"
LARGEST_UPLOAD = 1000.0

Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help=f"models on offer, default {DEFAULT_MODEL}: {CLASSIFIERS}"),
]
Port = Annotated[int, typer.Option("--port", min=1, max=65535, help="of the page's address")]
Host = Annotated[
    str, typer.Option("--host", help="address to serve at; 0.0.0.0 lets in everybody who reaches this machine")
]
MaxUpload = Annotated[
    float, typer.Option("--max-upload", min=0.01, max=LARGEST_UPLOAD, help="megabytes of an uploaded file, at most")
]
Browser = Annotated[bool, typer.Option("--browser/--no-browser", help="open the page in the browser")]


def app(
    *,
    models: Models = None,
    weights: Weights,
    port: Port = 7860,
    host: Host = "127.0.0.1",
    max_upload: MaxUpload = 5.0,
    browser: Browser = True,
    threads: Threads = None,
) -> None:
    """Serve a page that shows what is left of an image after each block. A slider moves the amount.

    It sends nothing anywhere, keeps nothing of its users, and ends with Ctrl-C. For classifiers, and methods that need
    no training.
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
