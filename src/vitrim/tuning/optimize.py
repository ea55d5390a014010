"""`optimize`, the function of ``vitrim optimize``: find the fastest file for a model on this machine, and its loss.

    model = vitrim.create_model("deit_small_patch16_224", pretrained=True)
    report = vitrim.optimize(model, "imagenet:ROOT", max_loss=1.0)
    report.file.run(images), report.sentence

The images are split into thirds. On the first, methods and schedules race: their damage there determines how much each
may remove. On the second, the fastest are scored as files of the fastest engine, and one is chosen. On the third, only
the chosen file is scored; the sentence of the report states that loss.

The race is in `vitrim.tuning.optimize_race`; here are the steps around it: check, open, publish.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from vitrim import style
from vitrim.checked import Positive, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.registry import parse_method, parse_methods
from vitrim.core.saving import entries
from vitrim.data import to_tensor
from vitrim.engines.copies import reduced_copy
from vitrim.engines.engine import Engine, engines_named, listed
from vitrim.engines.exported import Exported, sidecar, staged, weights_beside
from vitrim.engines.formats import formats
from vitrim.engines.machine import environment, seeded_draws
from vitrim.engines.static import can_freeze
from vitrim.errors import UnsupportedModelError, VitrimError
from vitrim.files import check_folder, json_text, write_text
from vitrim.loading import Loaded, ModelSpec
from vitrim.measure.compare import SCORED_ON_ENGINES
from vitrim.measure.evaluation_report import doubts
from vitrim.measure.identity import identity, made_for
from vitrim.measure.inputs import (
    EMBEDDING,
    JUDGED,
    DataSpec,
    JudgedData,
    at_all_sizes,
    check_own_transform,
    open_images,
    task_name,
)
from vitrim.measure.neighbours import NeighbourLoss
from vitrim.measure.probes import PairedLoss
from vitrim.measure.store import Store
from vitrim.measure.task_data import num_classes, open_task
from vitrim.models.references import trained_on
from vitrim.report import Report
from vitrim.results import FileResults, Results
from vitrim.tasks import Task, make_task
from vitrim.tuning.optimize_race import SEARCHED_AT, Candidate, Race
from vitrim.tuning.optimize_report import draw, in_words, meaning, table
from vitrim.tuning.proxy import DatasetImages, Third
from vitrim.tuning.space import Space, quiet

SMALLEST, LARGEST = 0.7, 1.15
"""Image sizes to try, as shares of the model's own."""

IMAGES = 3 * 512
"""Default limit of images: 512 each for racing, choosing and checking."""


@dataclass(repr=False)
class OptimizeReport(Report):
    """The findings of `optimize`.

    Attributes:
        best: its method; None for the dense model, if reducing does not pay.
        img_size: side of its images, if it is not that of the model.
        sentence: its gain and loss.
    """

    file: Exported = field(kw_only=True)
    best: MethodConfig | None = None
    img_size: int | None = None
    sentence: str = ""

    @property
    def figure(self) -> Any:
        """A matplotlib figure of loss over milliseconds: dense on every engine, and every timed setting."""
        return draw(self.rows, self.facts)

    def parts(self) -> Iterator[Any]:
        yield from self.tables
        yield from self.notes
        yield self.sentence


