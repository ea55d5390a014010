"""Digests of all that decides a number besides the settings that a user names: what resumes must have equal ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrim.core.checks import described
from vitrim.core.registry import host_of
from vitrim.data.fingerprint import fingerprint
from vitrim.tasks import Task
from vitrim.tasks.options import flat

PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of the attributes of a module that decide what it computes: numbers of heads, scales, kinds of pooling."""

ADDRESS, DIGEST = re.compile(r" at 0x[0-9a-f]+"), re.compile(r"[0-9a-f]{64}")


def identity(
    model: nn.Module | None, task: Task | None, images: Any, *, learned: Path | None = None, files: Iterable[Path] = ()
) -> dict[str, str]:
    """Digests of everything that decides a number, by what it is: two measurements with equal ones may be joined.

    Args:
        model: the dense model; None for files alone.
        images: a dataset, with its labels and transform, or batches in memory: (B, C, H, W), or pairs with targets.
        learned: folder of a saved reduction.
        files: exported files that are measured, too.

    Example:
        >>> import torch
        >>> from vitrim.data import ImageDataset
        >>> layer, (one, other) = nn.Linear(2, 2), (ImageDataset([b"a", b"b"], labels) for labels in ([0, 1], [1, 0]))
        >>> first, second = identity(layer, None, one), identity(layer, None, other)
        >>> [name for name in first if first[name] != second[name]]
        ['images']
    """
    # Weights alone do not tell the number of heads or the scale of attention.
    known = {} if model is None else {"weights": weights_fingerprint(model), "model": _digest(_form(model))}
    found = {
        **known,
        "images": _batches(images) if isinstance(images, list | tuple) else fingerprint(images),
        "transform": _digest([_text(getattr(images, "transform", None))]),
    }
    if task is not None:
        found["task"] = _digest(f"{name} {_value(value)}" for name, value in sorted(vars(task).items()))
    if learned is not None:
        found["learned"] = _files(sorted(path for path in Path(learned).iterdir() if path.is_file()))
    for path in files:
        found[f"file {path}"] = _files([path])
    return found


def made_for(model: nn.Module) -> dict[str, Any]:
    """The model that a setting was found for, as its file describes it: `described`, and a digest of the weights."""
    return {**described(host_of(model), model), "parameters": weights_fingerprint(model)}


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The name of the first setting that differs, and its two values in short; None if all are equal."""
    old, new = dict(flat(before)), dict(flat(now))
    name = next((name for name in [*new, *old] if old.get(name) != new.get(name)), None)
    if name is None:
        return None
    return name, _short(old.get(name)), _short(new.get(name))


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if DIGEST.fullmatch(text) else text if len(text) <= 60 else f"{text[:57]}..."


def weights_fingerprint(model: nn.Module) -> str:
    """A hash of all parameters and buffers, as 64 hexadecimal digits."""
    return digest_of(model.state_dict())


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of tensors and their names, in their order, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, value in tensors.items():
        # Names, dtypes and shapes too: equal bytes may be other numbers.
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        # The length in front: two texts must not be the same as one that joins them.
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()


def _form(model: nn.Module) -> Iterable[str]:
    """The operations of a model, besides its weights: its modules, and their plain attributes."""
    for name, module in model.named_modules():
        kind = type(module)
        # neither what torch keeps, nor where vitrim has the model from
        own = {key: value for key, value in vars(module).items() if not key.startswith(("_", "vitrim_"))}
        yield f"{name} {kind.__module__}.{kind.__qualname__} {module.extra_repr()}"
        own.pop("training", None)
        yield from (f"{key} {_text(value)}" for key, value in sorted(own.items()) if isinstance(value, PLAIN))


def _text(value: object) -> str:
    """A value as text that is the same in every process."""
    # The address of an object differs between processes.
    return ADDRESS.sub("", repr(value))


def _value(value: Any) -> str:
    return digest_of({"": value}) if isinstance(value, Tensor) else _text(value)


def _batches(batches: Iterable[Any]) -> str:
    """The digest of batches in memory."""
    parts = (part for batch in batches for part in (batch if isinstance(batch, list | tuple) else [batch]))
    return _digest(_value(part) for part in parts)


def _files(paths: Iterable[Path]) -> str:
    return _digest(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths)
