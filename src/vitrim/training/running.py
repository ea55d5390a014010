"""Options for running a recipe: where it writes, how often, and which trackers it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitrim.errors import VitrimError, check_installed, check_whole

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


@dataclass(frozen=True)
class Running:
    """Options for running a recipe that do not affect the trained weights.

    Attributes:
        out: folder for all files.
        resume: continue from the last checkpoint in ``out``.
        workers: processes that read images, 0 for this one.
        eval_batch: images at once in evaluations, per device; batch-dependent methods decide over these.
        save_minutes: time between checkpoints.
        log_every: updates between rows of the log.
        keep: number of checkpoints to keep, at least two in case one is damaged.
        tensorboard: also write TensorBoard files, like ``log_with=("tensorboard",)``.
        log_with: accelerate's trackers that receive the log, by name or as objects.
        max_updates: stop after this many updates, as if interrupted; None for no limit.

    Raises:
        VitrimError: a number that is too small, or a tracker that accelerate does not know.
        MissingPackageError: the packages of ``vitrim[train]``, or a tracker's package, are not installed.
    """

    out: Path
    resume: bool = False
    workers: int = 0
    eval_batch: int = 64
    save_minutes: float = 10.0
    log_every: int = 10
    keep: int = 2
    tensorboard: bool = False
    log_with: Sequence[str | GeneralTracker] = ()
    max_updates: int | None = None

    def __post_init__(self) -> None:
        check_whole(workers=(self.workers, 0), eval_batch=(self.eval_batch, 1), log_every=(self.log_every, 1))
        check_whole(max_updates=(self.max_updates, 1))
        if isinstance(self.log_with, str) or not isinstance(self.log_with, Sequence):
            raise VitrimError(f"log_with is a list of trackers, not {self.log_with!r:.60}")
        minutes = self.save_minutes
        if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes >= 0:
            raise VitrimError(f"save_minutes is a number of at least 0, not {minutes!r:.60}")
        check_installed("training", "accelerate")
        from vitrim.training.log import check_trackers

        check_trackers(self.trackers)

    @classmethod
    def of(cls, out: str | Path | Running) -> Running:
        """``out`` as a `Running`."""
        if isinstance(out, cls):
            return out
        if not isinstance(out, str | Path):
            raise VitrimError(f"out is the path of a folder or file, not {out!r:.60}")
        return cls(Path(out))

    @property
    def trackers(self) -> tuple[str | GeneralTracker, ...]:
        """All requested trackers."""
        return (*self.log_with, *(["tensorboard"] if self.tensorboard else []))