@checked_call
def optimize(
    model: nn.Module | str | ModelSpec,
    images: Any,
    *,
    max_loss: float | None = None,
    speedup: float | None = None,
    batch_size: Positive = 1,
    methods: MethodConfig | str | Sequence[MethodConfig | str] | None = None,
    engine: str | Sequence[str] | None = None,
    precision: str | Sequence[str] | None = None,
    out: str | Path | Results = "optimized",
    on_progress: Callable[[str], None] | None = None,
) -> OptimizeReport:
    """Find the fastest file for a model on this machine: engine, precision, image size, method and schedule.

    The dense model is timed on every engine in every precision; methods and schedules race on the fastest pair whose
    own loss is within the bound, the best of them at other image sizes, too. If reducing does not pay there, the result
    is the dense file, and the report says so. Methods whose counts depend on the images race frozen (`vitrim.freeze`).

    Args:
        model: a dense classifier, or a tower that returns an embedding; a module is not changed. Or its name as on the
            command line, or a `vitrim.ModelSpec`, whose ``img_sizes`` are those to try beside the model's own: its own
            alone for no others, none for all from 0.7 to 1.15 of it in steps of a patch.
        images: a source, as for ``--images``, a dataset, or a `vitrim.JudgedData`, whose ``limit`` defaults to 1,536.
            They are split into thirds (see the module); the reported loss is of the last third. With ``labels``, the
            loss is of top-1, otherwise of agreement with the dense model. For a tower, labels say which images belong
            together, and the loss is of recall@1, otherwise of the dense model's nearest neighbours. ``few`` accepts
            too few images to show that a loss is within ``max_loss``.
        max_loss: points of top-1, or of agreement, that may be lost; default 1.0. The expected loss of top-1 is
            estimated from the divergence from the dense model (`vitrim.tuning.optimize_race.Race.expected`).
        speedup: instead of ``max_loss``: minimise the loss at this speed relative to the fastest dense model.
        batch_size: images per batch; the only batch size of the file.
        methods: one or several, configs or text; None for all that need no training and have a fixed graph, or get one
            frozen.
        engine: file engines of `vitrim.bench`: onnxruntime, openvino, torch.export, aoti; None for the installed ones
            of the first two, else torch.export.
        precision: fp32, bf16, int8; None for those that the engines support here.
        out: folder for the file, ``best.json``, ``report.json``, ``loss_over_time.png`` and ``study.jsonl``, or a
            `vitrim.FileResults`, whose ``resume`` reuses the measurements, and whose ``preprocess`` makes a file of
            raw images.
        on_progress: called often with a short text on the current step.

    Returns:
        A report with the ``file``, its method as ``best``, its ``img_size`` and the ``sentence``. Its rows are all that
        was timed: ``method, engine, precision, p50_ms, speedup, speedup_q1, speedup_q3`` (for dense models over PyTorch
        in fp32, for methods over the dense model on their engine), ``saved`` (share of the MACs), ``loss`` and
        ``loss_error`` (shares), ``scored_on`` (search, selection or check) and ``images``. Methods are timed in a
        separate run beside the dense file: to make all times comparable, their ``p50_ms`` is that of the dense file
        over their speed-up; ``own_p50_ms`` is the time in that run. Rows at other sizes are named so ("dense at 208
        px") and have ``img_size``.

    Raises:
        VitrimError: an invalid option, a model that file engines cannot run, data that cannot be read, fewer than 30
            images or too few to show ``max_loss``, or measurements of another search; nothing is written.
    """
    spec, source, results = ModelSpec.of(model), JudgedData.of(images), FileResults.of(out)
    bound = _bound(max_loss, speedup)
    engines, lacking = _engines(engine, precision)
    wanted = None if methods is None else parse_methods(methods)
    folder, seed, tell = Path(results.folder or "optimized"), spec.seed or 0, on_progress or (lambda _: None)
    check_folder(folder)
    with seeded_draws(torch.device("cpu"), seed), quiet():
        inputs = _open(spec, source, wanted, engines[0], batch_size, None if source.few or speedup else bound)
        facts = {
            "model": inputs.loaded.name,
            "weights": inputs.loaded.weights,
            "environment": environment(dtype=",".join(dict.fromkeys(one.precision for one in engines)), seed=seed),
            **inputs.facts,
            "bound": {"max_loss": bound} if speedup is None else {"speedup": speedup},
            "batch_size": batch_size,
            "engines": [str(one) for one in engines],
        }
        shown = can_show(inputs.thirds.count("check"))
        facts["doubts"] = _doubts(inputs, facts)
        notes = [*facts["doubts"], *_embedding_note(inputs, facts), *lacking, *inputs.notes, shown]
        tell(shown)
        if speedup is None:
            _check_count(bound, inputs.thirds.count("check"), few=source.few)
        store = _store(folder, facts, inputs, wanted, results)
        race = Race(
            inputs.model, inputs.task, inputs.loss, inputs.thirds, engines, batch_size, store, folder / "files", tell,
            others={one.side: one.model for one in inputs.others}, images_at=inputs.images_at,
        )  # fmt: skip
        race.check_dense()
        race.score(wanted)
        dense = race.dense(bound / 100)
        race.score_sizes(dense, bound / 100, speedup)
        chosen = race.reduced(dense, bound / 100, speedup)
        if results.preprocess:
            race.take_bytes(chosen or dense, inputs.dataset)
            notes.append("the file takes uint8 images (batch, height, width, 3); its time is that without normalising")
        score = race.check(dense, chosen)
        return _publish(race, dense, chosen, score, folder, facts, notes)


