"""Sweeps: the points of a grid evaluated, or trained, one after the other."""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, create_model
from torch import nn

from vitrim.errors import VitrimError, first_line
from vitrim.files import json_text, write_text
from vitrim.measure.contestants import contestants
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.records import Processes, read
from vitrim.measure.run import Measurement, weights_fingerprint
from vitrim.tasks.base import Task
from vitrim.tuning.cost import quiet
from vitrim.tuning.front import non_dominated
from vitrim.tuning.grid import Grid, Values
from vitrim.tuning.study import Study

if TYPE_CHECKING:
    from vitrim.training.loop import Running

TOGETHER = 8
"""Settings that run in one pass over the images, and are kept together."""


@dataclass(frozen=True)
class Swept:
    """The results of the points of a grid.

    Attributes:
        grid: the grid.
        metric: what is best where it is largest.
        rows: the values of each point by option, and its numbers; the point's text under "method" or "out".
    """

    grid: Grid
    metric: str
    rows: tuple[Mapping[str, Any], ...]

    @property
    def varied(self) -> list[str]:
        """The options with more than one value, those with the most values first."""
        axes = self.grid.axes
        return sorted((key for key in axes if len(axes[key]) > 1), key=lambda key: -len(axes[key]))

    def best(self) -> list[Mapping[str, Any]]:
        """The rows that no other dominates: cheaper and better; of a training grid, all of them, the best first."""
        rows = sorted(self.rows, key=lambda row: -row[self.metric])
        if "share" not in rows[0]:
            return rows
        kept = non_dominated([(row["share"], -row[self.metric]) for row in rows])
        return [row for row, keep in zip(rows, kept, strict=True) if keep]

    def table(self) -> tuple[list[list[float]], tuple[str, Sequence[str]], tuple[str, Sequence[str]]] | None:
        """The best metric for every pair of values of the two options with the most values; None with fewer than two.

        Returns:
            Numbers (R, C), nan where there is none, and name and values of the option of the rows and of the columns.
        """
        if len(self.varied) < 2:
            return None
        across, down = self.varied[:2]
        rows, columns = self.grid.axes[down], self.grid.axes[across]
        found = np.full((len(rows), len(columns)), np.nan)
        for row in self.rows:
            place = rows.index(row["values"][down]), columns.index(row["values"][across])
            found[place] = np.nanmax([found[place], row[self.metric]])
        return found.tolist(), (down, rows), (across, columns)

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Write ``grid.json`` and ``grid.csv``.

        Raises:
            VitrimError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text = {"metric": self.metric, **about, "rows": [dict(row) for row in self.rows]}
        write_text(folder / "grid.json", json_text(text, indent=2) + "\n")
        every = (entry for row in self.rows for entry in row.items())  # a score without a value in a run is not there
        numbers = list(dict.fromkeys(name for name, value in every if name != "values" and not isinstance(value, dict)))
        lines = io.StringIO()
        out = csv.writer(lines, lineterminator="\n")
        out.writerow([*self.grid.axes, *numbers])
        for row in self.rows:
            out.writerow([*(row["values"][key] for key in self.grid.axes), *(row.get(name, "") for name in numbers)])
        write_text(folder / "grid.csv", lines.getvalue())


def sweep(
    model: nn.Module,
    grid: Grid,
    dataset: Any,
    task: Task,
    *,
    number: int | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    workers: int = 0,
    seed: int = 0,
    study: Path | None = None,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    processes: Processes | None = None,
    on_point: Callable[[int], None] | None = None,
) -> Swept:
    """Evaluate a method at the points of a grid, next to the dense model.

    Args:
        model: the dense model, on its device; left as it was.
        grid: of a method.
        dataset: map-style, with targets.
        task: of the model.
        number: try so many points drawn at random; None for all.
        limit: read at most so many images.
        batch_size: B.
        workers: processes that decode images.
        seed: of points that are drawn, and of methods that draw at random.
        study, resume, about: as of `vitrim.tuning.search`.
        processes: this process and its like, which share the batches.
        on_point: called with the number of finished points.

    Raises:
        VitrimError: a point is no valid setting or does not fit the model; the study is of another sweep.
    """
    processes = processes or Processes()
    points = grid.points(number, seed)
    configs = [grid.config(point) for point in points]
    settings = {
        "grid": {"method": grid.method, "axes": grid.axes, "points": len(points), "seed": seed},
        "parameters": weights_fingerprint(model),
        "images": min(limit or len(dataset), len(dataset)),
        "batch_size": batch_size,
        **(about or {}),
    }
    log = Study(study, settings, resume=resume, processes=processes)
    rows: list[dict[str, Any]] = []
    kept: Any = _point(task)
    for start in range(0, len(configs), TOGETHER):
        some = configs[start : start + TOGETHER]

        def measure(some: Sequence[Any] = some) -> list[dict[str, Any]]:
            with quiet():
                models = contestants(model, some, task)
            measurement = Measurement(models, standard_probes(task), task, processes=processes, seed=seed)
            reading = {"limit": limit, "workers": workers, "processes": processes, "collate": task.collate}
            measurement.follow(read(dataset, batch_size, **reading))  # type: ignore[arg-type]
            dense, *others = measurement.rows()
            full, names = sum(dense["gmacs"].values()), list(dense)
            shown = [*names[names.index("images") + 1 : names.index("agreement")], "agreement", "cosine"]
            return [
                {
                    "method": row.method,
                    "share": sum(row["gmacs"].values()) / full,
                    **{key: row[key] for key in shown},
                }
                for row in others
            ]

        kind: Any = Annotated[list[kept], Field(min_length=len(some), max_length=len(some))]
        found = log.value(f"points {start}-{start + len(some)}", measure, together=True, kind=kind)
        rows += [{**row, "values": point} for row, point in zip(found, points[start:], strict=False)]
        if on_point is not None:
            on_point(len(rows))
    return Swept(grid, task.selects_by, tuple(rows))


