"""The way a recipe is run: where it writes, how often, and who listens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitrim.errors import VitrimError, check_whole

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


@dataclass(frozen=True)
class Running:
    """Options for running a recipe; none of them changes what is learned.

    Attributes:
        out: where everything is written.
        resume: go on from the last checkpoint in ``out``.
        workers: processes that read images, 0 for this one.
        eval_batch: images at once in evaluations, on one device; methods that decide by a batch decide by these.
        save_minutes: time between checkpoints.
        log_every: updates between rows of the log.
        keep: checkpoints that are kept, at least two: one may turn out to be damaged.
        tensorboard: also write TensorBoard's files, as ``log_with=("tensorboard",)``.
        log_with: accelerate's trackers that get what the log gets, by name, or trackers of one's own.
        max_updates: stop after this many updates, as if interrupted; None: at the end.

    Raises:
        VitrimError: a number that is too small, or a tracker that accelerate does not know.
        MissingPackageError: its package is not installed.
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
        from vitrim.training.log import check_trackers  # which needs accelerate

        if isinstance(self.log_with, str) or not isinstance(self.log_with, Sequence):
            raise VitrimError(f"log_with is a list of trackers, not {self.log_with!r:.60}")
        minutes = self.save_minutes
        if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes >= 0:
            raise VitrimError(f"save_minutes is a number of at least 0, not {minutes!r:.60}")
        check_trackers(self.trackers)

    @classmethod
    def of(cls, out: str | Path | Running) -> Running:
        """The description of a run by its folder: itself where it is one."""
        if isinstance(out, cls):
            return out
        if not isinstance(out, str | Path):
            raise VitrimError(f"out is the path of a folder or file, not {out!r:.60}")
        return cls(Path(out))

    @property
    def trackers(self) -> tuple[str | GeneralTracker, ...]:
        """All trackers that are asked for."""
        return (*self.log_with, *(["tensorboard"] if self.tensorboard else []))
