"""Checkpoints of a training run: written atomically, without pickles, resumed exactly.

A checkpoint is a folder with the weights, their moving average, the optimiser's tensors, ``state.json`` with all that
is no tensor, and ``SHA256SUMS``. It is written under another name and then renamed, so a folder with its final name is
complete; the digests reveal later changes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from vitrim.errors import VitrimError, first_line
from vitrim.files import save_file

if TYPE_CHECKING:
    from vitrim.training.learner import Learner

FORMAT = 3
STATE = "state.json"
DIGESTS = "SHA256SUMS"
LEAST_KEPT = 2
"""Fewest checkpoints to keep, in case the newest is damaged."""
PARTIAL = ".partial"
SEPARATOR = "/"
"""Separator between the names of a parameter and of its optimiser state."""

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Options for unsharded tensors by parameter name, on the CPU."""
DDP_PREFIX = "module."
LENIENT = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
"""Options for optimisers, which have no state for parameters without a gradient so far."""


@dataclass
class Snapshot:
    """The state that a run continues from, on the CPU.

    Attributes:
        tensors: by file: ``model``, ``optimizer`` and, if there is one, ``ema``; each a flat dict of tensors.
        values: everything else, JSON-serialisable.
    """

    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any] = field(default_factory=dict)


def take(learner: Learner, values: Mapping[str, Any]) -> Snapshot:
    """The learner's state, with the ``values`` of the run. All processes must call this; only the first process's
    snapshot is complete."""
    weights, optimizer_state = get_state_dict(learner.wrapped, learner.optimizer.optimizer, options=FULL)
    state = cast("dict[str, Any]", optimizer_state)
    # empty except in the first process
    kept = state.get("state", {})
    # safetensors holds flat dicts: a parameter's name and the name of its moment become one key.
    moments = {f"{name}{SEPARATOR}{key}": value for name, entry in kept.items() for key, value in entry.items()}
    tensors = {
        "model": {name: value for name, value in weights.items() if isinstance(value, Tensor)},
        "optimizer": {name: value for name, value in moments.items() if isinstance(value, Tensor)},
    }
    if learner.average is not None:
        tensors["ema"] = dict(learner.average.state_dict())
    numbers = {name: value for name, value in moments.items() if not isinstance(value, Tensor)}
    scaler = learner.accelerator.scaler
    others = {
        "scaler": None if scaler is None else scaler.state_dict(),
        "optimizer": {"state": numbers, "param_groups": state.get("param_groups")},
    }
    return Snapshot(tensors, {**values, **others})


def put_back(snapshot: Snapshot, learner: Learner) -> None:
    """Restore a snapshot of the same run. All processes must call this."""
    model, optimizer = learner.wrapped, learner.optimizer.optimizer
    kept: dict[str, dict[str, Any]] = {}
    # The tensors of a moment come from one file, its plain numbers (steps) from the other: both go under the parameter.
    for entry, value in {**snapshot.tensors["optimizer"], **snapshot.values["optimizer"]["state"]}.items():
        name, _, key = entry.rpartition(SEPARATOR)
        kept.setdefault(name, {})[key] = value
    state = {"state": kept, "param_groups": snapshot.values["optimizer"]["param_groups"]}
    set_model_state_dict(model, cast(Any, snapshot.tensors["model"]), options=FULL)
    if kept:  # plain SGD has no state
        set_optimizer_state_dict(model, optimizer, cast(Any, state), options=LENIENT)
    for name, parameter in model.named_parameters():  # torch first creates a state for all of them
        if name.removeprefix(DDP_PREFIX) not in kept:
            optimizer.state.pop(parameter, None)
    if learner.average is not None:
        learner.average.load_state_dict(snapshot.tensors["ema"])
    if snapshot.values["scaler"] is not None and learner.accelerator.scaler is not None:
        learner.accelerator.scaler.load_state_dict(snapshot.values["scaler"])


