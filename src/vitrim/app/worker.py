"""The process that runs the models. A job that takes too long or kills it is an error for its own user only.

Threads could not do that: a forward pass in a thread cannot be stopped.
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
"""That a job may take."""
START_SECONDS = 600.0
"""To import torch and load models, which a first start may have to download."""
GRACE = 1.0
"""Extra seconds, in which the service itself may still reply."""


class Worker:
    """A service, such as `vitrim.app.service.Service`, in a process of its own, started anew where it has ended.

    Jobs run one after the other. A context manager: the process ends with it.

    Args:
        make: makes the service, in the other process, such as `service`; it is pickled.
        seconds: that a job may take; then the process is ended.
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
        """The models on offer, once they are loaded.

        Raises:
            VitrimError: a model cannot be created, or is none that can be shown.
        """
        with self.lock:
            found: Sequence[Offer] = self._ask("offers", (), START_SECONDS)
            return found

    def call(self, job: str, *given: Any, first: tuple[str, ...] = ()) -> Any:
        """The result of a method of the service.

        Args:
            job: the method.
            given: its arguments.
            first: another method and its arguments, which runs before and may take as long as a start: what loads a
                model that was dropped since.

        Raises:
            VitrimError: what the service refuses; the job took too long, or ended the process.
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
            while not self.connection.poll(0.2):  # in short waits, so that Ctrl-C works
                if time.monotonic() > end:
                    self.stop()
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
        """End the process."""
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
        """Start the process, which loads the models meanwhile."""
        self.stop()
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, self.make), daemon=True)
        self.process.start()
        theirs.close()


def service(sources: Sequence[ModelSource], limits: Limits, threads: int | None = None) -> Service:
    """The service of a page, in the process that runs models.

    Args:
        sources: models on offer.
        limits: of uploads.
        threads: of torch; None for its own choice.
    """
    import torch

    from vitrim.app.service import Service

    if threads is not None:
        torch.set_num_threads(threads)
    return Service(sources, limits, SECONDS)


def _serve(connection: Connection, make: Callable[[], Any]) -> None:
    """Run jobs until the other end closes: reply to each whether it was done, and its result or one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then ends this process
    made = make()
    with contextlib.suppress(EOFError):
        while True:
            job, given = connection.recv()
            try:
                reply: tuple[bool, Any] = True, getattr(made, job)(*given)
            except VitrimError as error:
                reply = False, str(error)
            except Exception as error:  # the page shows one line, the terminal the rest; the next job is not affected
                traceback.print_exc()
                reply = False, f"the model failed: {first_line(error)[:200]}"
            connection.send(reply)
