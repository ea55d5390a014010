"""Accuracy of reduced models compared with the dense model, in one pass over the data: ``vitrim eval``.

model = create_model("vit_small_patch16_224", pretrained=True)
report = evaluate(model, ["tome:r=13", "evit:keep_rate=0.7"], "imagenet:ROOT")
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, fitting, host_of, supported_parts
from vitrim.core.saving import saved_method
from vitrim.data import DataError
from vitrim.data.dataset import ImageDataset, MultiLabelDataset
from vitrim.data.decoding import to_tensor
from vitrim.data.dense import DetectionDataset, SegmentationDataset, plain
from vitrim.data.fingerprint import fingerprint
from vitrim.data.transforms import eval_transform, geometry_of
from vitrim.errors import VitrimError, check_kinds, check_read, one_line_errors, unknown
from vitrim.files import check_folder
from vitrim.hosts.shared.classes import described, strange
from vitrim.loading import MADE, Loaded, ModelSpec, as_trained
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.copies import apart
from vitrim.measure.decisions import DecisionsProbe, save_decisions
from vitrim.measure.earlier import earlier
from vitrim.measure.in_files import AnyModel, FileModel, MethodsAndFiles, OnFile, check_alike, file_words, parted
from vitrim.measure.inputs import EMBEDDING, SCORED, ZERO_SHOT, DataSpec, open_data, task_name
from vitrim.measure.machine import drawing, environment, select_device
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
from vitrim.measure.run import Findings, Measurement, Partial, weights_fingerprint
from vitrim.report import Report, Results, Table
from vitrim.tasks import Task, make_task

BY_NUMBER = "by_number"
"""Data option: labels are the indices of the model's classes, whatever their names."""
DATASETS = (ImageDataset, MultiLabelDataset, SegmentationDataset, DetectionDataset)
NONE_CHANGED = ", or, where none of them changed, what it is below (at 95 %)"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names on the command line, and torch's."""


def standard_probes(task: Task) -> list[Probe]:
    """The probes of an evaluation: the task's metrics, agreement with the dense model, MACs and tokens.

    For embeddings, `Neighbours` provides the metrics.

    Example:
        >>> [type(probe).__name__ for probe in standard_probes(make_task("classification", 10))]
        ['TaskMetrics', 'Agreement', 'MacsProbe', 'Tokens']
    """
    if task.name == EMBEDDING:
        return [Agreement(task), Neighbours(), MacsProbe(), Tokens()]
    return [TaskMetrics(task), Agreement(task), MacsProbe(), Tokens()]