# ---- check -----------------------------------------------------------------------------------------------------------


def _bound(max_loss: float | None, speedup: float | None) -> float:
    """The allowed loss in points; `VitrimError` for invalid bounds."""
    if max_loss is not None and speedup is not None:
        raise VitrimError("give max_loss or speedup, not both: one is the bound, and the other is made best")
    bound = 1.0 if max_loss is None else max_loss
    if not isinstance(bound, int | float) or not 0.0 <= bound <= 100.0:
        raise VitrimError(f"max_loss={max_loss} must be from 0 to 100 points")
    if speedup is not None and not (isinstance(speedup, int | float) and 1.0 < speedup < 1000.0):
        raise VitrimError(f"speedup={speedup} must be above 1, over the fastest dense model")
    return bound


def _engines(
    engine: str | Sequence[str] | None, precision: str | Sequence[str] | None
) -> tuple[list[Engine], list[str]]:
    """The file engines to choose from, and notes on what they lack; raise `VitrimError` for other engines."""
    given, precisions = listed(engine), listed(precision)
    of_files = {kind.engine: kind for kind in formats().values()}
    wrong = next((name for name in given if name not in of_files), None)
    if wrong is not None:
        raise VitrimError(f"engine {wrong} runs no files; valid: {', '.join(sorted(of_files))}")
    if not given:
        given = [name for name in ("onnxruntime", "openvino") if of_files[name].missing() is None] or ["torch.export"]
    notes: list[str] = []
    if not precisions:
        quantiser = importlib.util.find_spec("nncf") is not None
        precisions = ["fp32", "bf16", *(["int8"] if quantiser else [])]
        if not quantiser:
            notes.append("int8 is not tried: it needs nncf (pip install '.[int8]')")
    found, lacking = engines_named(given, precisions)
    return found, [*notes, *lacking]


