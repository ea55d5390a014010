"""`tune`, the function of ``vitrim tune``: from a model, methods, data and targets to settings, files and a report.

report = vitrim.tune("deit_small_patch16_224", "tome", "imagenet:ROOT", target="macs=0.6", pretrained=True)
vitrim.reduce_(model, report.best)
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import parse_methods
from vitrim.errors import VitrimError, check_whole
from vitrim.files import check_folder, json_text, write_text
from vitrim.loading import Loaded, load
from vitrim.measure.evaluation import open_task, standard_probes
from vitrim.measure.machine import environment, select_device, set_threads
from vitrim.measure.records import Processes, read
from vitrim.measure.run import run
from vitrim.report import Report, Table
from vitrim.speed.engines import engines_named, listed
from vitrim.tasks import Task
from vitrim.tuning.proxy import DatasetImages, check_proxy
from vitrim.tuning.result import ParetoFront, Result, Target, Trial, saving
from vitrim.tuning.search import EVALUATIONS, Methods, Searches, SearchOptions, of_one_kind
from vitrim.tuning.space import Space, quiet, training_free
from vitrim.tuning.strategy import make_strategy
from vitrim.tuning.sweep import SweepResult, parse_grid, sweep, train_sweep

IMAGES = 3 * 2048
"""Images that are read where no limit says: 2,048 each for searching, selecting and checking."""

Progress = Callable[[int, int, str], None]
"""Gets the number of settings done, the most there can be, and a line where one is better than all before, else ""."""


# ---- the function of the command -------------------------------------------------------------------------------------


@dataclass(repr=False)
class TuneReport(Report):
    """The findings of `tune`.

    Attributes:
        results: of a search, one for every target.
        front: of several targets, the Pareto front.
        sweep: the results of a grid.
        checked: rows of the dense model and of the settings on the images of ``check``.
    """

    results: Sequence[Result] = ()
    front: ParetoFront | None = None
    sweep: SweepResult | None = None
    checked: Sequence[Mapping[str, Any]] = ()

    @property
    def best(self) -> MethodConfig:
        """The setting that was found for the target, as `vitrim.reduce_` takes it.

        Raises:
            VitrimError: several targets or a grid have several settings.
        """
        if len(self.results) != 1:
            raise VitrimError("there is no single setting: those of targets are in .results, of points in .rows")
        return self.results[0].config

    @property
    def record(self) -> dict[str, Any]:
        """Everything but the tables, as ``--json`` writes it."""
        found = super().record
        if self.results and self.front is None:
            del found["rows"]  # the facts have them as "constant" and "searched" of what is "tuned"
        return found


def tune(
    model: nn.Module | str | None,
    methods: Methods | None,
    data: Any,
    *,
    target: Target | str | None = None,
    front: str | Sequence[Target | str] | None = None,
    grid: str | Sequence[str] | None = None,
    train: str | None = None,
    evaluations: int | None = None,
    proxy: str = "feature",
    search: str = "evolution",
    shape: str = "free",
    minutes: float | None = None,
    engine: str | Sequence[str] | None = None,
    precision: str | Sequence[str] | None = None,
    check: Any = None,
    batch_size: int = 32,
    workers: int = 0,
    out: str | Path | None = "tuned",
    resume: bool = False,
    limit: int | None = None,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    data_options: Mapping[str, Any] | None = None,
    task: str | None = None,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    device: str | None = None,
    threads: int | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> TuneReport:
    """Search a value per block that damages a model least at a target, and compare it with one value for all blocks.

    A third of the images is for searching, one for selecting and one for checking. The searched setting is returned if
    it beats the constant one beyond noise on the last third. Labels are read only by ``check`` and ``grid``.

    Give one of ``target``, ``front`` and ``grid``. With ``train``, the points of ``grid`` are trained; model and
    methods are None then, as the recipe names them.

    Args:
        model: the dense model, which is left as it was, or its name.
        methods: what to tune: one or several, configs or texts such as ``"tome"``; several race each other; ``"all"``:
            every one that needs no training and fits the model. None with ``grid``, which names the method.
        data: source of images, as ``--data``, or a dataset of `vitrim.data`.
        target: ``"macs=0.5"`` (share of the dense MACs), ``"speedup=1.5"`` (on this device) or ``"agree=0.98"``.
        front: several targets: ``"0.35,0.5"`` (shares of the dense MACs), ``"speedup=1.2,1.5"``, or a list of targets.
        grid: try every combination, e.g. ``"atm:alpha=0.9..1.0/0.05,beta=0|0.02"``; with ``train`` ``"key=a|b"`` of the
            recipe, one or several; or the name of a paper's sweep.
        train: train this recipe at every point of ``grid``.
        evaluations: most settings to try for a target; default 60, of a grid all.
        proxy: the damage that is minimised: feature, kl, cosine or agree (1 - agreement).
        search: where settings come from: evolution, random, or optuna's gp or tpe.
        shape: amounts over the depth: slope (9 settings), curve (2 numbers), free (a number per block).
        minutes: end the search after so long, if ``evaluations`` do not.
        engine: for speedup: the engine to be fast on, as of ``vitrim bench``; of several, a list or separated by
            commas, the one that is the fastest for the dense model; default eager.
        precision: for speedup: fp32, bf16, fp16 or int8, one or several, as ``engine``: the fastest pair of both that
            there is for the dense model; default fp32. Damage is measured in fp32.
        check: at the end, score dense, constant and searched settings on these images: ``"DATA"`` or ``"DATA:SPLIT"``,
            read as ``data`` is, or a dataset.
        batch_size: images per batch.
        workers: processes that read images; 0: this one.
        out: folder for the results and ``study.jsonl``; None: nothing is written (not with ``train``).
        resume: go on from the study in ``out``; start one if there is none.
        limit: so many images only, spread evenly over the data.
        split, image_column, label_column, data_options: how the source is read.
        task: of a model for several.
        pretrained, checkpoint, model_options: as of `vitrim.loading.load`, with a name.
        device: where a named model is created, or a copy of a given one runs; default: the CPU, or where it is.
        threads: of the CPU; default: as torch chooses.
        seed: of random weights of a named model, of settings that are drawn, and of methods that draw at random.
        on_progress: called with the number of settings done, the most there can be, and a line on each that is better
            than all before.

    Returns:
        A report whose ``best`` is the setting for a target; ``results`` has the searches with all their trials,
        ``front`` the Pareto front of several targets, ``sweep`` what a grid gave. What the command writes to ``out`` is
        in ``files``.

    Raises:
        VitrimError: options that do not go together, an unknown name, a target out of reach, or data that cannot be
            read. Nothing is written then.

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
        >>> report = tune(model, "tome", dataset, target="macs=0.7", evaluations=4, batch_size=4, out=None)
        >>> report.results[0].best.share <= 0.705
        True
        >>> reduction = vitrim.reduce_(model, report.best)
    """
    given = dict(locals())
    _check_options(given)
    texts = [grid] if isinstance(grid, str) else list(grid or ())
    folder, device_name = None if out is None else Path(out), device or "cpu"
    if train is not None:
        return _train(texts, given)
    targets, configs = ([], None) if grid is not None else (_targets(target, front), _configs(methods))
    check_proxy(proxy), make_strategy(search, shape)
    names, precisions = listed(engine) or ["eager"], listed(precision) or ["fp32"]
    engines, _ = engines_named(names, precisions, select_device(device_name))
    points = None if grid is None else parse_grid(texts)
    if points is not None:
        for point in points.points(1):
            points.config(point)
        points.points(evaluations, seed)
    if folder is not None:
        check_folder(folder)

    selected = _start(device_name, threads, seed if isinstance(model, str) else None)
    processes = Processes.launched(device_name)
    loaded = load(
        model or "",
        pretrained=pretrained,
        checkpoint=checkpoint,
        model_options=dict(model_options or {}),
        device=processes.device or selected,
    )
    if not isinstance(model, str):
        if device is not None:
            loaded = loaded._replace(model=copy.deepcopy(loaded.model).to(processes.device or selected))
        device_name = str(next(loaded.model.parameters()).device)
    reading: dict[str, Any] = {"image_column": image_column, "label_column": label_column, "data_options": data_options}
    own, dataset = open_task(loaded, data, task=task, split=split, embeddings=True, **reading)
    about = {"data": _source(data), "split": dataset.split, "device": device_name, "weights": loaded.weights}
    study = None if folder is None else folder / "study.jsonl"
    if processes.index > 0:
        folder, on_progress = None, None
    size = own.eval_batch(batch_size)
    if points is not None:
        every = len(points.points(evaluations, seed))
        found = sweep(
            loaded.model, points, dataset, own, number=evaluations, limit=limit, batch_size=size, workers=workers,
            seed=seed, study=study, resume=resume, about=about, processes=processes,
            on_point=None if on_progress is None else lambda done: on_progress(done, every, ""),
        )  # fmt: skip
        return _report_sweep(found, {"model": loaded.name, **about, "grid": texts}, folder)

    if configs is None:
        configs = training_free(loaded.model, counted=targets[0].kind == "speedup")
        configs = [one for one in configs if all(each.obstacle(one, size) is None for each in engines)]
    held_out = None if check is None else _open_check(check, loaded, data, dataset, {"task": task, **reading})
    images = DatasetImages(dataset, max((limit or IMAGES) // 3, 1), size, workers=workers, collate=own.collate)
    tried = EVALUATIONS if evaluations is None else evaluations
    how: SearchOptions = {
        "task": own, "proxy": proxy, "evaluations": tried, "strategy": search, "shape": shape, "engine": names,
        "precision": precisions,
        "seconds": None if minutes is None else 60.0 * minutes,
        "study": study, "resume": resume, "about": about, "processes": processes, "seed": seed,
        "on_trial": None if on_progress is None else _improvements(on_progress, tried * len(targets), proxy),
    }  # fmt: skip
    if on_progress is not None:  # costs are measured before the first setting is scored, and that may take minutes
        on_progress(0, tried * len(targets), "")
    with quiet():
        searches = Searches(loaded.model, configs, images, targets, how)
        results = searches.run()
        several = ParetoFront.of(results, searches.evaluator) if front is not None else None
    facts = {
        "model": loaded.name,
        "environment": environment(device=device_name, dtype="float32", seed=seed),
        "processes": processes.count,
    }
    report = _report_searches(results, several, facts, loaded.model, folder)
    if held_out is not None and processes.index == 0:
        _check_held_out(report, held_out, loaded.model, given, folder)
    return report


def _check_options(given: Mapping[str, Any]) -> None:
    """Refuse options that do not go together, or have no effect.

    Raises:
        VitrimError: in one line.
    """
    model, methods, train = given["model"], given["methods"], given["train"]
    for name, least in {"evaluations": 1, "batch_size": 1, "limit": 1, "workers": 0}.items():
        check_whole(**{name: (given[name], least)})
    aims = [f"--{name}" for name in ("target", "front", "grid") if given[name] is not None]
    if train is not None and aims != ["--grid"]:
        raise VitrimError("--train RECIPE trains the points of a grid: give --grid with it, and nothing else to aim at")
    if len(aims) != 1:
        found = " and ".join(aims) or "none"
        raise VitrimError(f"give one of --target, --front and --grid, got {found}; e.g. --target macs=0.5")
    if (model is None) != (train is not None):
        name = model if isinstance(model, str) else type(model).__name__
        raise VitrimError("MODEL is missing" if train is None else f"the recipe names the model: leave out '{name}'")
    if (methods is None) != (aims == ["--grid"]):
        raise VitrimError(
            "name the method in --grid" if methods else "-m METHOD is missing: say what to tune, e.g. tome"
        )
    defaults = inspect.signature(tune).parameters

    def refuse(what: str, *names: str) -> None:
        changed = [name for name in names if given[name] not in (defaults[name].default, {}, [])]
        singular = (name.removesuffix("s") if name.endswith("_options") else name for name in changed)
        options = [f"--{name}".replace("_", "-") for name in singular]
        if options:
            verb, rest = ("is", "it") if len(options) == 1 else ("are", "them")
            raise VitrimError(f"{', '.join(options)} {verb} {what}: leave {rest} out")

    if aims == ["--grid"]:
        names = ("engine", "precision", "check", "minutes", "shape", "proxy", "search")
        refuse("for a search with --target or --front", *names)
    if train is not None:
        refuse(
            "not for --train, whose recipe says how the model is made and the data are read",
            *("pretrained", "checkpoint", "model_options", "limit", "split", "image_column", "label_column"),
            *("data_options", "task", "batch_size"),
        )
        kind, colon, _ = str(given["device"] or "cpu").partition(":")
        if colon:
            raise VitrimError(
                f"--device {given['device']} names one of several devices, and with --train accelerate chooses it: "
                f"write --device {kind}"
            )


def _targets(target: Target | str | None, front: str | Sequence[Target | str] | None) -> list[Target]:
    """The targets of a search."""
    if front is None:
        return [target if isinstance(target, Target) else Target.parse(target or "")]
    if not isinstance(front, str):
        found = [one if isinstance(one, Target) else Target.parse(one) for one in front]
    else:
        kind, equals, values = front.partition("=")
        equals = "" if "," in kind else equals
        texts = (values if equals else front).split(",")
        wrong = next((text for text in texts if "=" in text or not text.strip()), None)
        if wrong is not None:
            raise VitrimError(
                f"cannot read '{wrong}' of --front '{front}': write values of one kind, e.g. 0.35,0.5 or "
                "speedup=1.2,1.5"
            )
        found = [Target.parse(f"{kind if equals else 'macs'}={text.strip()}") for text in texts]
    if len({one.value for one in found}) < len(found):
        given = front if isinstance(front, str) else ", ".join(map(str, found))
        raise VitrimError(f"--front {given} has a target twice")
    return of_one_kind(found)


def _configs(methods: Methods | None) -> list[MethodConfig] | None:
    """The methods; None for all that need no training.

    Raises:
        VitrimError: an unknown one, one that is given twice, or others beside all.
    """
    given = methods if isinstance(methods, list | tuple) else [methods]
    if "all" in given:
        if len(given) > 1:
            raise VitrimError("-m all has the other methods already: leave them out")
        return None
    configs = parse_methods(methods)
    if not configs:
        raise VitrimError("there is nothing to tune: name at least one method")
    return configs


def _start(device: str, threads: int | None, seed: int | None) -> torch.device:
    """The device, after the threads and the seed of random weights are set."""
    selected = select_device(device)
    set_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)
    return selected


def _improvements(on_progress: Progress, most: int, proxy: str) -> Callable[[Trial], None]:
    """A callback that counts finished trials, and says which are better than all before."""
    done, best = 0, float("inf")

    def finished(trial: Trial) -> None:
        nonlocal done, best
        done, score = done + 1, trial.scores[proxy]
        if trial.number == 0:  # another method, or another target
            best = float("inf")
        better, best = score < best, min(score, best)
        text = f"{proxy} {score:.4g} at {saving(trial.share)} % saved: {trial.config.describe()} ({trial.source})"
        on_progress(done, most, text if better else "")

    return finished


# ---- images ----------------------------------------------------------------------------------------------------------


def _source(data: Any) -> str:
    return str(data) if isinstance(data, str | Path) else str(data.source)


@dataclass(frozen=True)
class HeldOut:
    """Images to score what a search returns on.

    Attributes:
        task: of the model.
        dataset: the images, with their labels.
        source: where they are from.
        same: whether the search read them too.
    """

    task: Task
    dataset: Any
    source: str
    same: bool


def _open_check(check: Any, loaded: Loaded, data: Any, searched: Any, reading: Mapping[str, Any]) -> HeldOut:
    """Open a dataset, ``SOURCE`` or ``SOURCE:SPLIT``.

    Args:
        check: what is opened.
        loaded: the model.
        data, searched: what the search reads, as it was given and as it was opened.
        reading: the other arguments of `open_task`.
    """
    if not isinstance(check, str | Path):
        task, dataset = open_task(loaded, check, embeddings=True, **reading)
        return HeldOut(task, dataset, dataset.source, check is data)
    source, _, split = str(check).rpartition(":")
    if not source or "/" in split or "\\" in split:  # the colon of a path, or none
        source, split = str(check), ""
    task, dataset = open_task(loaded, source, split=split or None, embeddings=True, **reading)
    same = Path(source).resolve() == Path(_source(data)).resolve() and dataset.split == searched.split
    return HeldOut(task, dataset, str(check), same)


# ---- reports ---------------------------------------------------------------------------------------------------------


def _report_searches(
    results: Sequence[Result],
    front: ParetoFront | None,
    facts: Mapping[str, Any],
    model: nn.Module,
    folder: Path | None,
) -> TuneReport:
    """The findings of searches, after they are written to the folder and drawn there."""
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
    report = TuneReport("tune --front", {**facts, "tuned": front.about}, front.rows(), [front.table()], front.notes())
    report.results, report.front = results, front
    if folder is not None:
        files = front.save(folder)
        report.files += [*files, folder / "front.json"]
        report.notes.append(f"use them as {', '.join(f'-m @{file}' for file in files)}")
        if _can_draw():
            from vitrim.plots.tuning import plot_front

            proxy, unit = results[0].proxy, results[0].cost.unit
            points = [(one.setting, one.share, one.scores[proxy]) for one in front.points]
            steps = [(one.share, one.scores[proxy]) for one in front.points if one.on_front]
            cost = "MACs" if unit == "macs" else unit
            plot_front(points, folder / "front.png", front=steps, cost=cost, damage=proxy)
            _say_picture(report, folder / "front.png")
        for result, file in zip(results, files, strict=True):
            _draw_schedule(report, result, model, file.with_suffix(".png"))
    return report


def _draw_schedule(report: TuneReport, result: Result, model: nn.Module, file: Path) -> None:
    """Draw the tokens per block of the searched setting against the constant one, unless they follow from images."""
    spaces = {f"{name}: {trial.config.name}": (Space.of(model, trial.config), trial) for name, trial in result.pair}
    counts = {name: space.counts(trial.config) for name, (space, trial) in spaces.items()}
    if not _can_draw() or None in counts.values():
        return
    from vitrim.plots.tuning import plot_schedule

    patches = next(iter(spaces.values()))[0].patches
    plot_schedule({name: each or [] for name, each in counts.items()}, patches, file, title=str(result.target))
    _say_picture(report, file)


def _check_held_out(
    report: TuneReport, held_out: HeldOut, model: nn.Module, given: Mapping[str, Any], folder: Path | None
) -> None:
    """Score the dense model and the settings that were found on images that the search did not read."""
    trials = [trial for result in report.results for _, trial in result.pair]
    configs = list({trial.config.describe(): trial.config for trial in trials}.values())
    task = held_out.task
    size, workers = task.eval_batch(given["batch_size"]), given["workers"]
    batches = read(held_out.dataset, size, workers=workers, collate=task.collate)
    rows = run(model, configs, batches, standard_probes(task), task=task, seed=given["seed"])
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


def _train(texts: Sequence[str], given: Mapping[str, Any]) -> TuneReport:
    """Train a recipe at the points of a grid."""
    from vitrim.training.loop import Running

    recipe, data, out, device = given["train"], given["data"], given["out"], given["device"] or "cpu"
    if out is None or not isinstance(data, str):
        raise VitrimError("training at the points of a grid needs a folder, out, and the source of its data")
    grid, folder, on_progress = parse_grid(texts, recipe=True), Path(out), given["on_progress"]
    number, seed = given["evaluations"], given["seed"]
    most = len(grid.points(number, seed))
    check_folder(folder)
    _start(device, given["threads"], seed)
    found = train_sweep(
        recipe, grid, data, Running(folder, resume=given["resume"], workers=given["workers"]),
        number=number, seed=seed, cpu=device == "cpu",
        on_point=None if on_progress is None else lambda done: on_progress(done, most, ""),
    )  # fmt: skip
    first = Processes.launched(device).index == 0
    return _report_sweep(found, {"train": recipe, "data": data, "grid": list(texts)}, folder if first else None)


def _report_sweep(found: SweepResult, about: Mapping[str, Any], folder: Path | None) -> TuneReport:
    """The findings of a grid, after they are written to the folder and drawn there."""
    table, best = found.table(), found.best()
    kept = "that no other dominates" if "share" in best[0] else f"best {found.metric} first"
    note = f"in %; {len(table.rows)} of {len(found.rows)} points, {kept}"
    report = TuneReport("tune --grid", {**about, "metric": found.metric}, found.rows, [table], [note], sweep=found)
    if folder is not None:
        report.files += found.save(folder, about)
        report.notes[0] += f"; all of them: {', '.join(map(str, report.files))}"
        heat = found.heat()
        if heat is not None and _can_draw():
            from vitrim.plots.tuning import plot_heat

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
