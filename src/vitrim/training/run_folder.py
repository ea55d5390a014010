"""The folder of a run: locked by one run at a time, with its checkpoints, weights and results."""

from __future__ import annotations

import errno
import json
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from vitrim.core.checks import described
from vitrim.core.reduce import handle_of
from vitrim.core.registry import host_of
from vitrim.core.saving import BEST_FILE, entries
from vitrim.errors import VitrimError
from vitrim.files import check_folder, json_text, save_file, write_text
from vitrim.models.references import CLASSES
from vitrim.training import checkpoint
from vitrim.training.learner import MODEL, Learner
from vitrim.training.objectives import found
from vitrim.weights import RESULT, WEIGHTS_FILE

LOCK = ".lock"
"""Lock file in the folder, which names the process that uses it. One left by a killed process has no effect."""


class RunFolder:
    """The folder of a run, as found at its start; ``resume``: the run continues an earlier one."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        check_folder(path)
        self.path, self.resume = path, resume
        self.checkpoints = path / "checkpoints"
        self.seen = checkpoint.found(self.checkpoints)

    def check_new(self) -> None:
        """Refuse a folder with a run: checkpoints, damaged or not, or results."""
        if self.seen or (self.path / RESULT).exists():
            held = "a run already: resume it, or" if self.seen else "a finished run:"
            raise VitrimError(f"{self.path} has {held} name another folder")

    def newest(self) -> tuple[Path, list[str]]:
        """The newest undamaged checkpoint, or `VitrimError`, and descriptions of the damage to newer ones."""
        found = {path: checkpoint.damage(path) for path in self.seen}
        path = next((path for path in reversed(self.seen) if found[path] is None), None)
        damaged = [
            f"{other} is damaged ({what})" for other, what in found.items() if what and (not path or other > path)
        ]
        if path is None:
            why = "; ".join(damaged[::-1]) or f"no complete checkpoint in {self.checkpoints}"
            raise VitrimError(f"nothing to resume in {self.path}: {why}")
        return path, damaged

    @contextmanager
    def alone(self, accelerator: Accelerator) -> Iterator[None]:
        """Hold the folder's lock in the first process; `VitrimError` in all if another run uses it, or just did."""
        with ExitStack() as stack:
            refusal = None
            if accelerator.is_main_process:
                try:
                    stack.enter_context(only_run(self.path))
                    if checkpoint.found(self.checkpoints) != self.seen:
                        raise VitrimError(f"another run has just been at work in {self.path}: start this one again")
                    if not self.resume:
                        self.check_new()
                except VitrimError as error:
                    refusal = error
            # The first process alone holds the lock: the others must learn of its refusal, or they would train without
            # it.
            if together(accelerator, refusal is not None):
                raise refusal or VitrimError(f"{self.path} is in use by another run")
            yield

    def write(
        self, learner: Learner, recipe: str, result: Mapping[str, Any], class_names: Sequence[str] | None = None
    ) -> None:
        """Write the host's weights, the reduction and the results, with the class names. All processes must call this.

        The amounts of ``learner`` are those for later use. A `VitrimError` names the checkpoint that has the weights.
        """
        if learner.average is not None:
            state = dict(learner.average.state_dict())
        else:
            whole = cast("dict[str, Tensor]", get_model_state_dict(learner.wrapped, options=checkpoint.FULL)).items()
            state = {name.removeprefix(MODEL): value for name, value in whole if name.startswith(MODEL)}
        if not learner.accelerator.is_main_process:
            return
        host = {name: checkpoint.storable(value) for name, value in state.items() if ".reducer." not in name}
        try:
            save_file(host, self.path / WEIGHTS_FILE, metadata={"recipe": recipe})
            if learner.reduction is not None:
                reduction = handle_of(learner.learned)
                reduction.save(self.path, state=state)
                config = found(reduction)
                if config is not None:  # settings that training found, as a file for -m @FILE
                    tuned = {"made_for": described(host_of(reduction.model), reduction.model), "recipe": recipe}
                    write_text(self.path / BEST_FILE, json.dumps(entries(config, tuned), indent=2) + "\n")
            names = {} if class_names is None else {CLASSES: list(class_names)}
            write_text(self.path / RESULT, json_text({**result, **names}, indent=2) + "\n")
        except (OSError, SafetensorError, VitrimError) as error:
            raise VitrimError(
                f"cannot write the weights to {self.path}: {checkpoint.reason(error)}; they are in "
                f"{checkpoint.latest(self.checkpoints)}: make room and resume the run"
            ) from error


def together(accelerator: Accelerator, mine: bool) -> bool:
    """The first process's decision, for all: clocks and signals differ, and all must save together."""
    if accelerator.num_processes == 1:
        return mine
    decision = torch.tensor(float(mine), device=accelerator.device)
    return bool(broadcast(decision, from_process=0) > 0)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if necessary; `VitrimError` if another run uses it.

    It is a system lock on a file in the folder: it ends with its process, even by ``kill -9``, and does not pass to
    processes that read images. A file system without locks leads to a warning.
    """
    path, mine = folder / LOCK, f"process {os.getpid()} on {socket.gethostname()}"
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        with suppress(OSError):  # Windows does not allow writing to a locked file
            path.write_text(f"{mine}\n")
    except Timeout:
        holder = ""
        with suppress(OSError):
            holder = path.read_text(errors="replace")[:200].strip()
        if holder == mine:
            raise VitrimError(f"another run of this process is at work in {folder}: name another folder") from None
        at_work = f"{holder or 'another process'} is at work in {folder}"
        raise VitrimError(f"{at_work}: wait for it, or name another folder") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise VitrimError(f"cannot write to {folder}: {error.strerror}") from error
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): start no other run in it", stacklevel=3)
    try:
        yield
    finally:
        with suppress(OSError):  # before the release, so as not to delete the next run's file
            path.unlink()
        lock.release()
