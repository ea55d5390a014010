"""`train`, the function of ``vitrim train``: train a recipe on data."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from vitrim.checked import checked_call
from vitrim.errors import VitrimError, check_installed
from vitrim.progress import progress
from vitrim.report import Report
from vitrim.training.recipe import load_recipe
from vitrim.training.running import Running
from vitrim.weights import EVALUATIONS, RECIPE, RESULT, UPDATES, WEIGHTS_FILE

if TYPE_CHECKING:
    from vitrim.training.loop import Trainer

PATIENCE = 5.0
"""Seconds after a stop request during which further requests count as the same."""


@dataclass
class TrainReport(Report):
    """A run of a recipe. Its ``rows`` are the evaluations, as in ``evaluations.jsonl``; empty for a dry run.

    Attributes:
        result: for a run: ``updates``, ``seconds``, ``start``, ``trained_on`` (source and split), the ``last`` and
            ``best`` evaluation and, with a ``test_split``, the ``test``. For a dry run: shapes, parameters, memory and
            time.
        is_first: True in the process that writes.
    """

    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_first: bool = True

    @property
    def record(self) -> dict[str, Any]:
        """The facts and the result, for ``--json``; the evaluations are in the run's folder."""
        return {"command": self.command, **self.facts, "result": self.result}

    def parts(self) -> Iterator[Any]:
        """The parts that a terminal shows: a line per entry of the result."""

        def short(value: Any) -> str:
            if isinstance(value, float):
                return f"{value:.4g}"
            if isinstance(value, dict):
                return "  ".join(f"{name} {short(entry)}" for name, entry in value.items() if name != "classes")
            return str(value)

        for name, value in self.result.items():
            if name == "hours":  # of a dry run
                yield f"hours: {value:.2f} ({60 * value:.0f} minutes), without evaluations"
            elif value is not None and name != "trained_on":
                yield f"{name}: {short(value)}"
        yield from super().parts()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@checked_call
def train(
    recipe: str | Path | Mapping[str, Any],
    data: Any,
    *,
    changes: Sequence[str] | Mapping[str, Any] = (),
    out: str | Path | Running = "runs/train",
    checkpoint: str | Path | None = None,
    dry_run: bool = False,
    device: Literal["cpu"] | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Train or fine-tune a model under a method, by a recipe of a paper or your own.

    A run can be interrupted at any time and resumed exactly: Ctrl-C and SIGTERM save it after the current update. For
    several processes, start a script that calls this with ``accelerate launch``.

    Args:
        recipe: a name from ``vitrim list recipes``, a YAML file, or a mapping of values.
        data: a source, as for ``--data``, whose splits the recipe names; or data sets of `vitrim.data` by split; or one
            to train on.
        changes: changed values of the recipe, by dotted name: ``{"optimizer.lr": 1e-4}`` or ``["optimizer.lr=1e-4"]``.
        out: folder for checkpoints, logs and weights, or a `vitrim.Running`, which also sets resuming and trackers.
        checkpoint: starting weights: a file (safetensors or .pth), or the folder of a finished run.
        dry_run: check data, shapes, memory and time on two batches; write nothing.
        device: "cpu", or None for accelerate's choice.
        console: shows progress, e.g. ``rich.console.Console()``.

    Returns:
        ``report.result["last"]`` is the last evaluation; ``report.files`` lists the files written; ``report.notes``
            names parts of the recipe that are meant for a longer run.

    Raises:
        VitrimError: an invalid or contradictory recipe, data, method or option, before anything is written; or an error
            of the run, such as a loss that is not finite.
        MissingPackageError: the packages of ``vitrim[train]`` are not installed.
        KeyboardInterrupt: Ctrl-C; the run is saved.

    Example:
        >>> from io import BytesIO
        >>> from PIL import Image
        >>> from vitrim.data import ImageDataset
        >>> files = [BytesIO(), BytesIO()]
        >>> for file, colour in zip(files, ("red", "blue")):
        ...     Image.new("RGB", (16, 16), colour).save(file, "png")
        >>> data = ImageDataset([file.getvalue() for file in files], [0, 1], class_names=["red", "blue"])
        >>> tiny = {"model": "test_vit", "model_options": {"img_size": 16, "patch_size": 4}, "method": "tome:r=1",
        ...         "epochs": 3, "batch_size": 2, "augment": {"crop": "padded"}, "eval_split": None}
        >>> report = train(tiny, data, dry_run=True, device="cpu")
        >>> report.result["updates"], report.result["classes"]
        (3, 2)
    """
    check_installed("training", "accelerate")
    from vitrim.training.build import build_trainer

    running = Running.of(out)
    resolved = load_recipe(recipe, changes)
    if isinstance(data, str | Path) and Path(data).expanduser().resolve() == running.out.resolve():
        raise VitrimError(f"out is the folder of the data, {data}: name another")
    start = None if checkpoint is None else Path(checkpoint)
    with nullcontext() if console is None else progress(f"loading {resolved.name}", "updates", console) as signs:
        trainer = build_trainer(resolved, data, running, checkpoint=start, cpu=device == "cpu", signs=signs)
        with nullcontext() if dry_run else _stoppable(trainer):
            result = trainer.dry_run() if dry_run else trainer.run()
    report = _report(trainer, data, result, dry_run=dry_run)
    if console is not None:  # which has already shown them
        report.notes = []
    return report


def _report(trainer: Trainer, data: Any, result: dict[str, Any], *, dry_run: bool) -> TrainReport:
    from vitrim.engines.machine import environment
    from vitrim.training.build import chosen_splits

    running, values, accelerator = trainer.running, trainer.recipe, trainer.accelerator
    out, chosen = running.out, chosen_splits(values, data)
    trackers = [one if isinstance(one, str) else one.name for one in running.log_with]
    names = () if dry_run else (RECIPE, UPDATES, EVALUATIONS, WEIGHTS_FILE, RESULT)
    files = [out / name for name in names if (out / name).is_file()]
    rows = (out / EVALUATIONS).read_text(encoding="utf-8").splitlines() if out / EVALUATIONS in files else []
    return TrainReport(
        "train",
        {
            "environment": environment(device=str(accelerator.device), dtype=values.precision, seed=values.seed),
            "recipe": {"name": trainer.resolved.name, **values.model_dump(mode="json")},
            "running": {**vars(running), "out": str(out), "log_with": trackers},
            "splits": {"train": chosen.split, "eval": chosen.eval_split, "test": chosen.test_split},
            "processes": accelerator.num_processes,
            "data": str(data) if isinstance(data, str | Path) else trainer.train_data.source,
            "dry_run": dry_run,
        },
        [json.loads(row) for row in rows],
        notes=trainer.notes,
        files=files,
        result=result,
        is_first=accelerator.is_main_process,
    )


@contextmanager
def _stoppable(trainer: Trainer) -> Iterator[None]:
    """Save after the current update on SIGTERM or Ctrl-C, then end as that signal would.

    A later request ends the run at once, because an evaluation or a stalled stream does not check for requests.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield
        return
    asked: list[tuple[int, float]] = []

    def ask(number: int, _: object) -> None:
        # Launchers pass on the Ctrl-C that the terminal sends to all processes: a second one right after the first is
        # no wish.
        asked.append((number, time.monotonic()))
        if asked[-1][1] - asked[0][1] > PATIENCE:
            raise KeyboardInterrupt
        trainer.request_stop()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    terminated = False
    try:
        yield
    except KeyboardInterrupt:
        terminated = bool(asked) and asked[0][0] == signal.SIGTERM
        if not terminated:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if terminated:
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt  # a handler that does not end the process was installed
