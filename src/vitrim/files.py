"""Output files: checked before the work begins, and written atomically."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

from vitrim.errors import VitrimError, first_line, os_errors

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

DEVICES = Path("/dev")
"""A system folder; a new file in it would be lost at a restart."""


def safe_name(text: str, signs: str) -> str:
    """A text as a file name: letters, digits and ``signs`` stay; a long name ends in a checksum.

    Example:
        >>> safe_name("lr=1e-3 or less", "=-")
        'lr=1e-3_or_less'
    """
    safe = "".join(letter if letter.isalnum() or letter in signs else "_" for letter in text)
    return safe if len(safe) <= 120 else f"{safe[:100]}-{zlib.crc32(text.encode()):08x}"  # file systems end at 255


def csv_text(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Comma-separated values with a header.

    Example:
        >>> csv_text(["method", "share"], [("tome:r=8,blocks=[1]", 0.5)])
        'method,share\\n"tome:r=8,blocks=[1]",0.5\\n'
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([columns, *rows])
    return out.getvalue()


def check_folder(folder: Path) -> None:
    """Refuse an output folder that cannot be created or written to. Creates nothing."""
    if folder == Path():
        raise VitrimError("the folder to write to is the current one or empty: name another")
    _check_way(folder, folder)


def check_file(file: Path) -> None:
    """Refuse a file that `write_text` could not write. Creates nothing."""
    if file == Path():
        raise VitrimError("cannot write .: it is a folder, or an empty name")
    with os_errors(f"cannot write {file}"):  # no permission to look, or a name that is too long
        there, folder = file.exists(), file.is_dir()
    if folder:
        raise VitrimError(f"cannot write {file}: it is a folder")
    if there and not os.access(file, os.W_OK):
        raise VitrimError(f"cannot write {file}: no permission to change it")
    if not there and _place(file).parent == DEVICES:
        raise VitrimError(f"cannot write {file}: {DEVICES} holds devices, and there is none of this name")
    if not there or file.is_file():
        _check_way(_place(file).parent, file)


# ---- JSON and YAML, of strangers -------------------------------------------------------------------------------------


def read_json(file: Path) -> Any:
    """The content of a JSON file; `VitrimError` if it cannot be read or is not valid."""
    with os_errors(f"cannot read {file}"):
        return parse_json(file.read_bytes(), file)


def parse_json(text: str | bytes, name: object, kind: type[VitrimError] = VitrimError, *, hook: Any = None) -> Any:
    """The content of a JSON text called ``name``; a ``kind`` of error if it is not valid.

    Example:
        >>> parse_json("[", "x.json")
        Traceback (most recent call last):
        vitrim.errors.VitrimError: cannot read x.json: it is not valid JSON (Expecting value: line 1 column 2 (char 1))
    """
    try:
        return json.loads(text, object_hook=hook)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or lists nested too deep
        raise kind(f"cannot read {name}: it is not valid JSON ({first_line(error)})") from None


# ---- output ----------------------------------------------------------------------------------------------------------


def json_text(value: Any, *, indent: int | None = None) -> str:
    """``value`` as strict JSON: non-finite numbers become null, and mappings become dicts.

    Example:
        >>> json_text({"box_AP": 0.5, "box_AP_large": float("nan"), "classes": (1, 2)})
        '{"box_AP": 0.5, "box_AP_large": null, "classes": [1, 2]}'
    """
    return json.dumps(_strict(value), indent=indent, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(file: Path, text: str) -> None:
    """Write a file atomically, with its parent folders. Follows links, and writes into devices and pipes.

    A `VitrimError` if it cannot be written; an existing file is unchanged.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_text(Path(folder) / "new" / "record.json", "{}")
        ...     (Path(folder) / "new" / "record.json").read_text()
        '{}'
    """
    with written(file) as place:
        place.write_text(text, encoding="utf-8")


@contextmanager
def written(file: Path) -> Iterator[Path]:
    """Yield a path to write, which becomes ``file`` at the end; see `write_text`."""
    check_file(file)
    with os_errors(f"cannot write {file}"):
        if file.exists() and not file.is_file():
            yield file
            return
        place = _place(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replaced(place) as beside:
            yield beside


def cache_folder() -> Path:
    """The folder in which vitrim keeps what it measured here; `OSError` if the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():
        return Path(given) / "vitrim"
    try:
        return Path.home() / ".cache" / "vitrim"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, first_line(error)) from error


def remembered(name: str, key: str, measure: Callable[[], str], valid: Collection[str]) -> str:
    """A choice that is made once on this machine: that of the file ``name`` of `cache_folder` for ``key``, else
    ``measure()``.

    A choice that is not ``valid`` does not count. Without a cache to read and write, every process measures.
    """
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
        # A process that was killed, or another version, may have left anything here: it is measured again.
        known = found if isinstance(found, dict) else {}
    if known.get(key) in list(valid):  # a list: the value may be unhashable
        return known[key]
    chosen = measure()
    with suppress(OSError, VitrimError):
        write_text(cache_folder() / name, json_text({**known, key: chosen}, indent=2) + "\n")
    return chosen


def whole_lines(file: Path, parse: Callable[[bytes], T]) -> tuple[list[T], int]:
    """Read the lines of a log, and their size in bytes, up to a damaged end, such as after a kill or on a full disk.

    ``parse`` raises `ValueError` for a damaged line. A damaged line with intact ones behind it is a `VitrimError`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "log").write_text("1\\n2\\n3")
        ...     whole_lines(Path(folder) / "log", int)
        ([1, 2], 4)
    """
    with os_errors(f"cannot read {file}"):
        data = file.read_bytes()
    found: list[T] = []
    size, damaged = 0, ""
    # What follows the last newline was cut off while it was written: it is no line.
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = parse(line)
        except (ValueError, RecursionError) as error:
            damaged = damaged or f"{file}, line {number}, is damaged: {first_line(error)}"
            continue
        if damaged:
            raise VitrimError(damaged)
        found.append(row)
        size += len(line) + 1
    return found, size


def save_file(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' ``save_file`` with the usual file mode; the library makes files that only their owner can read."""
    from safetensors import torch as library

    # Touching the file tells which mode the user's mask gives; on failure no empty file may stay.
    new = not file.exists()
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        library.save_file(tensors, file, metadata=metadata)
    except BaseException:
        if new:
            file.unlink(missing_ok=True)
        raise
    file.chmod(mode)


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yield a path to write, which replaces ``file`` at the end; after an error ``file`` is unchanged."""
    # the process id makes the name unique
    beside = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        yield beside
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _place(file: Path) -> Path:
    return Path(os.path.realpath(file))


def _check_way(folder: Path, wanted: Path) -> None:
    """Check that the nearest existing parent is a writable folder."""
    with os_errors(f"cannot write to {wanted}"):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise VitrimError(f"cannot write to {wanted}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise VitrimError(f"cannot write to {wanted}: no permission in {there}")
    # a temporary file reveals more than permissions do, such as for /proc
    with os_errors(f"cannot write to {wanted}"), TemporaryFile(dir=there):
        longest = os.pathconf(there, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    if any(len(os.fsencode(part)) > longest for part in wanted.parts):
        raise VitrimError(f"cannot write to {wanted}: {os.strerror(errno.ENAMETOOLONG)}")
