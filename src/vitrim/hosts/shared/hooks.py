"""Hooks for the time of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

Hook = tuple[Callable[..., Any], Callable[..., Any]]
"""The function that registers a hook, and the hook."""


class ThreadHooks:
    """Context with hooks that only see calls of this thread; other threads may run the same model."""

    def hooks(self) -> list[Hook]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        thread = threading.get_ident()

        def own(hook: Callable[..., Any]) -> Callable[..., Any]:
            # A server may run the model in several threads, of which one has a context.
            return lambda *given: hook(*given) if threading.get_ident() == thread else None

        self.handles = [register(own(hook)) for register, hook in self.hooks()]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
