"""Methods from files: a saved reduction, the result of a search, or a text file with one line.

What a file says of the model it was made for goes with the method, so that `vitrim.reduce_` can warn on another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrim.errors import VitrimError, first_line

if TYPE_CHECKING:
    from vitrim.core.config import MethodConfig

CONFIG_FILE = "reduction.json"
BEST_FILE = "best.json"
FORMAT = 1
LARGEST = 1 << 20
"""Bytes of a file; a larger one holds no method."""


def read_method_file(path: Path) -> dict[str, Any] | str:
    """The entries of a JSON file of one method, "method" and "options" among them, or the line of a text file.

    Args:
        path: a file, or a folder with ``reduction.json`` or ``best.json``. In a text file, what follows a # is ignored.

    Raises:
        VitrimError: it is missing, cannot be read, or holds no method.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder) / "fast.txt"
        ...     _ = file.write_text("# for the web service\\ntome:r=16\\n")
        ...     read_method_file(file)
        'tome:r=16'
    """
    path = path.expanduser()
    try:
        if path.is_dir():
            path = next((path / name for name in (CONFIG_FILE, BEST_FILE) if (path / name).is_file()), path)
        if path.is_dir():
            raise VitrimError(f"no method in the folder {path}: it has neither {CONFIG_FILE} nor {BEST_FILE}")
        if path.stat().st_size > LARGEST:
            raise VitrimError(f"{path} is no file of a method: it has {path.stat().st_size} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise VitrimError(f"no file {path}: @ is followed by the file of a method, e.g. @tuned/best.json") from None
    except OSError as error:
        raise VitrimError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise VitrimError(f"{path} is no file of a method: it is not text") from None
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return record(text, path)
    lines = [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]
    if len(lines) != 1:
        raise VitrimError(f"{path} has {len(lines)} lines with a method: write one, e.g. tome:r=13")
    if lines[0].startswith("@"):
        raise VitrimError(f"{path} names another file, {lines[0]}: write the method itself")
    return lines[0]


def entries(config: MethodConfig, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file that holds ``config`` and what is known of how it was found.

    Args:
        config: the method.
        tuned: of these ``made_for`` says for which model (`vitrim.core.fit.described`).
    """
    return {
        "format": FORMAT,
        "method": config.name,
        "version": config.version,
        "options": json.loads(config.model_dump_json(include=config.model_fields_set)),
        "weights": None,
        "tuned": dict(tuned),
    }


def record(text: str, path: Path) -> dict[str, Any]:
    """The entries of a saved method, of which "method" and "options" are always there.

    Args:
        text: JSON.
        path: where it is from, for messages.

    Raises:
        VitrimError: it is not such a record.
    """
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or lists in lists without end
        raise VitrimError(f"{path} is not valid JSON: {first_line(error)}") from None
    complete = isinstance(saved, dict) and {"format", "method", "options"} <= set(saved)
    if not complete or not isinstance(saved["method"], str) or not isinstance(saved["options"], dict):
        raise VitrimError(f"{path} is not a saved reduction: it needs format, method and options")
    if saved["format"] != FORMAT:
        raise VitrimError(f"{path} has format {saved['format']}, this version of vitrim reads format {FORMAT}")
    tuned = saved.get("tuned")
    if tuned is not None and not (isinstance(tuned, dict) and isinstance(tuned.get("made_for"), dict)):
        raise VitrimError(f"{path} is damaged: what it says of the search does not name the model")
    return dict(saved)
