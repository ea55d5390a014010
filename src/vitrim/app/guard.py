"""Events name uploads, never addresses: gradio would fetch a file from an address that a request names as its path."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["UploadsOnly", "names_address"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

UPLOAD = "/gradio_api/upload"
"""The end of the path of uploads. Of events, which gradio also takes under names of the caller's choice
(``/gradio_api/run/upload``), none ends so: names have no slash."""
LARGEST = 100_000
"""Bytes of an event: a few names and numbers, and where its upload lies."""
REFUSED = b'{"detail": "an event is a short JSON that names uploads, no addresses"}'


class UploadsOnly:
    """Middleware that refuses events of another form; uploads, which are large, pass.

    Args:
        app: the server behind it, by ASGI.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith(UPLOAD):
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more and len(body) <= LARGEST:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > LARGEST or names_address(body):
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSED)).encode())]
            await send({"type": "http.response.start", "status": 400, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSED})
            return
        read = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(read, None) or await receive()

        await self.app(scope, again, send)


def names_address(body: bytes) -> bool:
    """Tell that an entry ``path`` within a JSON holds an address, or that a body that is there is no JSON.

    Example:
        >>> names_address(b'{"data": [{"path": "http://host/x.png"}]}'), names_address(b'{"path": "/tmp/x.png"}')
        (True, False)
    """
    if not body:
        return False
    try:
        todo = [json.loads(body)]
    except (ValueError, RecursionError):
        return True
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            path = one.get("path")
            if path is not None and (not isinstance(path, str) or "://" in path or path.startswith("data:")):
                return True
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return False
