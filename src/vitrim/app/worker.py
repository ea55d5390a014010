"""The process that runs the models. A job that takes too long or kills it is an error only for its user.

A forward pass in a thread could not be stopped.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Self

from vitrim.errors import VitrimError, first_line

if TYPE_CHECKING:
    from vitrim.app.messages import Limits, ModelSource, Offer
    from vitrim.app.service import Service

SPAWN = multiprocessing.get_context("spawn")
SECONDS = 20.0
"""Limit of a job."""
START_SECONDS = 600.0
"""Limit of a start: importing torch, and loading or downloading models."""
GRACE = 1.0
"""Extra seconds for the service to reply."""


class Worker:
    """A service, such as `vitrim.app.service.Service`, in a separate process, restarted when it has ended.

    Jobs run one by one, each for at most so many ``seconds``. ``make``, which is pickled, creates the service in the
    process. A context manager, which ends the process.
    """

    def __init__(self, make: Callable[[], Any], *, seconds: float = SECONDS) -> None:
        self.make = make
        self.seconds = seconds
        self.lock = threading.Lock()
        self.process: BaseProcess | None = None
        self.connection: Connection | None = None
        self.ready = False
        self._start()

    @cached_property
    def offers(self) -> Sequence[Offer]:
        """The models, once they are loaded; `VitrimError` if one cannot be created or shown."""
        with self.lock:
            found: Sequence[Offer] = self._ask("offers", (), START_SECONDS)
            return found

    def call(self, job: str, *given: Any, first: tuple[str, ...] = ()) -> Any:
        """The result of the method ``job`` of the service.

        ``first`` is a method and its arguments to call before, with the limit of a start, to load the model.
        `VitrimError` of the service, or if the job took too long or ended the process.
        """
        with self.lock:
            if self.process is None or not self.process.is_alive():
                self._start()
            if not self.ready:
                self._ask("offers", (), START_SECONDS)
            if first:
                self._ask(first[0], first[1:], START_SECONDS)
            return self._ask(job, given, self.seconds)

    def _ask(self, job: str, given: tuple[Any, ...], seconds: float) -> Any:
        assert self.connection is not None
        try:
            self.connection.send((job, given))
            end = time.monotonic() + seconds + GRACE
            while not self.connection.poll(0.2):  # short waits, so that Ctrl-C works
                if time.monotonic() > end:
                    self.stop()
                    # A job inside torch cannot be interrupted, so its process ends.
                    hint = "models must load in that time" if seconds == START_SECONDS else "take milder settings"
                    raise VitrimError(f"this took more than {seconds:g} s and was ended: {hint}")
            done, reply = self.connection.recv()
        except (EOFError, OSError) as error:
            self.stop()
            raise VitrimError("this ended the process that runs models: is there enough memory?") from error
        if not done:
            raise VitrimError(reply)
        self.ready = True
        return reply

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.connection is not None:
            self.connection.close()
        self.process, self.connection, self.ready = None, None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.stop()
        # A fresh process: a fork would share threads and locks that torch holds.
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, self.make), daemon=True)
        self.process.start()
        # With this end held by the child alone, its death reads as the end of the pipe.
        theirs.close()


def service(sources: Sequence[ModelSource], limits: Limits, threads: int | None = None) -> Service:
    """Create the service of a page; arguments as of `vitrim.app.serving.serve`."""
    import torch

    from vitrim.app.service import Service

    if threads is not None:
        torch.set_num_threads(threads)
    return Service(sources, limits, SECONDS)


def _serve(connection: Connection, make: Callable[[], Any]) -> None:
    """Run jobs until the connection closes; reply to each with its success, and its result or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C and ends this process
    made = make()
    with contextlib.suppress(EOFError):
        while True:
            job, given = connection.recv()
            try:
                reply: tuple[bool, Any] = True, getattr(made, job)(*given)
            except VitrimError as error:
                reply = False, str(error)
            except Exception as error:  # the page shows one line, the terminal the traceback
                traceback.print_exc()
                reply = False, f"the model failed: {first_line(error)[:200]}"
            connection.send(reply)
