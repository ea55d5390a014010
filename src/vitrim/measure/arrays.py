"""Arrays with a header in one compressed .npz file, without pickles."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrim.errors import VitrimError, first_line
from vitrim.files import check_file, replaced

__all__ = ["narrowed", "read_arrays", "widened", "write_arrays"]

HEADER = "header"


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
    """The header and the arrays that `write_arrays` wrote.

    Args:
        file: to read.
        what: the file should be, for the message.
        version: the ``format`` that the header must have.

    Raises:
        VitrimError: there is no such file, it is no such file or damaged, or of another format.
    """
    try:
        with Path(file).open("rb") as opened:
            if not zipfile.is_zipfile(opened):  # else numpy says how to unpickle it, which nobody should
                raise VitrimError(f"{file} is no {what}: it is no .npz file, or was cut short")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as stored:
                header = json.loads(str(stored[HEADER]))
                if not isinstance(header, dict) or "format" not in header:
                    raise VitrimError(f"{file} is no {what}: its header names no format")
                if header["format"] != version:
                    raise VitrimError(f"{file} has format {header['format']}, this vitrim reads {version}")
                return header, {name: stored[name] for name in stored.files if name != HEADER}
    except OSError as error:
        raise VitrimError(f"cannot read {file}: {error.strerror or first_line(error)}") from error
    except VitrimError:
        raise
    except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise VitrimError(f"{file} is no {what}: {first_line(error)}") from error
