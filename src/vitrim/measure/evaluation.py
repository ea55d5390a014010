"""Accuracy of reduced models compared with the dense model, in one pass over the data: ``vitrim eval``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrim.checked import Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.data import DataError
from vitrim.engines.copies import apart
from vitrim.engines.exported import Exported
from vitrim.engines.machine import environment, seeded_draws
from vitrim.errors import VitrimError, check_known, one_line_errors
from vitrim.files import check_folder
from vitrim.loading import Loaded, ScoredModel
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.decisions import DecisionsProbe, save_decisions
from vitrim.measure.evaluation_report import evaluation_report
from vitrim.measure.identity import identity
from vitrim.measure.in_files import AnyModel, MethodsAndFiles, check_alike, file_words, load, parted, place_of, size_of
from vitrim.measure.inputs import EMBEDDING, RETRIEVAL, PageData, ScoredData, task_name, untrained_methods
from vitrim.measure.neighbours import Neighbours
from vitrim.measure.predictions import check_predictions, save_predictions
from vitrim.measure.probes import (
    Agreement,
    MacsProbe,
    PairedAP,
    PairedIoU,
    PairedLoss,
    Predictions,
    Probe,
    TaskMetrics,
    Tokens,
)
from vitrim.measure.records import Processes, Row, read
from vitrim.measure.retrieval import evaluate_pages
from vitrim.measure.run import Findings, Measurement, Partial
from vitrim.measure.task_data import DATASETS, data_facts, open_task, task_of
from vitrim.models.references import trained_on
from vitrim.report import Report
from vitrim.results import Results, ScoredResults
from vitrim.tasks import Task

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names on the command line, and torch's."""


def standard_probes(task: Task) -> list[Probe]:
    """The probes of an evaluation: the task's metrics (of embeddings, `Neighbours`), agreement, MACs and tokens."""
    if task.name == EMBEDDING:
        return [Agreement(task), Neighbours(), MacsProbe(), Tokens()]
    return [TaskMetrics(task), Agreement(task), MacsProbe(), Tokens()]


def paired_probes(task: Task) -> list[Probe]:
    """The probe of the loss's standard error, if the `standard_probes` have none; boxes need pycocotools.

    Example:
        >>> from vitrim.tasks import make_task
        >>> [type(probe).__name__ for probe in paired_probes(make_task("segmentation", 10))]
        ['PairedIoU']
    """
    if task.selects_by == "top1":
        return [PairedLoss(task, labels=True)]
    if task.selects_by == "mIoU":
        return [PairedIoU(task)]
    if task.name == EMBEDDING:
        return []
    return [PairedAP(task)] if task.several or importlib.util.find_spec("pycocotools") is not None else []