def train_sweep(
    recipe: str,
    grid: Grid,
    data: str,
    running: Running,
    *,
    number: int | None = None,
    seed: int = 0,
    cpu: bool = False,
    on_point: Callable[[int], None] | None = None,
) -> Swept:
    """Train a recipe at the points of a grid, each run in a folder of its own; finished runs are not run again.

    Args:
        recipe: name or file.
        grid: of values of the recipe.
        data: as of `vitrim train`.
        running: how every run is run; ``out`` is the folder above theirs, with ``resume`` stopped runs go on.
        number, seed: as of `sweep`.
        cpu: stay on the CPU where there is a GPU.
        on_point: called with the number of finished points.

    Raises:
        VitrimError: a value that the recipe does not take, before any run; or what stops a run.
    """
    from vitrim.training.build import build_trainer
    from vitrim.training.recipe import load_recipe, recipe_text
    from vitrim.weights import RECIPE, RESULT

    points = grid.points(number, seed)
    every = [load_recipe(recipe, [f"{key}={text}" for key, text in point.items()]) for point in points]
    rows: list[dict[str, Any]] = []
    metric = ""
    for resolved, point in zip(every, points, strict=True):
        out = running.out / folder_name(point)
        if (out / RESULT).exists():
            if not running.resume:
                raise VitrimError(f"{out} has a finished run: go on with --resume, or give another --out")
            if (out / RECIPE).read_text(encoding="utf-8") != recipe_text(resolved.recipe):
                raise VitrimError(f"{out} has a finished run of another recipe: give another --out")
            result = _result(out / RESULT)
        else:
            begun = (out / "checkpoints").exists()
            own = replace(running, out=out, resume=running.resume and begun)
            trainer = build_trainer(resolved, data, own, cpu=cpu)
            result = trainer.run()
        scores = result["best"] or result["last"] or result.get("test")
        metric = metric or _selects_by(resolved.recipe.task)
        if not scores or metric not in scores:
            raise VitrimError(f"{resolved.name} is not evaluated: give it eval_split, e.g. --grid eval_split=0.1")
        numbers = {key: value for key, value in scores.items() if isinstance(value, float | int) and key != "update"}
        rows.append({"out": str(out), **numbers, "values": point})
        if on_point is not None:
            on_point(len(rows))
    return Swept(grid, metric, tuple(rows))


def folder_name(point: Values) -> str:
    """The folder of a run: its values, of those that are long a short sum.

    Example:
        >>> folder_name({"optimizer.lr": "1e-3", "schedule.warmup_epochs": "5"})
        'lr=1e-3,warmup_epochs=5'
    """
    text = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())
    safe = "".join(letter if letter.isalnum() or letter in "=.,-_+" else "_" for letter in text)
    return safe if len(safe) <= 120 else f"{safe[:100]}-{zlib.crc32(text.encode()):08x}"


def _point(task: Task) -> Any:
    """The type of what is kept of one point: its numbers by name, that which is best where it is largest among them."""
    numbers: dict[str, Any] = dict.fromkeys(("share", "agreement", "cosine", task.selects_by), (float, ...))
    return create_model("Point", __config__=ConfigDict(extra="allow"), method=(str, ...), **numbers)


def _result(file: Path) -> dict[str, Any]:
    """The results of a finished run.

    Raises:
        VitrimError: the file is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        best, last, test = found["best"], found["last"], found.get("test")
        if not all(isinstance(one, dict | None) for one in (best, last, test)):
            raise ValueError("its scores are no numbers by name")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise VitrimError(f"{file} is damaged ({first_line(error)}): remove its folder to run it again") from None
    return dict(found)


def _selects_by(task: str) -> str:
    from vitrim.tasks import tasks

    return tasks()[task].selects_by
