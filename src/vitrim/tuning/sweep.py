"""Sweeps: every combination of some options of a method, evaluated, or of some values of a recipe, trained.

    atm:alpha=0.945..1.0/0.005,beta=0|0.02|0.045       all combinations of these options
    optimizer.lr=1e-2|1e-3|1e-4                        one value of a recipe; several such texts are combined

A range START..STOP/STEP includes its end. The sweeps of the papers have names, defined in ``grids.yaml``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.options import read_value, split_options
from vitrim.core.registry import make_method
from vitrim.errors import VitrimError, first_line, unknown
from vitrim.files import csv_text, json_text, safe_name, write_text
from vitrim.measure.contestants import contestants
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.records import Batch
from vitrim.measure.run import Measurement
from vitrim.measure.store import Store
from vitrim.report import Table
from vitrim.tasks import tasks
from vitrim.tasks.base import Task
from vitrim.tuning.result import non_dominated
from vitrim.tuning.space import quiet

if TYPE_CHECKING:
    from vitrim.training.running import Running

MOST = 10_000
"""Most points of a grid without an explicit number."""

SHOWN = 20
"""Most rows of a table of points; the files have all."""

FILE = Path(__file__).parent / "grids.yaml"

GridValues = dict[str, str]
"""One value, as text, for every option."""


@dataclass(frozen=True)
class SettingsGrid:
    """Options and their values.

    Attributes:
        method: the method; None for values of a recipe.
        axes: the values as text, by option.
    """

    method: str | None
    axes: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        return int(np.prod([len(values) for values in self.axes.values()], dtype=np.int64))

    def points(self, number: int | None = None, seed: int = 0) -> list[GridValues]:
        """All combinations, the last option fastest, or a random choice of ``number`` of them, in this order.

        Raises:
            VitrimError: more than 10,000, without a number.

        Example:
            >>> [list(point.values()) for point in parse_grid(["tome:r=4..8/4,last_block=full|auto"]).points()]
            [['4', 'full'], ['4', 'auto'], ['8', 'full'], ['8', 'auto']]
        """
        if number is None and len(self) > MOST:
            raise VitrimError(f"the grid has {len(self)} points: say with --evaluations how many of them to try")
        places = np.arange(len(self))
        if number is not None and number < len(self):
            places = np.sort(np.random.default_rng(seed).choice(len(self), number, replace=False))
        shape = tuple(len(values) for values in self.axes.values())
        return [
            {key: values[place] for (key, values), place in zip(self.axes.items(), point, strict=True)}
            for point in zip(*(each.tolist() for each in np.unravel_index(places, shape)), strict=True)
        ]

    def config(self, point: GridValues) -> MethodConfig:
        assert self.method is not None
        return make_method(self.method, **{key: read_value(text, key) for key, text in point.items()})


@cache
def paper_grids() -> dict[str, dict[str, Any]]:
    """The sweeps of the papers by name: ``paper``, ``grid`` (texts), and ``train`` (a recipe) if they train.

    Example:
        >>> len(parse_grid(["atm"]))
        2880
    """
    return dict(yaml.safe_load(FILE.read_text(encoding="utf-8")))


def parse_grid(given: Sequence[str], *, recipe: bool = False) -> SettingsGrid:
    """Parse the grid of one method or, with ``recipe``, of values of a recipe.

    Args:
        given: texts (see the module), or names of `paper_grids`.
        recipe: the texts are values of a recipe.

    Raises:
        VitrimError: an unknown name, malformed text, a duplicate option, or several methods.

    Example:
        >>> parse_grid(["atm:alpha=0.98..1.0/0.01,beta=0|0.02"]).axes
        {'alpha': ('0.98', '0.99', '1'), 'beta': ('0', '0.02')}
        >>> parse_grid(["optimizer.lr=1e-2|1e-3", "epochs=1"], recipe=True).axes
        {'optimizer.lr': ('1e-2', '1e-3'), 'epochs': ('1',)}
    """
    texts: list[str] = []
    for text in given:
        if "=" not in text and text not in paper_grids():
            raise unknown("grid", text, paper_grids())
        texts += [text] if "=" in text else paper_grids()[text]["grid"]
    axes: dict[str, tuple[str, ...]] = {}
    method: str | None = None
    if not recipe:
        if texts and not any(":" in text.partition("=")[0] for text in texts):
            raise VitrimError(
                f"{texts[0]} is a value of a recipe or nothing that is known: give --train RECIPE too, or write the "
                "grid of a method, e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02"
            )
        if len(texts) != 1:
            raise VitrimError(f"a grid is of one method, got {len(texts)}: {', '.join(texts)}")
        method, colon, rest = texts[0].partition(":")
        if not colon or "=" in method:
            raise VitrimError(f"cannot read the grid '{texts[0]}': write e.g. atm:alpha=0.9..1.0/0.05,beta=0|0.02")
        parts, method = split_options(rest), method.strip()
    else:
        parts = list(texts)
    for part in parts:
        key, equals, text = part.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise VitrimError(f"cannot read '{part}' of the grid: write e.g. key=1|2|3 or key=0.8..1.0/0.05")
        if key.strip() in axes:
            raise VitrimError(f"'{key.strip()}' is given twice in the grid")
        values = [value for one in text.strip().split("|") for value in _range(one.strip())]
        if "" in values:
            raise VitrimError(f"a value is missing in '{text.strip()}' of the grid: write e.g. 0|0.02|0.045")
        axes[key.strip()] = tuple(dict.fromkeys(values))
    return SettingsGrid(method, axes)


def _range(text: str) -> list[str]:
    """The values of a range, or the text itself."""
    ends, slash, step_text = text.partition("/")
    start_text, dots, stop_text = ends.partition("..")
    if not dots or text.startswith("["):
        return [text]
    try:
        start, stop = Decimal(start_text), Decimal(stop_text)
        step = Decimal(step_text) if slash else Decimal(1)
    except InvalidOperation:
        raise VitrimError(f"cannot read the range '{text}': write START..STOP/STEP, e.g. 0.8..1.0/0.05") from None
    if not (start.is_finite() and stop.is_finite() and step.is_finite()) or step <= 0 or stop < start:
        raise VitrimError(f"the range '{text}' does not rise: write START..STOP/STEP with a step above 0")
    number = int((stop - start) / step)
    if number > MOST:
        raise VitrimError(f"the range '{text}' has {number + 1} values, at most {MOST} are tried")
    return [f"{(start + place * step).normalize():f}" for place in range(number + 1)]


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SweepResult:
    """The results of the points of a grid.

    Attributes:
        rows: each point's ``values`` by option, and its numbers; its text under "method" or "out".
    """

    grid: SettingsGrid
    metric: str
    rows: tuple[Mapping[str, Any], ...]

    @property
    def varied(self) -> list[str]:
        """The options with more than one value, those with the most values first."""
        axes = self.grid.axes
        return sorted((key for key in axes if len(axes[key]) > 1), key=lambda key: -len(axes[key]))

    def best(self) -> list[Mapping[str, Any]]:
        """The rows that no other dominates in cost and metric; for a training grid, all rows, best first."""
        rows = sorted(self.rows, key=lambda row: -row[self.metric])
        if "share" not in rows[0]:
            return rows
        kept = non_dominated([(row["share"], -row[self.metric]) for row in rows])
        return [row for row, keep in zip(rows, kept, strict=True) if keep]

    def heat(self) -> tuple[list[list[float]], tuple[str, Sequence[str]], tuple[str, Sequence[str]]] | None:
        """The best metric for every pair of values of the two options with the most values; None with fewer than two.

        Numbers (R, C), nan for missing, and name and values of the options of rows and columns.
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

    def table(self) -> Table:
        best, axes = self.best(), self.grid.axes
        numbers = [name for name, value in best[0].items() if isinstance(value, float) and name != "epoch"]
        rows: list[tuple[Any, ...]] = [
            (*(row["values"][key] for key in axes), *(f"{100 * row[name]:.2f}" for name in numbers))
            for row in best[:SHOWN]
        ]
        return Table("grid", "", (*axes, *numbers), rows, text_columns=len(axes))

    def save(self, folder: Path, about: Mapping[str, Any]) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        text = {"metric": self.metric, **about, "rows": [dict(row) for row in self.rows]}
        write_text(folder / "grid.json", json_text(text, indent=2) + "\n")
        every = (entry for row in self.rows for entry in row.items())  # runs may lack some scores
        numbers = list(dict.fromkeys(name for name, value in every if name != "values" and not isinstance(value, dict)))
        axes = self.grid.axes
        lines = [[*map(row["values"].get, axes), *(row.get(name, "") for name in numbers)] for row in self.rows]
        write_text(folder / "grid.csv", csv_text([*axes, *numbers], lines))
        return [folder / "grid.csv", folder / "grid.json"]


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def sweep(
    model: nn.Module,
    configs: Sequence[MethodConfig],
    task: Task,
    batches: Callable[[], Iterable[Batch]],
    store: Store,
    *,
    seed: int = 0,
    on_point: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Evaluate many settings of a method and the dense model, and return the rows of the settings.

    Args:
        model: the dense model, on its device; not changed.
        batches: makes an iterator over this process's batches.
        store: keeps the rows.

    Raises:
        VitrimError: a setting does not fit the model.
    """

    def measure(places: Sequence[int]) -> list[dict[str, Any]]:
        with quiet():
            models = contestants(model, [configs[place] for place in places], task)
            measurement = Measurement(models, standard_probes(task), task, processes=store.processes, seed=seed)
            measurement.follow(batches())
        dense, *others = measurement.rows()
        full, names = sum(dense["gmacs"].values()), list(dense)
        shown = [*names[names.index("images") + 1 : names.index("agreement")], "agreement", "cosine"]
        if on_point is not None:
            on_point(places[-1] + 1)
        return [
            {"method": row.method, "share": sum(row["gmacs"].values()) / full, **{key: row[key] for key in shown}}
            for row in others
        ]

    return store.values([config.describe() for config in configs], measure, together=True)


def train_sweep(
    recipe: str,
    grid: SettingsGrid,
    data: str,
    running: Running,
    *,
    number: int | None = None,
    seed: int = 0,
    cpu: bool = False,
    on_point: Callable[[int], None] | None = None,
) -> SweepResult:
    """Train a recipe at the points of a grid, each in its own folder; finished runs are kept.

    Args:
        running: how to run each training; ``out`` is the parent folder, ``resume`` continues interrupted runs.
        cpu: do not use a GPU.

    Raises:
        VitrimError: a value that the recipe does not accept, before any run; or an error of a run.
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
        metric = metric or tasks()[resolved.recipe.task].selects_by
        if not scores or metric not in scores:
            raise VitrimError(f"{resolved.name} is not evaluated: give it eval_split, e.g. --grid eval_split=0.1")
        numbers = {key: value for key, value in scores.items() if isinstance(value, float | int) and key != "update"}
        rows.append({"out": str(out), **numbers, "values": point})
        if on_point is not None:
            on_point(len(rows))
    return SweepResult(grid, metric, tuple(rows))


def folder_name(point: GridValues) -> str:
    """The folder of a run: its values, with a checksum if they are long.

    Example:
        >>> folder_name({"optimizer.lr": "1e-3", "schedule.warmup_epochs": "5"})
        'lr=1e-3,warmup_epochs=5'
    """
    text = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in point.items())
    return safe_name(text, "=.,-_+")


def _result(file: Path) -> dict[str, Any]:
    """The results of a finished run; raise `VitrimError` if the file is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        best, last, test = found["best"], found["last"], found.get("test")
        if not all(isinstance(one, dict | None) for one in (best, last, test)):
            raise ValueError("its scores are no numbers by name")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise VitrimError(f"{file} is damaged ({first_line(error)}): remove its folder to run it again") from None
    return dict(found)
