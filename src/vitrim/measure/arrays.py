"""Arrays with a header in one compressed .npz file, without pickles."""

from __future__ import annotations

import json
import math
import stat
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitrim.errors import VitrimError, first_line
from vitrim.files import check_file, replaced

__all__ = ["LARGEST", "narrowed", "read_arrays", "widened", "write_arrays"]

HEADER = "header"
LARGEST = 2 * 2**30
"""Bytes of the arrays of one file."""
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
DAMAGES = (
    *(KeyError, ValueError, TypeError, EOFError, RuntimeError, MemoryError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, OverflowError, tokenize.TokenError),
)
"""Errors of reading a damaged file; a header that is nested too deeply is a RecursionError or a MemoryError."""


def narrowed(source: NDArray[Any]) -> NDArray[Any]:
    """Tokens (..., N0) from -1 to N0 - 1 in the narrowest integers; -1 becomes the largest value of an unsigned type.

    Example:
        >>> narrowed(np.array([0, 2, -1]))
        array([  0,   2, 255], dtype=uint8)
    """
    tokens = source.shape[-1]
    narrow = np.uint8 if tokens < np.iinfo(np.uint8).max else np.uint16 if tokens < 2**16 - 1 else np.int32
    return np.where(source < 0, np.iinfo(narrow).max, source).astype(narrow)


def widened(source: NDArray[Any], pruned: int) -> NDArray[np.int32]:
    """Undo `narrowed`; ``pruned`` is what stands for -1.

    Example:
        >>> widened(np.array([0, 2, 255], np.uint8), 255)
        array([ 0,  2, -1], dtype=int32)
    """
    wide = source.astype(np.int32)
    wide[source == pruned] = -1
    return wide


def write_arrays(file: str | Path, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write ``arrays`` and a ``header`` that JSON can hold, whole or not at all, with the folders above.

    Raises:
        VitrimError: it cannot be written.
    """
    file = Path(file)
    check_file(file)
    text: dict[str, Any] = {HEADER: np.array(json.dumps(dict(header)))}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as beside, beside.open("wb") as out:
            np.savez_compressed(out, **text, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise VitrimError(f"cannot write {file}: {error.strerror}") from error


def read_arrays(file: str | Path, what: str, version: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The header and the arrays that `write_arrays` wrote. Sizes are checked before an array is read.

    Args:
        file: to read.
        what: the file should be, for the message.
        version: the ``format`` that the header must have.

    Raises:
        VitrimError: there is no such file, it is no such file or damaged, of another format, or its arrays take more
            than 2 GiB.
    """
    file = Path(file)
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # a pipe would be waited for
            raise VitrimError(f"cannot read {file}: it is no file")
        with file.open("rb") as opened:
            if not zipfile.is_zipfile(opened):  # else numpy says how to unpickle it, which nobody should
                raise VitrimError(f"{file} is no {what}: it is no .npz file, or was cut short")
            _check_entries(opened)
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as stored:
                header = json.loads(str(stored[HEADER]))
                if not isinstance(header, dict) or "format" not in header:
                    raise VitrimError(f"{file} is no {what}: its header names no format")
                if header["format"] != version:
                    raise VitrimError(f"{file} has format {header['format']}, this vitrim reads {version}")
                json.dumps(header, ensure_ascii=False).encode()  # half a character can be printed nowhere
                return header, {name: stored[name] for name in stored.files if name != HEADER}
    except OSError as error:
        raise VitrimError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
    except VitrimError:
        raise
    except DAMAGES as error:
        raise VitrimError(f"{file} is no {what}: {first_line(error)}") from error


def _check_entries(opened: BinaryIO) -> None:
    """Check what the entries of an .npz file say of themselves, of which only the first bytes are read.

    Raises:
        ValueError: one is no array of numbers, does not have the size that its shape needs, or all are too large.
    """
    with zipfile.ZipFile(opened) as stored:
        entries = stored.infolist()
        names = {entry.filename for entry in entries}
        if f"{HEADER}.npy" not in names or len(names) < len(entries):
            raise ValueError("it has no header, or two arrays of one name")
        if sum(entry.file_size for entry in entries) > LARGEST:
            raise ValueError(f"its arrays would take more than {LARGEST / 2**30:.0f} GiB")
        for entry in entries:
            _check_entry(stored, entry)


def _check_entry(stored: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    name = entry.filename
    if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is encrypted, or compressed as no array is")
    with stored.open(entry) as content:
        read = READERS.get(np.lib.format.read_magic(content))
        if read is None:
            raise ValueError(f"{name} is of an unknown version")
        shape, _, dtype = read(content)
        start = content.tell()
    if dtype.kind not in ("U" if name == f"{HEADER}.npy" else "biuf"):
        raise ValueError(f"{name} holds {dtype}, no numbers")
    if min(shape, default=0) < 0 or start + math.prod(shape) * dtype.itemsize != entry.file_size:
        raise ValueError(f"{name} of shape {shape} and {dtype} does not have {entry.file_size} bytes")
