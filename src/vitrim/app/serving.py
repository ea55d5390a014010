"""The server of the page: on this machine alone unless told otherwise, without a request to anywhere."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from vitrim.app.records import Limits
from vitrim.app.worker import Worker
from vitrim.errors import VitrimError

__all__ = ["check_port", "serve"]

QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "GRADIO_SSR_MODE": "False"}
"""gradio reads these when it is imported."""


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be served at.

    Raises:
        VitrimError: no such host on this machine, or a port that is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise VitrimError(f"cannot serve at {host}:{port}: {error.strerror or error}; see --host and --port") from error


def serve(worker: Worker, limits: Limits, *, host: str, port: int, browser: bool, ready: Callable[[str], None]) -> None:
    """Serve the page until the process is told to end.

    Args:
        worker: runs the models.
        limits: of uploads.
        host, port: the address.
        browser: open the page in the user's browser.
        ready: is called with the page's address once it answers.
    """
    with TemporaryDirectory(prefix="vitrim-app-") as folder:  # uploads too; all of it goes with the server
        os.environ.update(QUIET, GRADIO_TEMP_DIR=folder)
        from starlette.middleware import Middleware

        from vitrim.app.guard import UploadsOnly
        from vitrim.app.page import CSS, make_page, theme

        page = make_page(worker, limits, Path(folder))
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            inbrowser=browser,
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
            app_kwargs={"middleware": [Middleware(UploadsOnly)]},
        )
        ready(address)
        try:
            while True:
                time.sleep(3600)
        finally:
            page.close(verbose=False)