def paired_probes(task: Task) -> list[Probe]:
    """The probe of the standard error of the loss against the dense model; none for boxes without pycocotools, and none
    for embeddings, whose `standard_probes` include it.

    Example:
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


def num_classes(model: nn.Module) -> int:
    """The number of classes that ``model`` predicts.

    Raises:
        VitrimError: it has no classifier, or consists of several hosts.
    """
    if supported_parts(model):
        host_of(model)  # raises an error that names the part to use
    count = ask(model).num_classes(model)
    if count is None:
        raise VitrimError(f"this {type(model).__name__} does not say how many classes it predicts: give it num_classes")
    if not count:
        raise VitrimError(f"this {type(model).__name__} has no classifier (num_classes=0), so it predicts nothing")
    return count


def task_of(model: nn.Module, dataset: Any, name: str | None = None) -> Task:
    """The task ``name``, else the model's or, for a classifier, the dataset's: one label or several per image.

    Raises:
        VitrimError: the model has no classifier.
    """
    several = isinstance(dataset, MultiLabelDataset)
    name = name or task_name(model) or ("multilabel" if several else "classification")
    return make_task(name, 0 if name in (EMBEDDING, ZERO_SHOT) else num_classes(model))


def check_dataset(dataset: Any, task: Task, model: str) -> None:
    """Check that the model has the classes of the labels, before any image is read.

    Args:
        model: name of the model, for error messages.

    Raises:
        VitrimError: a label beyond the model's classes, or another number of classes with several labels per image.
    """
    count = task.num_classes
    if task.reads is None and not isinstance(dataset, ImageDataset | MultiLabelDataset):
        raise VitrimError(f"{dataset.source} has no labels of whole images, which the model predicts")
    if task.name == EMBEDDING:
        if not isinstance(dataset, ImageDataset):
            raise VitrimError(f"{dataset.source} has several labels per image, and neighbours of embeddings need one")
        return
    option = "" if ":" in model else f", e.g. model option num_classes={dataset.num_classes} and its checkpoint"
    if task.reads is not None or isinstance(dataset, MultiLabelDataset):
        if dataset.num_classes != count:
            raise VitrimError(
                f"{dataset.source} has {dataset.num_classes} classes and the model {count}: use a model of these "
                f"classes{option}"
            )
        task.check(dataset)
        return
    largest = int(dataset.labels.max())
    if largest >= count:
        raise VitrimError(
            f"label {largest} of {dataset.source} is beyond the model's {count} classes, 0 to {count - 1}; "
            f"use a model of these classes{option}"
        )


def check_names(dataset: Any, task: Task, model: nn.Module) -> None:
    """Check, if data and model both name their classes, that some names match.

    Raises:
        VitrimError: no name matches, so scores by index would be meaningless.
    """
    if not dataset.class_names or task.reads is not None or task.name == EMBEDDING or task.places is not None:
        return
    known = strange(dataset.class_names, model)
    if known is not None:
        one, other = (", ".join([*names[:3], *(["..."] * (len(names) > 3))]) for names in (dataset.class_names, known))
        raise VitrimError(
            f"the classes of {dataset.source} ({one}) are none of the model's ({other}): take a model of these, "
            f"score without them (--task {EMBEDDING}; optimize --no-labels), or say that every label is the number of "
            f"the model's class: --data-option {BY_NUMBER}=true"
        )


def open_task(loaded: Loaded, data: Any, *, embeddings: bool = False) -> tuple[Task, Any]:
    """The task of a model, and its images with the model's transform; the recipe of a training run sets the defaults.

    Args:
        loaded: dense model (`vitrim.loading.load`).
        data: a `vitrim.DataSpec`, or its source or dataset. A dataset is not changed; its transform is kept if one was
            set. Options of the reader override those of the training run.
        embeddings: accept a model without a classifier, by its embeddings.

    Raises:
        VitrimError: the model is not for the task, or has no classifier and ``embeddings`` is false; the data cannot be
            read, or has other classes than the model.

    Example:
        >>> from vitrim.data import ImageDataset
        >>> from vitrim.loading import load
        >>> from io import BytesIO
        >>> from PIL import Image
        >>> Image.new("RGB", (40, 30)).save(png := BytesIO(), "png")
        >>> data = ImageDataset([png.getvalue()], [0])
        >>> task, dataset = open_task(load("test_vit", model_options={"num_classes": 3}), data)
        >>> task.name, dataset[0][0].shape
        ('classification', torch.Size([3, 160, 160]))
    """
    spec = DataSpec.of(data)
    model = loaded.model
    rules, trained = as_trained(loaded.name, spec.protocol)
    options = dict(spec.options or {})
    by_number = options.pop(BY_NUMBER, False)
    if not isinstance(by_number, bool):
        raise VitrimError(f"data option {BY_NUMBER}={by_number!r} must be true or false")
    name = task_name(model, spec.task)
    if name == EMBEDDING and not embeddings:
        raise VitrimError(
            f"this needs a classifier, and {type(model).__name__} is taken by its embeddings: vitrim eval, compare, "
            "tune, optimize and analyze take those"
        )
    if spec.by_name:
        dataset: Any = open_data(spec.source, task=name, **spec.columns, options={**trained, **options})
    else:
        if any(spec.columns.values()) or options:
            raise VitrimError("split, columns and data_options say how to read a source, and a dataset is given")
        if not isinstance(spec.source, DATASETS):
            kind = type(spec.source).__name__
            raise VitrimError(f"expected a source of images or a dataset of vitrim.data, got {kind}")
        dataset = copy.copy(spec.source)
    found = task_of(model, dataset, name)
    found.follow(rules)
    names = dataset.class_names
    found.meet(model, described(names) if names and name == ZERO_SHOT else names)
    check_dataset(dataset, found, loaded.name)
    if not by_number:
        check_names(dataset, found, model)
    if dataset.transform in (to_tensor, plain):
        own = None if found.reads is None else found.eval_transform(geometry_of(model))
        dataset.transform = own or eval_transform(model)
    return found, dataset


def data_facts(dataset: Any, source: str, limit: int | None, batch_size: int) -> dict[str, Any]:
    """The entry of a record about the images: source, split, number of images read, classes, batch size.

    ``source`` is the name on the command line; at most ``limit`` images are read.
    """
    return {
        "source": source,
        "split": dataset.split,
        "images": len(dataset) if limit is None else min(limit, len(dataset)),
        "classes": None if dataset.class_names is None else len(dataset.class_names),
        "batch_size": batch_size,
    }


@earlier(model=ModelSpec, data=DataSpec, out=Results)
def evaluate(
    model: AnyModel,
    methods: MethodsAndFiles,
    data: Any,
    *,
    out: str | Path | Results | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int | None], None] | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Report:
    """Evaluate reduced models and the dense model: accuracy, agreement, cosine, MACs, tokens.

    All methods see the same batches, in one pass over the data. Processes of ``accelerate launch`` share the batches,
    and all return the same rows.

    Args:
        model: a module, which is not changed, a name as on the command line, or a `vitrim.ModelSpec`. A reduced module
            is evaluated beside its dense self. Or a `vitrim.Exported` file.
        methods: one or several, configs or text such as ``"tome:r=13"``; None for the dense model and, if the model is
            reduced, its own reduction. Exported files among them are scored on the same images.
        data: a source or a dataset, see `vitrim.open_data`, or a `vitrim.DataSpec`. Or batches, read once: pairs of
            images (B, C, H, W) and targets, which are labels (B,) for classification, and (B, K) of 0 and 1 for several
            labels per image. With batches, the task of a `vitrim.DataSpec` may be multilabel or a `Task`.
        out: folder that stores intermediate results every half minute, or a `vitrim.Results`, which can also request
            the ``decisions`` (`vitrim.measure.decisions.Decisions`) and the ``predictions`` of a classifier: a row per
            image with its index, file, label, and every model's class and probability.
        seed: seed of random weights and of methods that draw at random; the global generators do not change.
        on_progress: called after every batch with the number of images this process has seen, and its total or None.
        on_report: called with the partial report if the pass is interrupted, also by Ctrl-C; the exception is raised
            afterwards.

    Returns:
        A report with a row per model, the dense model first: ``model, method, images``; the metrics of the task, shares
        in [0, 1], such as ``top1``; ``agreement``, ``cosine``, ``gmacs``, ``gmacs_images``, ``tokens_per_block``,
        ``tokens_at_end`` (see `vitrim.measure.probes`) and, for tasks with scores by class, ``classes``. Rows also have
        ``loss_error``, the standard error of the change against dense on the same images (for boxes only with
        pycocotools), and rows with top-1 have the ``loss`` and ``kl``, the divergence from the dense model. Its
        ``record`` is the output of ``vitrim eval --json``.

    Raises:
        VitrimError: an unsupported model, or a model without a classifier or for another task; an unknown method, or
            a method that does not fit; data that cannot be read, is empty or has other classes; invalid targets;
            outputs that are not finite; too little memory.

    Example:
        >>> import timm
        >>> model = timm.create_model("test_vit", num_classes=3)
        >>> batches = [(torch.zeros(2, 3, 160, 160), torch.tensor([0, 2]))]
        >>> [(row["method"], row["tokens_per_block"][0]) for row in evaluate(model, "tome:r=8", batches).rows]
        [('dense', 101), ('tome:r=8', 93)]
    """
    spec, images, results = ModelSpec.of(model), DataSpec.of(data), Results.of(out)
    check_read(spec, (*MADE, "device", "dtype", "learned"))
    check_read(images, SCORED)
    check_read(results, ("resume", "decisions", "predictions"))
    configs, beside_model = parted(methods)
    check_kinds(on_progress=on_progress, on_report=on_report)
    decisions, predictions = results.decisions, results.predictions
    if predictions is not None:
        check_predictions(Path(predictions))
    dtype, device = spec.dtype, spec.device
    if not (dtype is None or isinstance(dtype, torch.dtype) or dtype in DTYPES):
        raise unknown("dtype", dtype, DTYPES)
    precision: torch.dtype | None = getattr(torch, DTYPES[dtype]) if isinstance(dtype, str) else dtype
    if spec.named:  # the command line's defaults; a module has its own device and dtype
        device, precision = device or "cpu", precision or torch.float32
    selected = None if device is None else select_device(str(device))
    processes = Processes.launched(None if device is None else str(device))
    dataset: Any = None
    facts: dict[str, Any] = dict.fromkeys(("source", "split", "images", "classes", "batch_size"))
    batch_size, wanted = images.batch_size, images.task
    with drawing(selected or torch.device("cpu"), seed):
        on_file = None if isinstance(spec.model, str | nn.Module) else FileModel(spec.model)
        loaded = (spec if on_file is None else replace(spec, model=on_file)).load("cpu")
        beside = list(beside_model.values())
        if beside:
            check_alike(loaded.model, ask(loaded.model).preprocessing(loaded.model), beside)
        if isinstance(images.source, (str, Path, *DATASETS)):
            if isinstance(wanted, Task):
                raise VitrimError("a task with its classes goes with batches; of a source or a dataset give its name")
            job, dataset = open_task(loaded, images, embeddings=True)
            batch_size = job.eval_batch(batch_size)
            facts = data_facts(dataset, images.name(dataset), images.limit, batch_size)
        else:
            reading = {**images.columns, "data_options": images.options, "protocol": images.protocol}
            unread = {**reading, "limit": images.limit, "out": results.folder}
            name = next((name for name, value in unread.items() if value), None)
            if name is not None:
                raise VitrimError(f"{name} is for a source of images or a dataset, and batches are given")
            if isinstance(wanted, Task):
                job = wanted
            else:  # with batches, the caller may choose a classifier's task, such as multilabel
                free = wanted is not None and not ask(loaded.model).tasks(loaded.model)
                job = task_of(loaded.model, None, wanted if free else task_name(loaded.model, wanted))
        with apart(loaded.model) as own:
            configs = own.with_own(configs)
            place = processes.device or selected
            saved = (own.learned or loaded.learned) if spec.learned is None else Path(spec.learned)
            models: list[Contestant] = []
            if on_file is not None:
                configs = fitting(on_file, configs)
            else:
                models = contestants(own.model, configs, job, device=place, dtype=precision, learned=saved)
            untrained = untrained_methods(configs, saved)
        models += [OnFile(file, job) for file in ([] if on_file is None else [on_file]) + beside]
    if decisions is not None and any(isinstance(one, OnFile) for one in models):
        raise VitrimError("decisions are of models, and files do not tell theirs: leave them out")
    if predictions is not None and job.selects_by != "top1":
        raise VitrimError(f"predictions are classes of whole images, one each, and this is {job.name}: leave them out")
    probes = [*standard_probes(job), *paired_probes(job)]
    if predictions is not None:
        probes.append(Predictions())
    if decisions is not None:
        check_folder(Path(decisions))
        probes.append(DecisionsProbe())
    measurement = Measurement(models, probes, job, processes=processes, seed=seed)
    number = str(measurement.dtype).removeprefix("torch.")
    machine = environment(device=str(device or measurement.device), dtype=number, seed=seed)
    facts = {
        "environment": {**machine, "processes": processes.count},
        "weights": loaded.weights,
        "model_options": loaded.options,
        "untrained": untrained,
        "task": job.name,
        "data": facts,
    }
    if words := file_words([one.model for one in models if isinstance(one, OnFile)]):
        facts["files"] = words
    if job.name == EMBEDDING:
        own_name = ask(loaded.model).embedding_name
        facts["embedding"] = own_name(loaded.model) if on_file is None else on_file.embedding
    partial = None
    if results.path is not None:
        settings = {"model": loaded.name, "methods": [config.describe() for config in configs], **facts}
        given_files = [one.model.file for one in models if isinstance(one, OnFile)]
        contents = {"parameters": weights_fingerprint(loaded.model), "images": fingerprint(dataset)}
        contents |= {f"file {file.path}": sha256(file.path.read_bytes()).hexdigest() for file in given_files}
        partial = Partial(results.path, {**settings, **contents}, processes, resume=results.resume)
    share = None if dataset is None else -(-facts["data"]["images"] // processes.count)
    progress = None if on_progress is None else lambda seen: on_progress(seen, share)
    problem: str | None = "stopped before the end"
    try:
        short = {long: name for name, long in DTYPES.items()}.get(number, number)
        with one_line_errors(f"batch {batch_size}, {short}", kept="; what was gathered is kept"):
            if dataset is None:
                measurement.follow(images.source, progress)
            else:
                # skip batches of the run that is resumed
                done = 0 if partial is None else partial.restore(measurement)
                how: dict[str, Any] = {"limit": images.limit, "workers": images.workers, "done": done}

                def seen(count: int) -> None:
                    if partial is not None:
                        partial.keep(measurement)
                    if progress is not None:
                        progress(count)

                measurement.follow(read(dataset, batch_size, **how, processes=processes, collate=job.collate), seen)
        problem = None
    except VitrimError as error:
        problem = str(error)
        raise
    finally:  # keep the results, which may be hours of work, whatever stopped the pass
        if partial is not None and measurement.turns:
            partial.keep(measurement, now=True)
        # after an error, other processes may never reach the point where results are joined
        findings = measurement.findings(together=problem is None)
        first = processes.index == 0 and bool(findings.rows)
        report = _report(loaded.name, job, facts, findings, dataset, problem)
        if first and decisions is not None:
            report.files += save_decisions([gauges[-1] for gauges in findings.gauges], Path(decisions))
        if first and predictions is not None:
            report.files.append(save_predictions(findings, dataset, Path(predictions)))
        if first and problem is not None and on_report is not None:
            on_report(report)
    if not findings.rows:
        raise DataError("there are no images to evaluate on")
    return report


# ---- the report ------------------------------------------------------------------------------------------------------


def _report(
    model: str, task: Task, facts: Mapping[str, Any], findings: Findings, dataset: Any, problem: str | None
) -> Report:
    """The report of the findings so far; without rows before the first batch."""
    ended: dict[str, Any] = {"complete": True} if problem is None else {"complete": False, "error": problem}
    if not findings.rows:
        return Report("eval", {**facts, **ended})
    # scores by class are in the rows only, not in the table
    classes = findings.classes(dataset, task.num_classes)
    rows = [
        Row(row.method, {**row, **({"classes": scores} if scores else {})}, model=model)
        for row, scores in zip(findings.rows, classes, strict=True)
    ]
    seen, data = rows[0]["images"], facts["data"]
    if dataset is None:
        data = {**data, "images": seen}
        title = f"{model}: {seen} images"
    else:
        number = f"{seen} of {data['images']}" if seen < data["images"] else f"{seen}"
        title = f"{model} on {data['source']}: {number} images in batches of {data['batch_size']}"
    facts = {**facts, "data": data, **ended}
    # notes needed to read the table
    error = f" ± its standard error on the same images{NONE_CHANGED}" if "loss_error" in rows[0] else ""
    notes = [
        f"metrics, agree ({task.agreement_means}) and MACs saved in %; change of {spelled(task.selects_by)} in "
        f"points{error}; cosine of what the head reads; tokens left at the end, class token included",
        *weight_and_class_notes(facts, task, "agree and cosine still say"),
    ]
    if "files" in facts:
        notes.append(facts["files"])
    if task.name == EMBEDDING:
        notes.append(
            f"embedding: {facts['embedding']}. Each image is a query, all others the database: recall@1 by the same "
            "model, recall@1 dense where the dense model made the database; knn: a vote of 20 neighbours; "
            "neighbours: of the nearest 10, those that the dense model finds"
        )
    return Report("eval", facts, rows, [_table(title, rows, task)], notes)


def _table(title: str, rows: Sequence[Row], task: Task) -> Table:
    dense = rows[0]
    names = list(dense)
    metrics = task.shown or names[names.index("images") + 1 : names.index("agreement")]
    columns = ("method", *map(spelled, metrics), "change", "agree", "cosine", "GMACs", "MACs saved", "tokens")
    full, main = sum(dense["gmacs"].values()), task.selects_by
    cells: list[tuple[str, ...]] = []
    for row in rows:
        total = sum(row["gmacs"].values())
        cells.append(
            (
                row.method,
                *(f"{100 * row[metric]:.2f}" for metric in metrics),
                change_cell(row[main] - dense[main], None if row is dense else row.get("loss_error"), row["images"]),
                f"{100 * row['agreement']:.1f}",
                f"{row['cosine']:.4f}",
                f"{total:.2f}" if full >= 1 else f"{total:.4f}",
                f"{100 * (1 - total / full):.1f}",
                "-" if row["tokens_at_end"] is None else f"{row['tokens_at_end']:.1f}".removesuffix(".0"),
            )
        )
    return Table("eval", title, columns, cells)


def unseen(change: float, error: float | None, images: int) -> float | None:
    """The largest change, in points, compatible with n images of which none changed: 3/n, at 95 % (the rule of three).

    None if an image changed, or the error is unknown.

    Args:
        change, error: shares from `PairedLoss` or `Neighbours`.
        images: n.

    Example:
        >>> unseen(0.0, 1 / 20, 20), unseen(0.0, 0.07, 20), unseen(-0.05, 1 / 20, 20)
        (15.0, None, None)
    """
    # if images change in both directions, the error exceeds one image's share
    return 300.0 / images if change == 0.0 and error == 1.0 / images else None


def change_cell(change: float, error: float | None, images: int) -> str:
    """A change of a share in points, with its standard error if known; if no image changed, with the bound of `unseen`.

    Example:
        >>> change_cell(-0.0123, 0.0041, 1000), change_cell(0.0, None, 20), change_cell(0.0, 1 / 20, 20)
        ('-1.23±0.41', '+0.00', '+0.00 (none; <15.00)')
    """
    most = unseen(change, error, images)
    if most is not None:
        return f"+0.00 (none; <{most:.2f})"
    return f"{100 * change:+.2f}" + ("" if error is None else f"±{100 * error:.2f}")


def weight_and_class_notes(facts: Mapping[str, Any], task: Task, still: str) -> Iterator[str]:
    """Yield notes on accuracies that are meaningless; ``still``: text on what the other columns still show."""
    if facts["weights"] == "random":
        yield (
            "the model has random weights (neither pretrained nor of a checkpoint), so its accuracy is meaningless; "
            f"{still} how much the reduction changes"
        )
    if facts["untrained"]:
        yield (
            f"{', '.join(facts['untrained'])}: with random parameters, as nothing was given that learned them; "
            "a checkpoint may be the folder of a run of `vitrim train`"
        )
    classes, known = facts["data"]["classes"], task.num_classes
    if task.by_number and classes == known:
        yield (
            "the classes of data and model have different names: accuracy is right only if every label is the "
            "index of the model's class"
        )
    elif classes not in (None, known) and task.places is None and task.name != EMBEDDING:
        yield (
            f"the data has {classes} classes and the model {known}: accuracy is right only if every label is the "
            "index of the model's class"
        )


def spelled(metric: str) -> str:
    """The display name of a metric.

    Example:
        >>> spelled("top1"), spelled("mAP_occurring")
        ('top-1', 'mAP occurring')
    """
    return metric.replace("top", "top-").replace("recall", "recall@").replace("_", " ")


def untrained_methods(configs: Iterable[MethodConfig], learned: Path | None) -> list[str]:
    """The learned methods without learned parameters: theirs are random."""
    known = None if learned is None else saved_method(learned)
    return [config.describe() for config in configs if not config.training_free and config.name != known]
