"""The server of the page; by default only this machine can reach it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitrim.app.messages import Limits, ModelSource
from vitrim.app.worker import Worker, service
from vitrim.errors import VitrimError, check_installed
from vitrim.loading import check_name, weights_of

QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_SSR_MODE": "False"}
"""Environment variables that gradio reads at import."""


def check_port(host: str, port: int) -> None:
    """Refuse a host that is not this machine's, or a port that is in use or not permitted."""
    try:
        # Before models are loaded: a port in use should not cost a minute.
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise VitrimError(
            f"cannot serve at {host}:{port}: {error.strerror or error}; choose another host or port"
        ) from error


def serve(
    models: Sequence[str],
    *,
    pretrained: bool = False,
    checkpoint: Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    max_upload: float = 5.0,
    browser: bool = True,
    threads: int | None = None,
    on_progress: Callable[[str], None] = print,
) -> None:
    """Serve the page until the process ends.

    Args:
        models: names of the models, as of `vitrim.ModelSpec`.
        pretrained, checkpoint, model_options: as of `vitrim.ModelSpec`; a checkpoint only with one model.
        max_upload: largest upload in MB.
        threads: of torch in the process that runs models; None: torch's default.
        on_progress: called with a line: the models being loaded, then the page's address.

    Raises:
        VitrimError: an unknown or unsupported model, or an address in use.
    """
    names = list(dict.fromkeys(models))
    if checkpoint is not None and len(names) > 1:
        raise VitrimError("a checkpoint has the weights of one model, and several are given")
    check_installed("the page", "gradio", "matplotlib", "PIL", "jinja2", extra="app")
    for name in names:
        check_name(name)
    check_port(host, port)
    weights = {name: weights_of(name, pretrained=pretrained, checkpoint=checkpoint) for name in names}
    sources = [ModelSource(name, weights[name], pretrained, checkpoint, dict(model_options or {})) for name in names]
    limits = Limits(megabytes=max_upload)
    on_progress(f"loading {', '.join(names)}")
    # the temporary folder also contains the uploads
    worker = Worker(partial(service, sources, limits, threads))
    with worker, TemporaryDirectory(prefix="vitrim-app-") as folder:
        page, address = _launched(worker, limits, folder, server_name=host, server_port=port, inbrowser=browser)
        on_progress(f"the page is at {address}; Ctrl-C ends it")
        try:
            while True:
                time.sleep(3600)
        finally:
            page.close(verbose=False)


def _launched(worker: Worker, limits: Limits, folder: str, **where: Any) -> tuple[Any, str]:
    """The page, served in threads of its own, and its address; without what gradio offers to others."""
    os.environ.update(QUIET, GRADIO_TEMP_DIR=folder)
    # Imported late: gradio reads these variables as it loads.
    from vitrim.app.page import CSS, make_page, theme

    page = make_page(worker, limits, Path(folder))
    _, address, _ = page.launch(
        **where,
        # No tunnel, no reports of use, no interface for other programs.
        share=False,
        quiet=True,
        show_error=False,
        prevent_thread_lock=True,
        max_file_size=int(limits.megabytes * 1e6),
        footer_links=["gradio"],
        theme=theme(),
        css=CSS.read_text(encoding="utf-8"),
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        pwa=False,
    )
    return page, address
