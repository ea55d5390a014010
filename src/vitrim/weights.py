"""Weights from local files, all checked before any is loaded; no pickle is executed."""

from __future__ import annotations

import argparse
import copy
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrim.core.registry import ask
from vitrim.errors import VitrimError, first_line
from vitrim.files import check_file, replaced, save_file

WEIGHTS_FILE = "model.safetensors"
"""The model's weights in the folder of a run of ``vitrim train``."""

RECIPE = "recipe.yaml"
"""All values of the run's recipe."""

RESULT = "result.json"
"""The run's results: updates, seconds, the last and the best evaluation."""

UPDATES, EVALUATIONS = "log.csv", "evaluations.jsonl"
"""The run's log: a row per logged update, a line per evaluation."""

MOST_NAME, MOST_REASON = 200, 200
"""Most characters of a file name, and of a library's reason, in a message."""

PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
"""Suffixes of ``torch.save``; its zip archives are recognised with any suffix."""

DDP = "module."
"""Prefix of DataParallel."""

ENCODER = "encoder."
"""Prefix of the part of a pre-training model that is fine-tuned."""


def weights_file(checkpoint: Path) -> Path:
    """The path of a file of weights: ``checkpoint``, or the file in this folder of a run."""
    with _reading(checkpoint):
        return checkpoint / WEIGHTS_FILE if checkpoint.is_dir() else checkpoint


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """Load a file of weights into ``model``; after an error the model is unchanged.

    Raises:
        VitrimError: no file of weights; a name, a shape or a kind of number that does not match; a weight that is not
            finite in the model's precision.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.torch import save_file
        >>> model = nn.Linear(3, 2)
        >>> with TemporaryDirectory() as folder:
        ...     save_file(model.state_dict(), Path(folder) / "linear.safetensors")
        ...     load_checkpoint(model, Path(folder) / "linear.safetensors")
    """
    load_weights(model, _read(path), path)


def load_host(model: nn.Module, path: Path) -> None:
    """Load a file of weights as `load_checkpoint` does; ``model`` gets a new head if the file has another number of
    classes.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import timm
        >>> model, three = (timm.create_model("test_vit", num_classes=count) for count in (5, 3))
        >>> with TemporaryDirectory() as folder:
        ...     save_file(three.state_dict(), Path(folder) / "three.safetensors")
        ...     load_host(model, Path(folder) / "three.safetensors")
        >>> model.num_classes
        3
    """
    weights, library = _read(path), ask(model)
    layers = library.class_layers(model).items()
    # Some classifiers have rows for more than classes, such as the background; None: the file has no classifier.
    found = next((len(weights[f"{name}.weight"]) - more for name, more in layers if f"{name}.weight" in weights), None)
    if found not in (None, library.num_classes(model)):
        trial = _without_memory(model)
        library.reset_head(trial, found)
        weights = at_size_of(trial, weights, path)
        _check_fit(trial.state_dict(), weights, path)  # before the head is replaced
        library.reset_head(model, found)
    load_weights(model, weights, path)


def load_encoder(model: nn.Module, path: Path) -> None:
    """Load what a file has under ``encoder.``, of a pre-training without labels; the model's classifiers stay
    unchanged.

    Raises:
        VitrimError: as `load_checkpoint`, or no encoder in the file.
    """
    weights = {key.removeprefix(ENCODER): value for key, value in _read(path).items() if key.startswith(ENCODER)}
    if not weights:
        raise VitrimError(f"{path} has no weights of an encoder, none called {ENCODER}*")
    heads = ask(model).class_layers(model)
    # The check wants every name: the model's own classifier stands in for the one that a pre-training lacks.
    own = {key: value for key, value in model.state_dict().items() if key.rpartition(".")[0] in heads}
    load_weights(model, {**weights, **own}, path)


def load_backbone(model: nn.Module, path: Path) -> None:
    """Load a classifier's weights without its head into the backbone of a dense model; kernels and positions are
    resampled.

    Raises:
        VitrimError: as `load_checkpoint`, or a model without a backbone.
    """
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        raise VitrimError(f"{type(model).__name__} has no backbone to load weights into: it is no dense model")
    weights, expected = ask(backbone).resampled(backbone, _read(path)), backbone.state_dict()
    load_weights(backbone, {key: value for key, value in weights.items() if key in expected}, path)


def holds_encoder(path: Path, model: nn.Module) -> bool:
    """True if a file of weights has an encoder for ``model``; refuses what is no file of weights."""
    inner = any(key.startswith(ENCODER) for key in _names(path))
    return inner and not any(key.startswith(ENCODER) for key in model.state_dict())


