"""`tune`, the function of ``vitrim tune``: search settings that meet a target, and write files and a report.

model = vitrim.create_model("deit_small_patch16_224", pretrained=True)
report = vitrim.tune(model, "tome", "imagenet:ROOT", target="macs=0.6")
vitrim.reduce_(model, report.best)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrim.checked import Positive, Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.registry import parse_methods
from vitrim.engines.engine import engines_named
from vitrim.engines.machine import environment, seeded_draws, select_device
from vitrim.errors import VitrimError, check_installed
from vitrim.files import check_folder, json_text, write_text
from vitrim.loading import Loaded, ModelSpec, PlacedModel
from vitrim.measure.evaluation import standard_probes
from vitrim.measure.identity import identity
from vitrim.measure.in_files import place_of
from vitrim.measure.inputs import ScoredData
from vitrim.measure.records import Processes, read
from vitrim.measure.run import run
from vitrim.measure.store import Store
from vitrim.measure.task_data import open_task
from vitrim.plots.tuning import plot_front, plot_heat, plot_schedule
from vitrim.report import Report, Table
from vitrim.results import Results
from vitrim.tasks import Task
from vitrim.tuning.proxy import DatasetImages
from vitrim.tuning.result import Result, Target, Trial, front_rows, front_table, saving
from vitrim.tuning.search import EVALUATIONS, Methods, Searches, SearchOptions, SearchSpec
from vitrim.tuning.space import Space, quiet, training_free
from vitrim.tuning.sweep import SweepResult, parse_grid, sweep, train_sweep

IMAGES = 3 * 2048
"""Default limit of images: 2,048 each for searching, selecting and checking."""

Progress = Callable[[int, int, str], None]
"""Receives the number of settings done, the most there can be, and a line for a new best setting, else ""."""


# ---- the function of the command -------------------------------------------------------------------------------------


@dataclass(repr=False)
class TuneReport(Report):
    """The findings of `tune`.

    Attributes:
        checked: rows of the dense model and the settings on the images of ``check``.
    """

    results: Sequence[Result] = ()
    checked: Sequence[Mapping[str, Any]] = ()

    @property
    def best(self) -> MethodConfig:
        """The setting found for the target, for `vitrim.reduce_`; `VitrimError` for several targets, or a grid."""
        if len(self.results) != 1:
            raise VitrimError("there is no single setting: those of targets are in .results, of points in .rows")
        return self.results[0].config

    @property
    def record(self) -> dict[str, Any]:
        """Everything but the tables, the output of ``--json``."""
        found = super().record
        if self.command == "tune":
            del found["rows"]  # the facts contain them
        return found


@checked_call
def tune(
    model: nn.Module | str | ModelSpec,
    methods: Methods,
    data: Any,
    *,
    target: Target | str | Sequence[Target | str],
    evaluations: Positive | None = None,
    search: SearchSpec | None = None,
    check: Any = None,
    out: str | Path | Results | None = "tuned",
    seed: Seed = 0,
    on_progress: Progress | None = None,
) -> TuneReport:
    """Search a value per block with the least damage at a target, and compare it with one value for all blocks.

    A third of the images is for searching, one for selecting and one for checking. The searched setting is returned if
    it is significantly better than the constant one on the last third. Only ``check`` reads labels.

    Args:
        model: the dense model, not changed; its name, or a `vitrim.PlacedModel`, which may have another image size as
            ``img_sizes``.
        methods: one or several, configs or text such as ``"tome"``; several race. ``"all"`` means all
            training-free methods that fit the model.
        data: images: a source, as for ``--data``, a dataset, or a `vitrim.ScoredData`, whose ``limit`` defaults to
            6,144.
        target: ``"macs=0.5"`` (share of the dense MACs), ``"speedup=1.5"`` (on this device) or ``"agree=0.98"``.
            Several give a front: a list of one kind, or text: ``"0.35,0.5"`` (shares of the dense MACs),
            ``"speedup=1.2,1.5"``.
        evaluations: most settings to try per target; default 60.
        search: the damage to minimise, a time limit, and the engine to be fast on.
        check: images to finally score dense, constant and searched settings on: ``"DATA"`` or ``"DATA:SPLIT"``, read
            like ``data``, or a dataset.
        out: folder for the results and ``study.jsonl``, or a `vitrim.Results`, whose ``resume`` continues from it;
            None writes nothing.
        seed: seed of a named model's random weights, of drawn settings, and of methods that draw at random.
        on_progress: called with the number of settings done, the most there can be, and a line on each new best.

    Returns:
        A report whose ``best`` is the setting for a target; ``results`` has the searches with all trials,
        ``files`` the files written.

    Raises:
        VitrimError: contradictory options, an unknown name, a target out of reach, or data that cannot be read; nothing
            is written.

    Example:
        >>> import numpy as np, timm, vitrim
        >>> from io import BytesIO
        >>> from PIL import Image
        >>> from vitrim.data import ImageDataset
        >>> model = timm.create_model("test_vit", img_size=32, patch_size=8, depth=3, num_classes=3)
        >>> def picture(seed):
        ...     file, noise = BytesIO(), np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        ...     Image.fromarray(noise).save(file, "png")
        ...     return file.getvalue()
        >>> dataset = ImageDataset([picture(seed) for seed in range(12)], [0] * 12)
        >>> data = vitrim.ScoredData(dataset, batch_size=4)
        >>> report = tune(model, "tome", data, target="macs=0.7", evaluations=4, out=None)
        >>> report.results[0].best.share <= 0.705
        True
        >>> reduction = vitrim.reduce_(model, report.best)
    """
    check_installed("a search", "optuna")
    source, results = ScoredData.of(data), Results.of(out)
    spec = search or SearchSpec()
    targets, several = _targets(target)
    configs = _configs(methods)
    engines, _ = engines_named(*spec.where, place_of(PlacedModel.of(model)))
    begun = _begin(model, source, results, seed)
    if configs is None:
        configs = training_free(begun.loaded.model, counted=targets[0].kind == "speedup")
        configs = [one for one in configs if all(each.obstacle(one, begun.size) is None for each in engines)]
    held_out = None if check is None else _open_check(check, begun.loaded, source, begun.dataset)
    limit, collate = source.limit or IMAGES, begun.task.collate
    parts = DatasetImages(begun.dataset, max(limit // 3, 1), begun.size, workers=source.workers, collate=collate)
    tried = EVALUATIONS if evaluations is None else evaluations
    heard = on_progress if begun.first else None
    how: SearchOptions = {
        "spec": spec, "evaluations": tried, "seed": seed,
        "store": begun.store, "resume": results.resume, "about": begun.about, "processes": begun.processes,
        "on_trial": None if heard is None else _improvements(heard, tried * len(targets), spec.proxy),
    }  # fmt: skip
    if heard is not None:  # measuring costs before the first setting may take minutes
        heard(0, tried * len(targets), "")
    with quiet():
        searches = Searches(begun.loaded.model, configs, begun.task, parts, targets, how)
        found = searches.run()
        front = front_rows(found, searches.evaluator) if several else None
    facts = {
        "model": begun.loaded.name,
        "environment": environment(device=begun.about["device"], dtype="float32", seed=seed),
        "processes": begun.processes.count,
    }
    report = _report_searches(found, front, facts, begun.loaded.model, begun.folder)
    if held_out is not None and begun.first:
        _check_held_out(report, held_out, begun.loaded.model, source, seed, begun.folder)
    return report


@checked_call
def tune_grid(
    model: nn.Module | str | ModelSpec,
    grid: str | Sequence[str],
    data: Any,
    *,
    number: Positive | None = None,
    out: str | Path | Results | None = "tuned",
    seed: Seed = 0,
    on_progress: Progress | None = None,
) -> TuneReport:
    """Evaluate a method at every point of a grid, and the dense model.

    Args:
        model: the dense model, not changed; its name, or a `vitrim.PlacedModel`.
        grid: all combinations, e.g. ``"atm:alpha=0.9..1.0/0.05,beta=0|0.02"``, or the name of a paper's sweep.
        data: labelled images: a source, as for ``--data``, a dataset, or a `vitrim.ScoredData`.
        number: try this many random points; None for all.
        out: folder for the results and ``study.jsonl``, or a `vitrim.Results`; None writes nothing.
        seed: seed of a named model's random weights, of drawn points, and of methods that draw at random.
        on_progress: called with the number of points done, the total, and "".

    Returns:
        A report with a row per point, and a table of the points that no other dominates.

    Raises:
        VitrimError: an invalid setting, a setting that does not fit the model, or data that cannot be read.
    """
    source, results, texts = ScoredData.of(data), Results.of(out), [grid] if isinstance(grid, str) else list(grid)
    points = parse_grid(texts)
    chosen = points.points(number, seed)
    configs = [points.config(point) for point in chosen]
    begun = _begin(model, source, results, seed)
    settings = {
        "grid": {"method": points.method, "axes": points.axes, "points": len(chosen), "seed": seed},
        "content": identity(begun.loaded.model, begun.task, begun.dataset),
        "images": min(source.limit or len(begun.dataset), len(begun.dataset)),
        "batch_size": begun.size,
        **begun.about,
    }
    store = Store(begun.store, settings, resume=results.resume, processes=begun.processes)
    batches = partial(
        read, begun.dataset, begun.size, limit=source.limit, workers=source.workers, processes=begun.processes,
        collate=begun.task.collate,
    )  # fmt: skip
    heard = None if on_progress is None or not begun.first else lambda done: on_progress(done, len(chosen), "")
    rows = sweep(begun.loaded.model, configs, begun.task, batches, store, seed=seed, on_point=heard)
    valued = tuple({**row, "values": point} for row, point in zip(rows, chosen, strict=True))
    found = SweepResult(points, begun.task.selects_by, valued)
    return _report_sweep(found, {"model": begun.loaded.name, **begun.about, "grid": texts}, begun.folder)


@checked_call
def train_grid(
    recipe: str,
    grid: str | Sequence[str],
    data: str,
    *,
    number: Positive | None = None,
    out: str | Path = "tuned",
    resume: bool = False,
    workers: int = 0,
    device: str | None = None,
    seed: Seed = 0,
    on_progress: Progress | None = None,
) -> TuneReport:
    """Train a recipe at every point of a grid, each run in its own folder.

    Args:
        recipe: name or file; it names the model and how data are read.
        grid: ``"key=a|b"`` of the recipe, one or several.
        data: source, see `vitrim.train`.
        number: train at this many random points; None for all.
        out: folder for the runs and the results.
        resume: continue interrupted runs; finished ones are kept.
        workers: processes that read images; 0 for this one.
        device: cpu, or None for accelerate's choice.
        seed: seed of drawn points.
        on_progress: called with the number of runs done, the total, and "".

    Returns:
        See `tune_grid`.

    Raises:
        VitrimError: a value that the recipe does not accept, before any run; or an error of a run.
    """
    from vitrim.training.running import Running

    kind, colon, _ = str(device or "cpu").partition(":")
    if colon:
        raise VitrimError(
            f"--device {device} names one of several devices, and with --train accelerate chooses it: write --device "
            f"{kind}"
        )
    texts, folder, device = [grid] if isinstance(grid, str) else list(grid), Path(out), device or "cpu"
    points = parse_grid(texts, recipe=True)
    most = len(points.points(number, seed))
    check_folder(folder)
    select_device(device), torch.manual_seed(seed)
    found = train_sweep(
        recipe, points, data, Running(folder, resume=resume, workers=workers), number=number, seed=seed,
        cpu=device == "cpu", on_point=None if on_progress is None else lambda done: on_progress(done, most, ""),
    )  # fmt: skip
    first = Processes.launched(device).index == 0
    return _report_sweep(found, {"train": recipe, "data": data, "grid": texts}, folder if first else None)


@dataclass(frozen=True)
class _Begun:
    """Model and images of a search or a grid; ``folder`` is None if nothing is written, or another process writes."""

    loaded: Loaded
    task: Task
    dataset: Any
    size: int
    about: dict[str, Any]
    folder: Path | None
    store: Path | None
    processes: Processes

    @property
    def first(self) -> bool:
        """True in the process that writes."""
        return self.processes.index == 0


def _begin(model: nn.Module | str | ModelSpec, source: ScoredData, results: Results, seed: int) -> _Begun:
    spec, folder = PlacedModel.of(model), results.path
    if len(spec.img_sizes) > 1:
        raise VitrimError(f"a search is at one image size, got {', '.join(map(str, spec.img_sizes))}")
    device = place_of(spec)
    if folder is not None:
        check_folder(folder)
    processes = Processes.launched(str(device))
    with seeded_draws(device, seed):
        own, others = spec.load_sizes(processes.device or device)
    loaded = others[0] if others else own
    task, dataset = open_task(loaded, source, embeddings=True)
    about = {"data": source.name(dataset), "split": dataset.split, "device": str(device), "weights": loaded.weights}
    about |= {"img_size": loaded.side} if others else {}
    store = None if folder is None else folder / "study.jsonl"
    writes = folder if processes.index == 0 else None
    return _Begun(loaded, task, dataset, task.eval_batch(source.batch_size), about, writes, store, processes)


def _targets(target: Target | str | Sequence[Target | str]) -> tuple[list[Target], bool]:
    """The targets of a search, and True for a front."""
    if isinstance(target, Target) or (isinstance(target, str) and "," not in target and "=" in target):
        return [Target.parse(target)], False
    if isinstance(target, str):
        kind, equals, values = target.partition("=")
        kind, values = ("macs", target) if "," in kind or not equals else (kind, values)
        target = [f"{kind}={value}" for value in values.split(",")]
    given: Sequence[Any] = target if isinstance(target, Sequence) and target else [target]
    targets = [Target.parse(one) for one in given]
    names = ", ".join(map(str, targets))
    if len({one.kind for one in targets}) != 1 or targets[0].kind == "agree":
        raise VitrimError(f"a front is over targets of one kind, macs or speedup, got {names}")
    if len({one.value for one in targets}) < len(targets):
        raise VitrimError(f"--front {names} has a target twice")
    return targets, True


def _configs(methods: Methods | None) -> list[MethodConfig] | None:
    """The methods; None for "all"."""
    given = methods if isinstance(methods, list | tuple) else [methods]
    if "all" in given:
        if len(given) > 1:
            raise VitrimError("-m all has the other methods already: leave them out")
        return None
    configs = parse_methods(methods)
    if not configs:
        raise VitrimError("there is nothing to tune: name at least one method")
    return configs


def _improvements(on_progress: Progress, most: int, proxy: str) -> Callable[[Trial], None]:
    """A callback that counts finished trials, and reports each that is better than all before."""
    done, best = 0, float("inf")

    def finished(trial: Trial) -> None:
        nonlocal done, best
        done, score = done + 1, trial.scores[proxy]
        if trial.number == 0:  # a new target
            best = float("inf")
        better, best = score < best, min(score, best)
        text = f"{proxy} {score:.4g} at {saving(trial.share)} % saved: {trial.config.describe()} ({trial.source})"
        on_progress(done, max(done, most), text if better else "")

    return finished


# ---- images ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckImages:
    """Images to score the result of a search on.

    Attributes:
        same: the search read them too.
    """

    task: Task
    dataset: Any
    source: str
    same: bool


def _open_check(check: Any, loaded: Loaded, searched: ScoredData, dataset: Any) -> CheckImages:
    """Open ``check``: a dataset, ``SOURCE`` or ``SOURCE:SPLIT``; ``searched`` and ``dataset`` are the search's
    images."""
    if not isinstance(check, str | Path):
        task, found = open_task(
            loaded, ScoredData(check, task=searched.task, options=searched.options), embeddings=True
        )
        return CheckImages(task, found, found.source, check is searched.source)
    source, _, split = str(check).rpartition(":")
    if not source or "/" in split or "\\" in split:  # no colon, or that of a path
        source, split = str(check), ""
    task, found = open_task(loaded, replace(searched, source=source, split=split or None), embeddings=True)
    same = Path(source).resolve() == Path(searched.name(dataset)).resolve() and found.split == dataset.split
    return CheckImages(task, found, str(check), same)


# ---- reports ---------------------------------------------------------------------------------------------------------


def _report_searches(
    results: Sequence[Result],
    front: Sequence[Mapping[str, Any]] | None,
    facts: Mapping[str, Any],
    model: nn.Module,
    folder: Path | None,
) -> TuneReport:
    """The report of searches; write and draw the results if there is a folder."""
    if front is None:
        (result,) = results
        report = TuneReport("tune", {**facts, **result.record()}, result.rows(), result.tables(), result.notes())
        if folder is not None:
            report.files.append(folder / "best.json")
            result.save(report.files[0])
            report.notes.append(f"use it as -m @{report.files[0]}")
            _draw_schedule(report, result, model, folder / "schedule.png")
        report.results = results
        return report
    about = {key: value for key, value in results[0].about.items() if key != "target"}
    proxy, unit = results[0].proxy, results[0].cost.unit
    notes = ["means over the check images, less is better; front: no other is as cheap and does as little damage"]
    notes += [f"{result.target}: {result.verdict}" for result in results]
    report = TuneReport("tune --front", {**facts, "tuned": about}, front, [front_table(front, unit)], notes)
    report.results = results
    if folder is not None:
        files = [folder / f"{result.target.kind}-{result.target.value:g}.json" for result in results]
        for result, file in zip(results, files, strict=True):
            result.save(file)
        write_text(folder / "front.json", json_text({"tuned": about, "rows": front}, indent=2) + "\n")
        report.files += [*files, folder / "front.json"]
        report.notes.append(f"use them as {', '.join(f'-m @{file}' for file in files)}")
        if _can_draw():
            points = [(row["setting"], row["share"], row["scores"][proxy]) for row in front]
            steps = [(row["share"], row["scores"][proxy]) for row in front if row["on_front"]]
            cost = "MACs" if unit == "macs" else unit
            plot_front(points, folder / "front.png", front=steps, cost=cost, damage=proxy)
            _say_picture(report, folder / "front.png")
        for result, file in zip(results, files, strict=True):
            _draw_schedule(report, result, model, file.with_suffix(".png"))
    return report


def _draw_schedule(report: TuneReport, result: Result, model: nn.Module, file: Path) -> None:
    """Draw the tokens per block of the searched and the constant setting, unless they depend on the images."""
    spaces = {f"{name}: {trial.config.name}": (Space.of(model, trial.config), trial) for name, trial in result.pair}
    counts = {name: space.counts(trial.config) for name, (space, trial) in spaces.items()}
    if not _can_draw() or None in counts.values():
        return
    patches = next(iter(spaces.values()))[0].patches
    plot_schedule({name: each or [] for name, each in counts.items()}, patches, file, title=str(result.target))
    _say_picture(report, file)


def _check_held_out(
    report: TuneReport, held_out: CheckImages, model: nn.Module, source: ScoredData, seed: int, folder: Path | None
) -> None:
    """Score the dense model and the found settings on the images of ``check``."""
    trials = [trial for result in report.results for _, trial in result.pair]
    configs = list({trial.config.describe(): trial.config for trial in trials}.values())
    task = held_out.task
    size = task.eval_batch(source.batch_size)
    batches = read(held_out.dataset, size, workers=source.workers, collate=task.collate)
    rows = run(model, configs, batches, standard_probes(task), task=task, seed=seed)
    returned = {result.config.describe() for result in report.results}
    names = [name for name, value in rows[0].items() if isinstance(value, float) and "gmacs" not in name]
    lines: list[tuple[Any, ...]] = [
        (row.method, "yes" if row.method in returned else "", *(f"{100 * row[name]:.2f}" for name in names))
        for row in rows
    ]
    report.tables.append(Table("check", "", ("method", "returned", *names), lines, text_columns=2))
    report.notes.append(f"in %, on {rows[0]['images']} images of {held_out.source}")
    if held_out.same:
        report.notes.append("the search read images of the same split: these numbers are optimistic")
    report.checked = [dict(row) for row in rows]
    if folder is not None:
        content = {"images": held_out.source, "same": held_out.same, "rows": report.checked}
        write_text(folder / "check.json", json_text(content, indent=2) + "\n")
        report.files.append(folder / "check.json")


def _report_sweep(found: SweepResult, about: Mapping[str, Any], folder: Path | None) -> TuneReport:
    """The report of a grid; write and draw the results if there is a folder."""
    table, best = found.table(), found.best()
    kept = "that no other dominates" if "share" in best[0] else f"best {found.metric} first"
    note = f"in %; {len(table.rows)} of {len(found.rows)} points, {kept}"
    report = TuneReport("tune --grid", {**about, "metric": found.metric}, found.rows, [table], [note])
    if folder is not None:
        report.files += found.save(folder, about)
        report.notes[0] += f"; all of them: {', '.join(map(str, report.files))}"
        heat = found.heat()
        if heat is not None and _can_draw():
            values, down, across = heat
            percent = [[100 * value for value in row] for row in values]
            others = ", best over the other options" if len(found.varied) > 2 else ""
            plot_heat(percent, down, across, folder / "grid.png", label=f"{found.metric}, %{others}")
            _say_picture(report, folder / "grid.png")
    return report


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _say_picture(report: TuneReport, file: Path) -> None:
    report.files.append(file)
    report.notes.append(f"picture: {file}")
