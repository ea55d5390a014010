"""The options of a run that do not change what it learns: where it writes, and how often it saves and logs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accelerate.tracking import GeneralTracker

from vitrim.training.trackers import TENSORBOARD, check_trackers


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
        VitrimError: a tracker that accelerate does not know.
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
    log_with: tuple[str | GeneralTracker, ...] = ()
    max_updates: int | None = None

    def __post_init__(self) -> None:
        check_trackers(self.trackers)

    @property
    def trackers(self) -> tuple[str | GeneralTracker, ...]:
        """All trackers that are asked for."""
        return (*self.log_with, TENSORBOARD) if self.tensorboard else self.log_with
