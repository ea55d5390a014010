"""Lock that allows one run in a folder at a time.

The lock is the system's, on a file in the folder: it ends with the process that holds it, however that ends, also by
``kill -9``. It is of the process, and so not of the processes it starts to read images.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitrim.errors import VitrimError

LOCK = ".lock"
"""Lock file in the folder of a run: names the process working in it. Left by a killed process, it means nothing."""

_held: set[Path] = set()
"""Folders that this process has locked: the system lets a process lock a file twice."""


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, creating the folder if it does not exist.

    Where the file system has no locks a warning says so; on Windows nothing is locked.

    Raises:
        VitrimError: another process, or another run of this one, is at work in the folder; or it cannot be written.
    """
    place = folder.resolve()
    if place in _held:
        raise VitrimError(f"another run of this process is at work in {folder}: give another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(folder)
    except OSError as error:
        raise VitrimError(f"cannot write to {folder}: {error.strerror}") from error
    _held.add(place)
    try:
        yield
    finally:
        _held.discard(place)
        (folder / LOCK).unlink(missing_ok=True)  # before it is released: the next one must not lose its own file
        os.close(descriptor)


def _locked(folder: Path) -> int:
    """An open file that this process has locked."""
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)  # the one before removed it between the two


def _lock(descriptor: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise VitrimError(f"{holder} is at work in {folder}: wait for it, or give another --out") from None
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): start no other run in it", stacklevel=3)
