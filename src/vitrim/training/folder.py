"""The folder of a run: one run at a time works in it, on checkpoints of its own, and leaves weights and results.

`RunFolder` refuses what would overwrite another run, finds the checkpoint to go on from, and writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from safetensors import SafetensorError

from vitrim.core.checks import described
from vitrim.core.reduce import Reduction, get_reduction
from vitrim.core.registry import host_of
from vitrim.core.saving import BEST_FILE, entries
from vitrim.errors import VitrimError
from vitrim.files import check_folder, json_text, save_file, write_text
from vitrim.reference import CLASSES
from vitrim.training import checkpoint
from vitrim.training.learner import Learner
from vitrim.training.lock import only_run
from vitrim.training.objectives import found
from vitrim.weights import RESULT, WEIGHTS_FILE


class RunFolder:
    """The folder of a run, as the run found it.

    Args:
        path: where everything is written; it need not exist.
        resume: whether the run goes on from what is there.
        keep: checkpoints that are kept.

    Raises:
        VitrimError: it cannot be a folder.
    """

    def __init__(self, path: Path, *, resume: bool, keep: int) -> None:
        check_folder(path)
        self.path, self.resume, self.keep = path, resume, keep
        self.checkpoints = path / "checkpoints"
        self.seen = checkpoint.found(self.checkpoints)

    def check_new(self) -> None:
        """Refuse a folder that already has a run: checkpoints, damaged or not, or results."""
        if self.seen:
            raise VitrimError(f"{self.path} has a run already: continue it with --resume, or give another --out")
        if (self.path / RESULT).exists():
            raise VitrimError(f"{self.path} has a finished run: give another --out")

    def newest(self) -> tuple[Path, list[str]]:
        """The newest undamaged checkpoint, and for each newer one what is wrong with it.

        Raises:
            VitrimError: there is none.
        """
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
        """Allow one run in a folder at a time: the first process holds the lock, and all learn of the outcome.

        Raises:
            VitrimError: another run is at work here, or was since this one looked.
        """
        with ExitStack() as stack:
            refusal = None
            if accelerator.is_main_process:
                try:
                    stack.enter_context(only_run(self.path))
                    self._check_unchanged()
                except VitrimError as error:
                    refusal = error
            if together(accelerator, refusal is not None):
                raise refusal or VitrimError(f"{self.path} is in use by another run")
            yield

    def _check_unchanged(self) -> None:
        if checkpoint.found(self.checkpoints) != self.seen:
            raise VitrimError(f"another run has just been at work in {self.path}: start this one again")
        if not self.resume:
            self.check_new()

    def save(self, learner: Learner, values: Mapping[str, Any]) -> None:
        """Write a checkpoint. All processes must call it.

        Raises:
            VitrimError: it cannot be written; those that are there stay.
        """
        snapshot = learner.snapshot(values)
        if learner.accelerator.is_main_process:
            checkpoint.save(self.checkpoints, snapshot, keep=self.keep)
        learner.accelerator.wait_for_everyone()

    def write(
        self, learner: Learner, recipe: str, result: Mapping[str, Any], class_names: Sequence[str] | None = None
    ) -> None:
        """Write the host's weights, the reduction beside them, and the results. All processes must call it.

        Args:
            learner: under the amounts it is to be used with.
            recipe: its name.
            result: what was reached.
            class_names: of the data that was trained on; written beside what was reached.

        Raises:
            VitrimError: they cannot be written; the message names the checkpoint that has them.
        """
        state = learner.weights()
        if not learner.accelerator.is_main_process:
            return
        host = {name: checkpoint.storable(value) for name, value in state.items() if ".reducer." not in name}
        try:
            save_file(host, self.path / WEIGHTS_FILE, metadata={"recipe": recipe})
            if learner.reduction is not None:
                reduction = get_reduction(learner.learned)
                reduction.save(self.path, state=state)
                self._write_found(reduction, recipe)
            names = {} if class_names is None else {CLASSES: list(class_names)}
            write_text(self.path / RESULT, json_text({**result, **names}, indent=2) + "\n")
        except (OSError, SafetensorError, VitrimError) as error:
            raise VitrimError(
                f"cannot write the weights to {self.path}: {checkpoint.reason(error)}; they are in "
                f"{checkpoint.latest(self.checkpoints)}: make room and run again with --resume"
            ) from error

    def _write_found(self, reduction: Reduction, recipe: str) -> None:
        """Write the settings that the run found, if it looked for some, as a file that ``-m @FILE`` names."""
        config = found(reduction)
        if config is not None:
            tuned = {"made_for": described(host_of(reduction.model), reduction.model), "recipe": recipe}
            write_text(self.path / BEST_FILE, json.dumps(entries(config, tuned), indent=2) + "\n")


def together(accelerator: Accelerator, mine: bool) -> bool:
    """Follow the first process's decision: clocks and signals differ, and all must save at once."""
    if accelerator.num_processes == 1:
        return mine
    decision = torch.tensor(float(mine), device=accelerator.device)
    return bool(broadcast(decision, from_process=0) > 0)