def convert_weights(source: Path, target: Path, *, key: str | None = None) -> tuple[int, int]:
    """Convert a file of ``torch.save`` to safetensors with the same names; returns the numbers of tensors and of
    values.

    Args:
        key: of the dict to convert, if several contain weights; dots for nested dicts.

    Raises:
        VitrimError: no file of weights, several dicts of weights and no key, or no place to write.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     torch.save({"model": nn.Linear(3, 2).state_dict(), "epoch": 3}, Path(folder) / "linear.pth")
        ...     convert_weights(Path(folder) / "linear.pth", Path(folder) / "linear.safetensors")
        (2, 8)
    """
    check_file(target)
    if target.suffix != ".safetensors":
        raise VitrimError(f"cannot write {target}: the name of the file must end in .safetensors")
    if not _is_pickle(source):
        with _reading(source), safe_open(source, framework="pt"):
            raise VitrimError(f"{source} is a safetensors file already")
    weights = {
        name: value.detach().clone(memory_format=torch.contiguous_format)  # two names may share memory
        for name, value in _read_pickle(source, key=key, option="--key").items()
    }
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target) as beside:
            save_file(weights, beside)
    except (OSError, SafetensorError) as error:
        raise VitrimError(f"cannot write {target}: {first_line(error)}") from error
    return len(weights), sum(value.numel() for value in weights.values())


def _without_memory(model: nn.Module) -> nn.Module:
    # A trial costs no memory: deepcopy finds these empty tensors in its memo and copies no weight.
    shapes: dict[int, Any] = {}
    for value in model.state_dict(keep_vars=True).values():
        empty = torch.empty_like(value, device="meta", requires_grad=False)
        shapes[id(value)] = nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
    return copy.deepcopy(model, shapes)


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Check all weights, which were read from ``path``, then load; a model on the meta device is only checked."""
    weights, expected = at_size_of(model, weights, path), model.state_dict()
    _check_fit(expected, weights, path)
    if not any(value.is_meta for value in expected.values()):
        model.load_state_dict(weights)


def at_size_of(model: nn.Module, weights: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """``weights`` of a file; positions of another image size are resampled by the model's library, with a warning.

    Weights that differ in anything else are returned as they are: `_check_fit` says how.
    """
    expected, library = model.state_dict(), ask(model)
    if weights.keys() != expected.keys():
        return weights
    other = [key for key, value in weights.items() if value.shape != expected[key].shape]
    if not other or not all(library.are_positions(key) for key in other):
        return weights
    first, more = other[0], f" and {len(other) - 1} others" if len(other) > 1 else ""
    old, new = tuple(weights[first].shape), tuple(expected[first].shape)
    try:
        found = dict(library.resampled(model, weights))
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise VitrimError(
            f"{path}: {first} has shape {old}, this model needs {new}, and {library.name} cannot resample it: "
            f"{first_line(error)}"
        ) from error
    if any(found[key].shape != expected[key].shape for key in other if key in found):
        return weights  # the library has no way
    size = library.input_size(model)
    images = "" if size is None else f", for images of {size[1]} x {size[2]} px"
    warnings.warn(
        f"{path} is of another image size: {first} of shape {old}{more} is resampled to {new}, as {library.name} does"
        f"{images}",
        stacklevel=2,
    )
    return found


def _check_fit(expected: dict[str, Tensor], weights: dict[str, Tensor], path: Path) -> None:
    """Refuse weights whose names, shapes or kinds of numbers differ from ``expected``."""
    for what, names in (
        ("lacks, of this model,", sorted(set(expected) - set(weights))),
        ("has, beside those of this model,", sorted(set(weights) - set(expected))),
    ):
        if names:
            raise VitrimError(f"{path} {what} {len(names)} parameter(s), first {names[0]}")
    for key, value in weights.items():
        if value.shape != expected[key].shape:
            own = f"; run:{path.parent} is the model of that run" if (path.parent / RECIPE).is_file() else ""
            raise VitrimError(
                f"{path}: {key} has shape {tuple(value.shape)}, this model needs {tuple(expected[key].shape)}{own}"
            )
    for key, value in weights.items():  # torch would cast silently: drop imaginary parts, overflow to infinity
        dtype = expected[key].dtype
        given, needed = (str(kind).removeprefix("torch.") for kind in (value.dtype, dtype))
        if value.dtype.is_complex or value.dtype.is_floating_point != dtype.is_floating_point:
            wanted = "real numbers" if dtype.is_floating_point else "integers"
            raise VitrimError(f"{path}: {key} is {given}, this model needs {wanted} ({needed})")
        if dtype.is_floating_point and not value.to(dtype).isfinite().all():
            raise VitrimError(f"{path}: {key} has values that are not finite numbers in {needed}")


def _read(path: Path) -> dict[str, Tensor]:
    if _is_pickle(path):
        return _read_pickle(path)
    with _reading(path):
        return load_file(path)


def _names(path: Path) -> list[str]:
    """The names in a file; tensors of safetensors are not read."""
    if _is_pickle(path):
        return list(_read_pickle(path))
    with _reading(path), safe_open(path, framework="pt") as file:
        return list(file.keys())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a `VitrimError`."""
    try:
        yield
    except OSError as error:
        raise VitrimError(f"cannot read {str(path)[:MOST_NAME]}: {error.strerror or first_line(error)}") from error
    except SafetensorError as error:
        raise VitrimError(
            f"{path} is not a safetensors file ({first_line(error)}); what torch.save wrote is called .pth"
        ) from error