# ---- open ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """A model to optimize, its task, and its images.

    Attributes:
        thirds: the images for the search, the selection and the check.
        others: the model at other image sizes.
        notes: why there are none.
    """

    loaded: Loaded
    task: Task
    source: JudgedData
    dataset: Any
    thirds: DatasetImages
    others: Sequence[Loaded] = ()
    notes: Sequence[str] = ()

    def images_at(self, sizes: Sequence[int]) -> DatasetImages:
        """The same images, in the same thirds, also at other sizes."""
        dataset = copy.copy(self.dataset)
        dataset.transform = at_all_sizes(dataset.transform, [one for one in self.others if one.side in sizes])
        return _thirds(dataset, self.source, self.task)

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def loss(self) -> PairedLoss | NeighbourLoss:
        """The probe of the loss."""
        if self.task.name == EMBEDDING:
            return NeighbourLoss(labelled=self.source.labels)
        return PairedLoss(self.task, labels=self.source.labels and self.task.selects_by == "top1")

    @property
    def facts(self) -> dict[str, Any]:
        """Entries of the report about the images and the task."""
        return {
            "source": self.source.name(self.dataset),
            "split": self.dataset.split,
            "images": {part: self.thirds.count(part) for part in get_args(Third)},
            "labels": self.source.labels,
            "task": self.task.name,
            "img_sizes": [one.side for one in self.others],
            **({"embedding": self.loaded.embedding_name} if self.task.name == EMBEDDING else {}),
        }


def _open(
    spec: ModelSpec,
    source: JudgedData,
    wanted: Sequence[MethodConfig] | None,
    engine: Engine,
    batch_size: int,
    to_show: float | None,
) -> Inputs:
    """Load the model and open the images; `VitrimError` if they, or a ``wanted`` method, do not fit.

    ``to_show`` is the loss that they have to show.
    """
    loaded, others = spec.load_sizes("cpu")
    model = loaded.model
    if spec.named:
        for one in (loaded, *others):
            one.model.float().eval()
    like = next(model.parameters())
    if like.device.type != "cpu" or like.dtype != torch.float32:
        kind = str(like.dtype).removeprefix("torch.")
        raise VitrimError(f"the model is {kind} on {like.device}: give it in float32 on the CPU, where files run")
    read = DataSpec(source.source, **source.columns, options=source.options)
    if source.labels:
        task, dataset = open_task(loaded, read, embeddings=True)
    else:
        tower = task_name(loaded) == EMBEDDING
        task = make_task(EMBEDDING, 0) if tower else make_task("classification", num_classes(loaded))
        dataset = open_images(model, read)
    if task.name not in SCORED_ON_ENGINES:
        raise VitrimError(f"files are optimized for models of {', '.join(SCORED_ON_ENGINES)}, not {task.name}")
    if len(dataset) < JUDGED:
        wanted_loss = f"give {_enough(to_show)}, to show a loss of {_points(to_show)}; " if to_show else ""
        least = f"{'with --few-images (few=True) ' if to_show else ''}{JUDGED} are needed, ten for each third"
        raise VitrimError(f"{dataset.source} has {len(dataset)} images: {wanted_loss}{least}")
    for config in wanted or ():
        if not config.traits.training_free:
            raise VitrimError(
                f"{config.name} learns parameters, which would be random here: name methods that need no training"
            )
        if (why := engine.obstacle(config, batch_size)) is not None and not can_freeze(config):
            raise VitrimError(f"{config.describe()} does not run on {engine}: {why}")
        Space.of(model, config)
        reduced_copy(model, config)
    thirds = _thirds(dataset, source, task)
    if task.name == EMBEDDING:
        _check_tower(model, task, thirds)
    notes: list[str] = []
    fixed = not read.by_name and source.source.transform is not to_tensor
    if others and fixed:
        check_own_transform(dataset, others)
    if fixed:
        notes = [f"no other image sizes are tried: {dataset.source} has a transform of its own"]
    elif not spec.img_sizes:
        try:
            others = loaded.at_sizes(sizes_around(loaded))
        except UnsupportedModelError as error:  # a model of one size is none to refuse
            notes = [f"no other image sizes are tried: {error}"]
    return Inputs(loaded, task, source, dataset, thirds, others, notes)


def _thirds(dataset: Any, source: JudgedData, task: Task) -> DatasetImages:
    return DatasetImages(dataset, (source.limit or IMAGES) // 3, SEARCHED_AT, collate=task.collate)


def sizes_around(loaded: Loaded) -> list[int]:
    """Image sizes from `SMALLEST` to `LARGEST` of the model's own, in steps of a patch.

    Example:
        >>> sizes_around(ModelSpec("vit_tiny_patch16_224").load("meta"))
        [160, 176, 192, 208, 240, 256]
    """
    patch, side = max(loaded.library.layout(loaded.model).patch_size), loaded.side
    sizes = range(patch, int(LARGEST * side) + 1, patch)
    return [size for size in sizes if size >= SMALLEST * side and size != side]


def _check_tower(model: nn.Module, task: Task, images: DatasetImages) -> None:
    """Refuse a model without a classifier whose file would not return its embedding."""
    if hasattr(model, "get_image_features"):
        raise VitrimError(
            f"{type(model).__name__} has a tower for text, too, and a file takes images alone: take its image tower, "
            "e.g. ...VisionModelWithProjection of transformers"
        )
    with torch.no_grad():
        task.predict(model, next(images.batches("search", 0, 1)).images)


def _doubts(inputs: Inputs, facts: Mapping[str, Any]) -> list[str]:
    """Reasons to doubt the numbers; warn of them before hours of work."""
    if not inputs.source.labels:
        return []
    given = {**facts, "untrained": [], "data": {"classes": inputs.dataset.num_classes}}
    found = doubts(given, inputs.task, "only agreement says") + trained_on(inputs.loaded.name, inputs.dataset)
    for doubt in found:
        warnings.warn(f"{doubt}; --no-labels compares with the dense model alone", stacklevel=3)
    return found


def _embedding_note(inputs: Inputs, facts: Mapping[str, Any]) -> list[str]:
    if inputs.task.name != EMBEDDING:
        return []
    return [f"the embedding: {facts['embedding']}; neighbours are looked for within each third"]


def can_show(count: int) -> str:
    """A sentence on the loss that a number of images can detect.

    By the rule of three, a change in none of n images is below 3/n, at 95 %.

    Example:
        >>> can_show(500)
        'the loss is that of 500 images: one that none of them shows is below 0.6 points (at 95 %)'
    """
    return (
        f"the loss is that of {count} images: one that none of them shows is below {300 / count:.1f} points (at 95 %)"
    )


def _check_count(bound: float, count: int, *, few: bool) -> None:
    """Refuse, or with ``few`` warn of, a number of images that cannot show a loss of ``bound`` points."""
    why = cannot_show(bound, count)
    if why is None:
        return
    if not few:
        raise VitrimError(f"{why}, or go on with --few-images (few=True)")
    warnings.warn(why, stacklevel=3)


def cannot_show(bound: float, count: int) -> str | None:
    """A sentence on a loss of ``bound`` points that a number of images cannot detect; None if they can.

    Example:
        >>> cannot_show(1.0, 32)  # doctest: +NORMALIZE_WHITESPACE
        'a loss of 1 point cannot be seen on 32 images: even where none of them changes it is only known to be below 9.4
        points (at 95 %); give 900 images, 300 for each third, allow more with --max-loss'
        >>> cannot_show(1.0, 300) is None
        True
    """
    if bound * count >= 300:
        return None
    more = f"give {_enough(bound)}, " if bound else ""
    return (
        f"a loss of {_points(bound)} cannot be seen on {count} images: even where none of them changes it is only "
        f"known to be below {300 / count:.1f} points (at 95 %); {more}allow more with --max-loss"
    )


def _points(bound: float) -> str:
    return f"{bound:g} point{'' if bound == 1 else 's'}"


def _enough(bound: float) -> str:
    """As many images as can show a loss of ``bound`` points, in words."""
    each = math.ceil(300 / bound)
    return f"{3 * each:,} images, {each:,} for each third"


def _store(
    folder: Path,
    facts: Mapping[str, Any],
    inputs: Inputs,
    wanted: Sequence[MethodConfig] | None,
    results: FileResults,
) -> Store:
    """The measurements of the search, the first file that is written."""
    settings = {
        **facts,
        "content": identity(inputs.model, inputs.task, inputs.dataset),
        "methods": None if wanted is None else [one.describe() for one in wanted],
        **({"preprocess": True} if results.preprocess else {}),
    }
    return Store(folder / "study.jsonl", settings, resume=results.resume)


# ---- publish ---------------------------------------------------------------------------------------------------------


def _publish(
    race: Race,
    dense: Candidate,
    chosen: Candidate | None,
    score: Mapping[str, float],
    folder: Path,
    facts: Mapping[str, Any],
    notes: Sequence[str],
) -> OptimizeReport:
    """Write the file to the folder, ``best.json``, the report and its figure."""
    best = chosen or dense
    sentence = in_words(race, dense, chosen, score, facts["bound"].get("speedup"))
    rows = [*race.rows, {**best.row, **score, "scored_on": "check"}]
    (config, size), made = best.setting, race.ready(best.setting, best.engine)
    assert isinstance(made, Exported)
    path = _copy_file(made.path, folder)
    report = OptimizeReport(
        "optimize",
        {**facts, "sentence": sentence, "chosen": best.name, "engine": str(best.engine), "img_size": size},
        rows,
        [table(rows)],
        [*meaning(dense.engine), *notes, f"the file: {path}; it takes {' x '.join(map(str, made.shape))}"],
        [path, *(file for file in (sidecar(path), *weights_beside(path)) if file.is_file())],
        file=Exported.open(path, trust=True),
        best=config,
        img_size=size,
        sentence=sentence,
    )
    content = entries(config or parse_method("none"), {"made_for": made_for(race.at(size)), **report.facts})
    write_text(folder / "best.json", json_text(content, indent=2) + "\n")
    report.save(folder / "report.json")
    report.files += [folder / "best.json", folder / "report.json"]
    if importlib.util.find_spec("matplotlib") is not None:
        style.save(report.figure, folder / "loss_over_time.png")
        report.files.append(folder / "loss_over_time.png")
    shutil.rmtree(race.folder, ignore_errors=True)
    return report


def _copy_file(made: Path, folder: Path) -> Path:
    """Copy an exported file, its weights and its metadata to a folder, as ``model``."""
    path = folder / f"model{made.suffix}"
    with staged(path) as place:
        for file in (made, *weights_beside(made)):
            if file.is_file():
                shutil.copyfile(file, place.with_name(file.name.replace(made.stem, place.stem)))
        sidecar(place).write_text(json_text(Exported.open(made).metadata, indent=2) + "\n", encoding="utf-8")
    return path