def save(folder: Path, snapshot: Snapshot, *, keep: int = LEAST_KEPT) -> Path:
    """Write a snapshot as a new checkpoint in ``folder``, return its folder, and delete the oldest beyond ``keep`` good
    ones.

    A `VitrimError`, e.g. of a full disk, leaves existing checkpoints unchanged.
    """
    final = folder / f"update-{snapshot.values['update']:08d}"
    if damage(final) is None:  # the run was stopped just after it was saved, or resumed at its end
        return final
    partial = final.with_name(final.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        sizes, digests = {}, {}
        for name, tensors in snapshot.tensors.items():
            path = partial / f"{name}.safetensors"
            save_file({key: storable(value) for key, value in tensors.items()}, path)
            _flush(path)
            sizes[path.name], digests[path.name] = path.stat().st_size, _digest(path)
        state = partial / STATE
        state.write_text(json.dumps({"format": FORMAT, "sizes": sizes, **snapshot.values}))
        _flush(state)
        digests[STATE] = _digest(state)
        (partial / DIGESTS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
        _flush(partial / DIGESTS)
        # Only now: until the rename, a damaged checkpoint of this update may be all there is.
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        good = latest(folder)
        rest = "there is no earlier checkpoint" if good is None else f"the last good checkpoint is {good}"
        raise VitrimError(f"cannot save {final}: {reason(error)}; {rest}") from error
    # Damaged checkpoints do not count among those to keep, or a bad disk would delete the last good one.
    whole = [path for path in found(folder) if path == final or damage(path) is None][-max(keep, LEAST_KEPT) :]
    old = [path for path in found(folder) if path < whole[0]]
    for path in (*old, *folder.glob(f"update-*{PARTIAL}")):  # left by a kill while saving
        shutil.rmtree(path)
    return final


def found(folder: Path) -> list[Path]:
    """All checkpoints in ``folder``, oldest first: including damaged ones, without incomplete ones."""
    return sorted(path for path in folder.glob("update-*") if re.fullmatch(r"update-\d+", path.name))


def latest(folder: Path) -> Path | None:
    """The newest undamaged checkpoint in ``folder``, or None."""
    return next((path for path in reversed(found(folder)) if damage(path) is None), None)


def damage(path: Path) -> str | None:
    """A description of the damage to a checkpoint: missing or changed files; None if there is none.

    Reads all files once; the result is cached while the files do not change.
    """
    try:
        stats = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return _damage(path, tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


@functools.lru_cache(maxsize=64)
def _damage(path: Path, _: tuple[tuple[str, int, int, int], ...]) -> str | None:
    try:
        values = json.loads((path / STATE).read_text())
        sizes, form = values["sizes"], values["format"]
        sound = isinstance(values["update"], int) and values["update"] >= 0 and isinstance(sizes, dict)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # truncated, or changed by another program
        sound, sizes, form = False, {}, FORMAT
    if not sound:
        # Sizes first: a truncated file is found without reading gigabytes.
        return f"{STATE} is not what was written"
    for name, size in sizes.items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            return f"{name} is missing or not as long as it was written"
    if form != FORMAT:  # another version's: `load` reports it
        return None
    try:
        lines = [line.split("  ", 1) for line in (path / DIGESTS).read_text().splitlines()]
        written = {name: digest for digest, name in lines}
    except (OSError, ValueError):
        return f"{DIGESTS} is missing or not what was written"
    for name in sorted({*sizes, STATE}):
        if written.get(name) != _digest(path / name):
            return f"{name} is not what was written: its digest is another one"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(path: Path) -> Snapshot:
    """Read a checkpoint; `VitrimError` if it is unreadable, or another version of vitrim wrote it."""
    try:
        values = json.loads((path / STATE).read_text())
        if values["format"] != FORMAT:
            raise VitrimError(f"{path} has format {values['format']}, this version of vitrim reads {FORMAT}")
        tensors = {file.removesuffix(".safetensors"): load_file(path / file) for file in values["sizes"]}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise VitrimError(f"cannot read the checkpoint {path}: {error}") from error
    return Snapshot(tensors, values)


def reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


def storable(value: Tensor) -> Tensor:
    """Copy a tensor to memory of its own, because safetensors refuses shared memory."""
    return value.detach().to("cpu").contiguous().clone(memory_format=torch.contiguous_format)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
