"""The files of a saved reduction: its method's options and learned parameters, and nothing of the host.

Also methods from files (``@FILE``), which keep the model they were found for, so that `reduce_` can warn on another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrim.checked import Stored
from vitrim.core.block import ReducedBlock, access
from vitrim.core.method import MethodConfig
from vitrim.errors import VitrimError, first_line, os_errors
from vitrim.files import parse_json, save_file, write_text

CONFIG_FILE = "reduction.json"
BEST_FILE = "best.json"
REDUCERS_FILE = "reducers.safetensors"
FORMAT = 1
LARGEST = 1 << 20
"""Bytes of the largest file that is read as a method."""


class _FoundBy(Stored):
    made_for: dict[str, Any]


class Saved(Stored):
    """A saved method, or a saved reduction."""

    format: int
    method: str
    options: dict[str, Any]
    weights: Literal["reducers.safetensors"] | None = None
    module: str = ""
    compact: bool = False
    whole: bool = False
    select: str = ""
    tuned: _FoundBy | None = None


def read_method_file(path: Path) -> dict[str, Any] | str:
    """The entries of a JSON file of one method, "method" and "options" among them, or the line of a text file.

    ``path`` is a file, or a folder with ``reduction.json`` or ``best.json``. In a text file, # begins a comment.

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
    """The content of a file with ``config`` and the search that found it; ``tuned["made_for"]`` is the model."""
    return {**_named(config), "weights": None, "tuned": dict(tuned)}


def _named(config: MethodConfig) -> dict[str, Any]:
    """The entries from which a method is made again."""
    options = json.loads(config.model_dump_json(include=config.model_fields_set))
    return {"format": FORMAT, "method": config.name, "version": config.traits.version, "options": options}


def record(text: str | bytes, path: Path) -> dict[str, Any]:
    """The entries of a saved method from JSON, of which "method" and "options" are always there."""
    saved = Saved.of(parse_json(text, path), path)
    if saved.format != FORMAT:
        raise VitrimError(f"{path} has format {saved.format}, this version of vitrim reads format {FORMAT}")
    return saved.model_dump(exclude_unset=True)


def write_reduction(
    model: nn.Module,
    config: MethodConfig,
    folder: str | Path,
    state: Mapping[str, Tensor] | None,
    module: str,
    compact: bool,
    whole: bool,
    select: str | None = None,
) -> None:
    """Write ``config`` and the learned parameters of ``model``; see `Reduction.save`, `checks.facts_for_reader`."""
    folder = _folder(folder)
    with os_errors(f"cannot save to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    weights = _learned(model, state)
    if weights:
        try:
            # safetensors refuses views that share memory or have gaps.
            save_file({name: value.contiguous() for name, value in weights.items()}, folder / REDUCERS_FILE)
        except (OSError, SafetensorError) as error:
            raise VitrimError(f"cannot save to {folder}: {first_line(error)}") from error
    written = {**_named(config), "model": type(model).__name__, "weights": REDUCERS_FILE if weights else None}
    origin = None if config.made_for is None else {"made_for": dict(config.made_for)}
    further = {"module": module, "compact": compact, "whole": whole, "select": select, "tuned": origin}
    written |= {name: value for name, value in further.items() if value}
    # Last: a folder without it is no saved reduction, so an interrupted save is not read.
    write_text(folder / CONFIG_FILE, json.dumps(written, indent=2) + "\n")


def read_parameters(model: nn.Module, config: MethodConfig, folder: str | Path) -> None:
    """Load learned parameters into ``model``, reduced under ``config``; see `Reduction.load_parameters`."""
    folder = _folder(folder)
    saved = read_reduction(folder)
    if saved["method"] != config.name:
        raise VitrimError(f"{folder} holds parameters of {saved['method']}, this model is under {config.name}")
    held, version = saved.get("version"), config.traits.version
    if held != version:
        raise VitrimError(f"{folder} holds version {held} of {config.name}, this vitrim has version {version}")
    weights: dict[str, Tensor] = {}
    if saved.get("weights"):
        path = folder / saved["weights"]
        try:
            weights = load_file(path)
        except FileNotFoundError:
            raise VitrimError(f"cannot read {path}: there is no such file") from None
        except (OSError, SafetensorError) as error:
            raise VitrimError(f"cannot read {path}: {error}") from None
    expected = _learned(model)
    # All names, shapes and values before the first copy: an error leaves the model as it was.
    problem = _mismatch(expected, weights)
    if problem:
        raise VitrimError(f"the parameters in {folder} do not fit this model: {problem}")
    with torch.no_grad():
        for name, value in weights.items():
            expected[name].copy_(value)


def read_reduction(folder: str | Path) -> dict[str, Any]:
    """The entries of ``reduction.json`` in ``folder``; "method" and "options" are always there."""
    folder = _folder(folder)
    path = folder / CONFIG_FILE
    with os_errors(f"cannot read {path}"):  # no permission, or the name is too long
        if not path.is_file():
            raise VitrimError(f"no saved reduction in {folder}: {CONFIG_FILE} is missing")
        text = path.read_bytes()
    return record(text, path)


def saved_method(folder: Path) -> str:
    """The name of the method saved in ``folder``."""
    return str(read_reduction(folder)["method"])


def saved_part(model: nn.Module, saved: dict[str, Any], folder: str | Path) -> nn.Module:
    """The part of ``model`` that ``saved`` is the reduction of; ``model`` itself if it is such a part."""
    name = saved.get("module", "")
    if not name or not isinstance(model, nn.Module):
        return model
    parts: dict[str, nn.Module] = dict(model.named_modules())
    if name in parts:
        return parts[name]
    # The part itself was given, so its own name in the whole model is unknown here.
    if type(model).__name__ == saved.get("model"):
        return model
    raise VitrimError(
        f"{folder} holds the reduction of {access(name)}, a {saved.get('model')}, and this {type(model).__name__} "
        "has no such part"
    )


def _learned(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The learned parameters of the reducers of ``model``, by depth and name, from its ``state_dict``."""
    state = model.state_dict() if state is None else state
    return {
        f"{block.depth}.{name}": state[f"{path}.reducer.{name}"]
        for path, block in model.named_modules()
        if isinstance(block, ReducedBlock)
        for name in block.reducer.state_dict()
    }


def _folder(given: str | Path) -> Path:
    """The path of a saved reduction's folder."""
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise VitrimError(f"a reduction is saved in a folder, and {given!r} names none")
    return Path(given)


def _mismatch(expected: dict[str, Tensor], given: dict[str, Tensor]) -> str | None:
    missing, extra = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    if missing or extra:
        return "; ".join(
            f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            for what, names in (("missing", missing), ("unexpected", extra))
            if names
        )
    for name, value in given.items():
        own = expected[name]
        given_dtype, own_dtype = (str(tensor.dtype).removeprefix("torch.") for tensor in (value, own))
        if value.shape != own.shape:
            return f"{name} has shape {tuple(value.shape)}, expected {tuple(own.shape)}"
        if value.is_complex() or value.is_floating_point() != own.is_floating_point():  # torch would cast silently
            return f"{name} is {given_dtype}, expected {own_dtype}"
        if own.is_floating_point() and not value.to(own.dtype).isfinite().all():
            return f"{name} has values that are not finite numbers in {own_dtype}"
    return None
