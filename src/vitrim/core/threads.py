"""Models shared by several threads: detecting that one of them is inside a model."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from torch import nn

from vitrim.errors import VitrimError


def refuse_while_running(model: nn.Module) -> None:
    """Refuse to go on while another thread is inside ``model``, whose blocks are about to change.

    Looks at what the other threads execute just now, so a forward pays nothing for it, and one that ended with an error
    counts for nothing.

    Raises:
        VitrimError: naming the thread.
    """
    others = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    if not others:
        return
    modules = set(map(id, model.modules()))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in others.items():
        if any(id(owner) in modules for owner in _owners(frame)):
            raise VitrimError(
                f"this {type(model).__name__} runs in another thread ({names.get(ident, ident)}): call reduce_, set "
                "and restore_ while no forward runs"
            )


def _owners(frame: FrameType | None) -> Iterator[object]:
    """The objects whose methods a thread is executing, innermost first."""
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back