# ---- files of torch.save ---------------------------------------------------------------------------------------------


def _is_pickle(path: Path) -> bool:
    """True for a file of torch.save, by its suffix or its format."""
    with _reading(path):
        if not path.is_file():
            raise VitrimError(f"no checkpoint at {path}")
        if not path.stat().st_size:  # also the files of /proc, which cannot be mapped
            kind = "file that torch.save wrote" if path.suffix.lower() in PICKLE_SUFFIXES else "safetensors file"
            raise VitrimError(f"{path} is not a {kind}: it is empty, or no regular file")
        return path.suffix.lower() in PICKLE_SUFFIXES or zipfile.is_zipfile(path)


def _read_pickle(path: Path, *, key: str | None = None, option: str = "") -> dict[str, Tensor]:
    """The weights in a file of torch.save, under ``key`` if there are several; messages name ``option``."""
    content = _unpickled(path)
    weights = _only_weights(content, path, option) if key is None else _under(content, key, path)
    # A prefix of some names alone is no wrapper's: those are names of the model.
    stripped = all(name.startswith(DDP) for name in weights)
    found = {name.removeprefix(DDP) if stripped else name: value for name, value in weights.items()}
    for name, value in found.items():
        plain = value.layout == torch.strided and not value.is_meta and not value.is_quantized
        # a view may claim to be far larger than its storage
        if not plain or value.untyped_storage().nbytes() < value.numel() * value.element_size():
            raise VitrimError(f"{path}: {name} is not stored as a plain tensor")
    return found


OF_A_MADE_UP_FILE = (
    *(pickle.UnpicklingError, struct.error, zipfile.BadZipFile, EOFError, OSError, MemoryError),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
"""Errors of torch's reader on a malformed file, whose content it trusts."""


def _unpickled(path: Path) -> Any:
    """The content of the file: tensors, containers, numbers and strings; anything else is refused."""
    try:
        # training scripts save their arguments as a Namespace, which only holds values
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OF_A_MADE_UP_FILE as error:
        raise VitrimError(
            f"cannot read {path}: not weights that torch.save wrote, or more than weights, which is not executed"
            f"{_why(error)}"
        ) from error


def _why(error: Exception) -> str:
    """Torch's reason in brackets, without its advice to execute the file."""
    if isinstance(error, KeyError):
        return ""  # an internal number of torch's reader
    text = str(error)
    named = re.search(r"Unsupported (global|class|operand)[:\s]+(GLOBAL )?(\S+)", text)
    if named is not None:
        return f" ({named[3][:MOST_REASON]})"
    return "" if "weights_only" in text or not text else f" ({first_line(error)[:MOST_REASON]})"


def _only_weights(content: Any, path: Path, option: str) -> dict[str, Tensor]:
    """The dict of weights in a checkpoint: the checkpoint itself, or its only value that is one."""
    if _is_weights(content):
        return cast("dict[str, Tensor]", content)
    inner = content if isinstance(content, Mapping) else {}
    found = [str(name) for name, value in inner.items() if _is_weights(value)]
    if not found:
        raise VitrimError(f"{path} has no weights: no dict of tensors by their names")
    if len(found) > 1:
        how = f"name one with {option}" if option else "write one of them as safetensors: vitrim convert --key NAME"
        raise VitrimError(f"{path} has several weights: {', '.join(found[:10])}; {how}")
    return cast("dict[str, Tensor]", next(value for value in inner.values() if _is_weights(value)))


def _under(content: Any, key: str, path: Path) -> dict[str, Tensor]:
    for part in key.split("."):
        valid = ", ".join(map(str, list(content)[:10])) if isinstance(content, Mapping) else "none"
        if not isinstance(content, Mapping) or part not in content:
            raise VitrimError(f"{path} has no '{part}'; valid: {valid}")
        content = content[part]
    if not _is_weights(content):
        raise VitrimError(f"{path}: '{key}' holds no weights: no dict of tensors by their names")
    return cast("dict[str, Tensor]", content)


def _is_weights(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(entry, Tensor) for name, entry in value.items())
    )
