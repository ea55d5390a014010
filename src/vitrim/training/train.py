"""`train`: a recipe trained on data, the function of ``vitrim train``.

report = train("cifar10_vit", "data/cifar10", changes={"epochs": 5}, out="runs/short")
model = vitrim.loading.create_model("run:runs/short")
"""

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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitrim.errors import MissingPackageError, VitrimError
from vitrim.measure.earlier import earlier
from vitrim.progress import progress
from vitrim.report import Report
from vitrim.training.recipe import load_recipe
from vitrim.training.running import Running
from vitrim.weights import EVALUATIONS, RECIPE, RESULT, UPDATES, WEIGHTS_FILE

if TYPE_CHECKING:
    from rich.console import Console

    from vitrim.data.readers import Data
    from vitrim.training.loop import Trainer

PATIENCE = 5.0
"""Seconds after a first request to stop during which another counts as the same."""


@dataclass
class TrainReport(Report):
    """A run of a recipe. Its ``rows`` are the evaluations so far, as in ``evaluations.jsonl``; none of a dry run.

    Attributes:
        result: by name. Of a run: ``updates``, ``seconds``, ``start``, the ``last`` evaluation, the ``best`` and, of a
            recipe with a ``test_split``, the ``test``. Of a dry run: shapes, parameters, memory and time.
        is_first: whether this is the first process of the run, the one that writes.
    """

    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_first: bool = True

    @property
    def record(self) -> dict[str, Any]:
        """The facts and the result, as ``--json`` writes them; the evaluations are in the run's folder."""
        return {"command": self.command, **self.facts, "result": self.result}

    def parts(self) -> Iterator[Any]:
        """The parts that a terminal shows: the result, a line for each of its entries."""

        def short(value: Any) -> str:
            if isinstance(value, float):
                return f"{value:.4g}"
            if isinstance(value, dict):
                return "  ".join(f"{name} {short(entry)}" for name, entry in value.items() if name != "classes")
            return str(value)

        for name, value in self.result.items():
            if name == "hours":  # of a dry run
                yield f"hours: {value:.2f} ({60 * value:.0f} minutes), without evaluations"
            elif value is not None:
                yield f"{name}: {short(value)}"
        yield from super().parts()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@earlier(out=Running)
def train(
    recipe: str | Path | Mapping[str, Any],
    data: str | Path | Data | Mapping[str, Data],
    *,
    changes: Sequence[str] | Mapping[str, Any] = (),
    out: str | Path | Running = "runs/train",
    checkpoint: str | Path | None = None,
    dry_run: bool = False,
    device: str | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Train or fine-tune a model under a method, by a recipe: one of the papers', or your own.

    A run may be stopped at any time and resumed exactly: Ctrl-C and SIGTERM save it after the current update. Several
    processes: a script that calls this, started with ``accelerate launch``.

    Args:
        recipe: a name of ``vitrim list recipes``, a YAML file, or its values as a mapping.
        data: a source, as ``--data`` takes it, of which the recipe says which splits; or data sets of `vitrim.data` by
            the name of their split; or one that is trained on, for recipes without other splits.
        changes: values of the recipe that differ, by dotted name: ``{"optimizer.lr": 1e-4}`` or
            ``["optimizer.lr=1e-4"]``.
        out: folder of checkpoints, logs and weights, or a `vitrim.Running`, which also says whether to go on from the
            last checkpoint there, how often to save and log, and to whom.
        checkpoint: start from this file of weights (safetensors or .pth), or from the folder of a finished run.
        dry_run: check data, shapes, memory and time on two batches; write nothing.
        device: "cpu", or None for what accelerate finds.
        console: where progress is shown, e.g. ``rich.console.Console()``; None: nowhere.

    Returns:
        What was reached. ``report.result["last"]`` is the last evaluation, ``report.files`` what the run has written,
        ``report.notes`` what of the recipe is for a longer run.

    Raises:
        VitrimError: a recipe, data, a method or options that are not valid or do not fit each other, while nothing has
            been written; or what stops a run, as a loss that is not finite.
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
    for package in ("accelerate", "torchmetrics"):
        if find_spec(package) is None:
            raise MissingPackageError(f"training needs the package '{package}': pip install 'vitrim[train]'")
    from vitrim.measure.machine import environment
    from vitrim.training.build import build_trainer, chosen_splits

    if not isinstance(checkpoint, str | Path | None):
        raise VitrimError(f"checkpoint is the path of a folder or file, not {checkpoint!r:.60}")
    if console is not None and not hasattr(console, "print"):
        raise VitrimError(f"console is a console of rich, not {console!r:.60}")
    running = Running.of(out)
    out = running.out
    resolved = load_recipe(recipe, changes)
    if device not in (None, "cpu"):
        raise VitrimError(f"device is cpu or left out, not '{device}': accelerate launch chooses devices")
    if isinstance(data, str | Path) and Path(data).expanduser().resolve() == out.resolve():
        raise VitrimError(f"out is the folder of the data, {data}: name another")
    start = None if checkpoint is None else Path(checkpoint)
    with nullcontext() if console is None else progress(f"loading {resolved.name}", "updates", console) as signs:
        trainer = build_trainer(resolved, data, running, checkpoint=start, cpu=device == "cpu", signs=signs)
        with nullcontext() if dry_run else _stoppable(trainer):
            result = trainer.dry_run() if dry_run else trainer.run()
    chosen = chosen_splits(trainer.recipe, data)
    accelerator, values = trainer.accelerator, trainer.recipe
    trackers = [one if isinstance(one, str) else one.name for one in running.log_with]
    names = (RECIPE, UPDATES, EVALUATIONS, WEIGHTS_FILE, RESULT)
    evaluations = out / EVALUATIONS
    rows = evaluations.read_text(encoding="utf-8").splitlines() if not dry_run and evaluations.is_file() else []
    return TrainReport(
        "train",
        {
            "environment": environment(device=str(accelerator.device), dtype=values.precision, seed=values.seed),
            "recipe": {"name": resolved.name, **values.model_dump(mode="json")},
            "running": {**vars(running), "out": str(out), "log_with": trackers},
            "splits": {"train": chosen.split, "eval": chosen.eval_split, "test": chosen.test_split},
            "processes": accelerator.num_processes,
            "data": str(data) if isinstance(data, str | Path) else cast(Any, trainer.train_data).source,
            "dry_run": dry_run,
        },
        [json.loads(row) for row in rows],
        notes=trainer.notes if console is None else [],  # a console has shown them before the first update
        files=[] if dry_run else [out / name for name in names if (out / name).is_file()],
        result=result,
        is_first=accelerator.is_main_process,
    )


@contextmanager
def _stoppable(trainer: Trainer) -> Iterator[None]:
    """A scheduler's request to end, and Ctrl-C: save after the update that is being made, then end as the signal that
    came first would have ended it.

    Asked again later, end at once: an evaluation or a stalled stream does not look. Not at the second request as such,
    for launchers pass on the Ctrl-C that the terminal has sent to all processes.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are handled in that one only
        yield
        return
    asked: list[tuple[int, float]] = []

    def ask(number: int, _: object) -> None:
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
        raise KeyboardInterrupt  # whoever handles that signal does not end the process