@checked_call
def evaluate(
    model: AnyModel,
    methods: MethodsAndFiles,
    data: Any,
    *,
    out: str | Path | Results | None = None,
    seed: Seed = 0,
    on_progress: Callable[[int, int | None], None] | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Report:
    """Evaluate reduced models and the dense model: accuracy, agreement, cosine, MACs, tokens.

    All methods see the same batches, in one pass over the data. Processes of ``accelerate launch`` share the batches,
    and all return the same rows.

    Args:
        model: a module, which is not changed, a name as on the command line, a `vitrim.ScoredModel` or a
            `vitrim.Exported` file. A reduced module is evaluated beside its dense self.
        methods: one or several, configs or text such as ``"tome:r=13"``; None for the dense model and, if the model is
            reduced, its own reduction. Exported files among them are scored on the same images.
        data: a source or a dataset, see `vitrim.open_data`, or a `vitrim.ScoredData`. Or batches, read once: pairs of
            images (B, C, H, W) and targets, which are labels (B,) for classification, and (B, K) of 0 and 1 for several
            labels per image. With batches, the task of a `vitrim.ScoredData` may be multilabel or a `Task`. For a
            retriever of pages a table with queries, or a `vitrim.PageData`.
        out: folder that stores intermediate results every half minute, or `vitrim.ScoredResults`, which can also
            request the ``decisions`` (`vitrim.measure.decisions.Decisions`) and a classifier's ``predictions``: a row
            per image with its index, file, label, and every model's class and probability.
        seed: seed of random weights and of methods that draw at random; the global generators do not change.
        on_progress: called after every batch with the number of images this process has seen, and its total or None.
        on_report: called with the partial report if the pass is interrupted, also by Ctrl-C, before the exception.

    Returns:
        A report with a row per model, the dense model first: ``model, method, images``; the metrics of the task, shares
            in [0, 1], such as ``top1``; ``agreement``, ``cosine``, ``gmacs``, ``gmacs_images``, ``tokens_per_block``,
            ``tokens_at_end`` (see `vitrim.measure.probes`), ``saved`` (share of the dense MACs), for tasks with scores
            by class ``classes``, and ``loss_error``, the standard error of the change against dense on the same images
            (for boxes only with pycocotools); with top-1 also ``loss`` and ``kl``, the divergence from the dense model.
            Rows of files without the dense model in fp32 first lack what compares with it. Of a retriever: ``images``
            (pages), ``queries``, ``ndcg5``, ``vectors`` and their ``bytes`` per page, ``loss`` and ``loss_error`` (over
            queries), see `vitrim.measure.retrieval`. Its ``record`` is the output of ``vitrim eval --json``.

    Raises:
        VitrimError: a model or method that is unknown or does not fit; data that cannot be read, is empty or has other
            classes; invalid targets; outputs that are not finite; too little memory.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", num_classes=3)
        >>> batches = [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))]
        >>> [(row["method"], row["tokens_per_block"][0]) for row in evaluate(model, "tome:r=8", batches).rows]
        [('dense', 101), ('tome:r=8', 93)]
    """
    spec, results = ScoredModel.of(model), ScoredResults.of(out)
    pages = PageData.of(data)
    configs, files = parted(methods)
    if results.predictions is not None:
        check_predictions(Path(results.predictions))
    # Checks of files and folders come before the model, whose weights may take minutes.
    device, dtype = place_of(spec), _dtype_of(spec)
    # A named model goes where accelerate puts it, unless a device was given.
    processes = Processes.launched(str(device) if spec.named or spec.device is not None else None)
    with seeded_draws(device, seed):
        loaded, others = load(spec, "cpu", configs)
        check_alike(loaded, list(files.values()), others)
        if RETRIEVAL in loaded.tasks and task_name(loaded, pages.task) == RETRIEVAL:
            if files or others or results != ScoredResults():
                raise VitrimError(
                    "pages are scored in one go, as the processor prepares them: leave files, image sizes, out, "
                    "decisions and predictions out"
                )
            return evaluate_pages(
                loaded, configs, pages, device=device, dtype=dtype, seed=seed, on_progress=on_progress
            )
        if pages.select or pages.pool_factors:
            raise VitrimError(
                f"selectors and pooling are for retrievers of pages, and {loaded.name} is none: leave them out"
            )
        images = ScoredData(**{one.name: getattr(pages, one.name) for one in fields(ScoredData)})
        task, dataset, data = _task_and_images(loaded, images, results, others)
        opened = open_models(
            [loaded, *others], task, dataset, data, configs, list(files.values()), device=processes.device or device,
            dtype=dtype, learned=spec.learned, identified=results.path is not None,
        )  # fmt: skip
    measurement = Measurement(opened.models, _probes(opened, results), opened.task, processes=processes, seed=seed)
    name = str(measurement.dtype).removeprefix("torch.")
    machine = environment(device=str(device), dtype=name, seed=seed)
    facts = {"environment": {**machine, "processes": processes.count}, **opened.facts}
    partial = None
    if results.path is not None:
        names = [one.name for one in opened.models]
        # All that decides a number: a folder of other settings is refused.
        settings = {"model": loaded.name, "methods": names, **facts, "content": opened.content}
        partial = Partial(results.path, settings, processes, resume=results.resume)
    batch_size = data["batch_size"] or images.batch_size
    short = {long: name for name, long in DTYPES.items()}.get(name, name)
    try:
        with one_line_errors(f"batch {batch_size}, {short}", kept="; what was gathered is kept"):
            follow(measurement, opened, images, on_progress, partial)
    except BaseException as error:  # keep the results, which may be hours of work, whatever stopped the pass
        problem = str(error) if isinstance(error, VitrimError) else "stopped before the end"
        report = _publish(measurement, opened, facts, partial, results, problem)
        if report.rows and processes.index == 0 and on_report is not None:
            on_report(report)
        raise
    report = _publish(measurement, opened, facts, partial, results, None)
    if not report.rows:
        raise DataError("there are no images to evaluate on")
    return report


@dataclass(frozen=True)
class Opened:
    """The models, the task and the images of an evaluation.

    Attributes:
        dataset: None for batches.
        data: facts about the images, for the record.
        models: the dense model first; files too.
        untrained: learned methods with random parameters.
        content: the `identity` of all these, if intermediate results are stored.
    """

    loaded: Loaded
    task: Task
    dataset: Any
    data: dict[str, Any]
    models: list[Contestant]
    untrained: list[str]
    content: dict[str, str]

    @property
    def facts(self) -> dict[str, Any]:
        """The entries of a record about the models, the task and the images."""
        loaded, task = self.loaded, self.task
        facts = {
            "weights": loaded.weights,
            "model_options": loaded.options,
            "untrained": self.untrained,
            "task": task.name,
            "data": self.data,
            "seen_in_training": self.seen_in_training,
        }
        if self.files:
            facts["files"] = file_words(self.files)
        return {**facts, "embedding": loaded.embedding_name} if task.name == EMBEDDING else facts

    @property
    def seen_in_training(self) -> list[str]:
        """A sentence for each run that learned from these images and is evaluated, itself or as a file made of it."""
        names = [self.loaded.name, *(str(one.metadata.get("model")) for one in self.files)]
        return [said for name in dict.fromkeys(names) for said in trained_on(name, self.dataset)]

    @property
    def files(self) -> list[Exported]:
        return [one.model for one in self.models if isinstance(one.model, Exported)]

    @property
    def without_dense(self) -> bool:
        """True for files alone, the first of which is not the dense model in fp32: nothing tells what they change."""
        first = self.models[0].model
        return isinstance(first, Exported) and (first.metadata.get("method"), first.precision) != ("none", "fp32")

    def rows(self, measurement: Measurement, findings: Findings) -> list[Row]:
        """The rows of all models, with the share of MACs that each saves, and without what is not known."""
        unknown = {name for gauge in measurement.gauges[0] for name in gauge.against_dense if self.without_dense}
        rows, sized = [], any(one.img_size is not None for one in self.models)
        for one, row in zip(self.models, findings.rows, strict=False):
            sizes = {"img_size": one.img_size or self.loaded.side} if sized else {}
            own = one.model.metadata.get("dense_gmacs") if isinstance(one.model, Exported) else None
            # Files alone know the MACs of their dense self; with a dense row, the same count serves all.
            # A share of the dense MACs: of its own dense self, or of the first row.
            base = own if self.without_dense else sum(findings.rows[0]["gmacs"].values())
            saved = 1 - sum(row["gmacs"].values()) / base if base else None
            known = {key: row[key] for key in row if key not in unknown}
            rows.append(Row(row.method, {**sizes, **known, "saved": saved}))
        return rows


def _dtype_of(spec: ScoredModel) -> torch.dtype | None:
    """The dtype as torch's; None for that of a module."""
    dtype = spec.dtype or ("fp32" if spec.named else None)
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    check_known("dtype", dtype, DTYPES)
    found: torch.dtype = getattr(torch, DTYPES[dtype])
    return found


def open_models(
    sizes: Sequence[Loaded],
    task: Task,
    dataset: Any,
    data: dict[str, Any],
    methods: Sequence[MethodConfig],
    files: list[Exported],
    *,
    device: torch.device | None,
    dtype: torch.dtype | None,
    learned: str | Path | None = None,
    identified: bool = False,
) -> Opened:
    """Reduce copies of the model at all ``sizes``, its own first, which ``files`` follow."""
    loaded, *others = sizes
    model: nn.Module | Exported = loaded.model
    models: list[Contestant] = []
    with ExitStack() as kept:
        folder: Path | None = None
        if isinstance(model, Exported):
            if dtype not in (None, torch.float32):
                raise VitrimError(f"{loaded.name} is an exported file, in a precision of its own: leave the dtype out")
            files = [model, *files]
        else:
            own = kept.enter_context(apart(model))
            methods = own.with_own(methods)
            folder = (own.learned or loaded.learned) if learned is None else Path(learned)
            how: dict[str, Any] = {"device": device, "dtype": dtype, "learned": folder}
            models = contestants(own.model, methods, task, **how)
            for one in others:
                # Weights of another size are resampled copies, so nothing is shared with the first model.
                models += contestants(one.model, methods, task, **how, img_size=one.img_size)
        untrained = untrained_methods(methods, folder)
        content: dict[str, str] = {}
        if identified:
            paths = [path for one in files for path in one.files]
            whole = None if isinstance(model, Exported) else model
            content = identity(whole, task, dataset, learned=folder, files=paths)
    models += [Contestant(file, task, name=str(file.path), img_size=size_of(file, others)) for file in files]
    return Opened(loaded, task, dataset, data, models, untrained, content)


def _task_and_images(
    loaded: Loaded, images: ScoredData, results: ScoredResults, others: Sequence[Loaded]
) -> tuple[Task, Any, dict[str, Any]]:
    """The task, the dataset or None for batches, and the facts about the images."""
    if not isinstance(images.source, (str, Path, *DATASETS)):
        if others:
            raise VitrimError("batches are images of one size: give a source or a dataset for others")
        unknown = dict.fromkeys(("source", "split", "images", "classes", "batch_size"))
        return _task_of_batches(loaded, images, results), None, unknown
    if isinstance(images.task, Task):
        raise VitrimError("a task with its classes goes with batches; of a source or a dataset give its name")
    task, dataset = open_task(loaded, images, embeddings=True, others=others)
    return task, dataset, data_facts(images, task, dataset)


def _task_of_batches(loaded: Loaded, images: ScoredData, results: ScoredResults) -> Task:
    reading = {**images.columns, "data_options": images.options, "protocol": images.protocol, "limit": images.limit}
    unread = next((name for name, value in {**reading, "out": results.folder}.items() if value), None)
    if unread is not None:
        raise VitrimError(f"{unread} is for a source of images or a dataset, and batches are given")
    if isinstance(images.task, Task):
        return images.task
    # the caller may choose a classifier's task, such as multilabel
    free = images.task is not None and not loaded.tasks
    return task_of(loaded, None, images.task if free else task_name(loaded, images.task))


def _probes(opened: Opened, results: ScoredResults) -> list[Probe]:
    """The probes of the task, and those of the results that were asked for."""
    task = opened.task
    if results.decisions is not None and opened.files:
        raise VitrimError("decisions are of models, and files do not tell theirs: leave them out")
    if results.predictions is not None and task.selects_by != "top1":
        raise VitrimError(f"predictions are classes of whole images, one each, and this is {task.name}: leave them out")
    probes = [*standard_probes(task), *paired_probes(task)]
    if results.predictions is not None:
        probes.append(Predictions())
    if results.decisions is not None:
        check_folder(Path(results.decisions))
        probes.append(DecisionsProbe())
    return probes


def follow(
    measurement: Measurement,
    opened: Opened,
    images: ScoredData,
    on_progress: Callable[[int, int | None], None] | None,
    partial: Partial | None = None,
) -> None:
    """Run the models on all batches, but those of the run that is resumed."""
    dataset, data, processes = opened.dataset, opened.data, measurement.processes
    # Every process sees its share of the images, rounded up.
    batches, total = images.source, None if dataset is None else -(-data["images"] // processes.count)

    def seen(count: int) -> None:
        if partial is not None:
            partial.keep(measurement)
        if on_progress is not None:
            on_progress(count, total)

    if dataset is not None:
        done = 0 if partial is None else partial.restore(measurement)
        how: dict[str, Any] = {"limit": images.limit, "workers": images.workers, "done": done}
        batches = read(dataset, data["batch_size"], **how, processes=processes, collate=opened.task.collate)
    measurement.follow(batches, seen)


def _publish(
    measurement: Measurement,
    opened: Opened,
    facts: dict[str, Any],
    partial: Partial | None,
    results: ScoredResults,
    problem: str | None,
) -> Report:
    """The report of what was gathered until the end, or a ``problem``; the first process writes its files."""
    if partial is not None and measurement.turns:
        partial.keep(measurement, now=True)
    # after an error, other processes may never reach the point where results are joined
    findings = measurement.findings(together=problem is None)
    shown = findings._replace(rows=opened.rows(measurement, findings))
    report = evaluation_report(opened.loaded.name, opened.task, facts, shown, opened.dataset, problem)
    if findings.rows and measurement.processes.index == 0:
        if results.decisions is not None:
            report.files += save_decisions(findings, Path(results.decisions))
        if results.predictions is not None:
            report.files.append(save_predictions(findings, opened.dataset, Path(results.predictions)))
    return report
