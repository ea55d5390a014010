"""Trackers of accelerate: TensorBoard, wandb, mlflow and others get the numbers of a run beside its own log.

Which there are, what they are called and what they are given is accelerate's; a new one of its is one here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    filter_trackers,
    get_available_trackers,
)
from accelerate.utils import LoggerType

from vitrim.errors import MissingPackageError, unknown

TENSORBOARD = "tensorboard"
PROJECT = "vitrim"
"""The project under which trackers file a run."""


def check_trackers(trackers: Iterable[str | GeneralTracker]) -> None:
    """Refuse names of trackers that accelerate does not know, or whose package is not installed.

    Raises:
        VitrimError: no such tracker, with the nearest one.
        MissingPackageError: its package is not installed.

    Example:
        >>> check_trackers(["tensorbord"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        vitrim.errors.VitrimError: unknown tracker 'tensorbord'; did you mean 'tensorboard'? valid: aim, ...
    """
    missing = {str(kind) for kind in LoggerType} - {str(kind) for kind in get_available_trackers()}
    for name in trackers:
        if isinstance(name, GeneralTracker):
            continue
        if name not in LOGGER_TYPE_TO_CLASS:
            raise unknown("tracker", name, LOGGER_TYPE_TO_CLASS)
        if name in missing:
            raise MissingPackageError(f"logging with {name} needs its package: pip install {name}")


def start_trackers(
    trackers: Iterable[str | GeneralTracker], folder: Path, *, from_update: int, values: Mapping[str, Any]
) -> list[GeneralTracker]:
    """Start trackers for a run, each once. Only the first process calls it.

    Args:
        trackers: names that `check_trackers` has let through, or trackers of one's own.
        folder: where those that write files put them.
        from_update: where TensorBoard, which can, drops what a run wrote before it was stopped.
        values: what the run is to be told from others by: those of the recipe by dotted name.
    """
    started: list[GeneralTracker] = []
    for kind in filter_trackers(list(dict.fromkeys(trackers)), folder):
        if isinstance(kind, GeneralTracker):
            tracker = kind
        elif str(kind) == TENSORBOARD:
            tracker = TensorBoardTracker(TENSORBOARD, folder, purge_step=from_update)
        else:
            make = LOGGER_TYPE_TO_CLASS[str(kind)]
            tracker = make(PROJECT, *([folder] if make.requires_logging_directory else []))
        tracker.start()
        tracker.store_init_configuration({name: _simple(value) for name, value in values.items()})
        started.append(tracker)
    return started


def _simple(value: Any) -> str | int | float:
    """A value as all trackers take it: texts for lists and for null."""
    return value if isinstance(value, str | int | float) else json.dumps(value)
