"""Options for running a recipe: where it writes, how often, and which trackers it uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, Strict

from vitrim.checked import Natural, Positive, Refined, checked
from vitrim.errors import check_installed

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


@checked
class Running(Refined):
    """Options for running a recipe that do not affect the trained weights.

    Attributes:
        out: folder for all files.
        resume: continue from the last checkpoint in ``out``.
        workers: processes that read images, 0 for this one.
        eval_batch: images at once in evaluations, per device; batch-dependent methods decide over these.
        log_every: updates between rows of the log.
        keep: number of checkpoints to keep, at least two in case one is damaged.
        log_with: accelerate's trackers that receive the log, by name or as objects; ``tensorboard`` adds TensorBoard's.
        max_updates: stop after this many updates, as if interrupted.
    """

    out: Annotated[Path, Strict(False)]
    resume: bool = False
    workers: Natural = 0
    eval_batch: Positive = 64
    save_minutes: Annotated[float, Field(ge=0)] = 10.0
    log_every: Positive = 10
    keep: Positive = 2
    tensorboard: bool = False
    log_with: Sequence[Any] = ()
    max_updates: Positive | None = None

    def __post_init__(self) -> None:
        check_installed("training", "accelerate")
        from vitrim.training.log import check_trackers

        check_trackers(self.trackers)

    @property
    def trackers(self) -> tuple[str | GeneralTracker, ...]:
        return (*self.log_with, *(["tensorboard"] if self.tensorboard else []))
