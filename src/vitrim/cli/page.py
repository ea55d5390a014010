"""``vitrim app``: a page in the browser that shows what methods leave of an image."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Annotated

import typer

from vitrim.cli import common
from vitrim.cli.setup import CLASSIFIERS, Threads, Weights
from vitrim.errors import MissingPackageError, VitrimError

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
    """Serve a page: an image, a method, a slider, and what is left after each block, with its cost.

    It sends nothing anywhere, keeps nothing of its users, and ends with Ctrl-C. For classifiers, and methods that need
    no training.
    """
    names = list(dict.fromkeys(models or (DEFAULT_MODEL,)))
    if weights.checkpoint is not None and len(names) > 1:
        raise VitrimError("--checkpoint has the weights of one model, and several are given")
    for package in ("gradio", "matplotlib"):
        if find_spec(package) is None:
            raise MissingPackageError(f"the page needs the package '{package}': pip install 'vitrim[app]'")
    from vitrim.app.messages import Limits, ModelSource
    from vitrim.app.serving import check_port, serve
    from vitrim.app.worker import Worker, service
    from vitrim.loading import check_name

    for name in names:
        check_name(name)
    check_port(host, port)
    sources = [
        ModelSource(name, weights.of(name), weights.pretrained, weights.checkpoint, weights.options) for name in names
    ]
    limits = Limits(megabytes=max_upload)
    out = common.console()
    out.print(f"loading {', '.join(names)}", markup=False, highlight=False, soft_wrap=True)
    with Worker(partial(service, sources, limits, threads)) as worker:
        serve(worker, limits, host=host, port=port, browser=browser, ready=lambda where: _say(where))


def _say(address: str) -> None:
    print(f"the page is at {address}; Ctrl-C ends it", flush=True)
