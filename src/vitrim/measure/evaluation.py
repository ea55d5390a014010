"""Accuracy of reduced models compared with the dense model, in one pass over the data: ``vitrim eval``.

model = create_model("vit_small_patch16_224", pretrained=True)
report = evaluate(model, ["tome:r=13", "evit:keep_rate=0.7"], "imagenet:ROOT")
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrim.core.method import MethodConfig
from vitrim.core.registry import ask, fitting
from vitrim.core.saving import saved_method
from vitrim.data import DataError
from vitrim.data.fingerprint import fingerprint
from vitrim.errors import VitrimError, check_kinds, check_read, one_line_errors, unknown
from vitrim.files import check_folder
from vitrim.loading import MADE, ModelSpec
from vitrim.measure.contestants import Contestant, contestants
from vitrim.measure.copies import apart
from vitrim.measure.decisions import DecisionsProbe, save_decisions
from vitrim.measure.earlier import earlier
from vitrim.measure.evaluation_report import evaluation_report
from vitrim.measure.in_files import AnyModel, FileModel, MethodsAndFiles, OnFile, check_alike, file_words, parted
from vitrim.measure.inputs import EMBEDDING, SCORED, DataSpec, task_name
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
from vitrim.measure.records import Processes, read
from vitrim.measure.run import Measurement, Partial, weights_fingerprint
from vitrim.measure.task_data import DATASETS, data_facts, open_task, task_of
from vitrim.report import Report, Results
from vitrim.tasks import Task

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Names on the command line, and torch's."""


def standard_probes(task: Task) -> list[Probe]:
    """The probes of an evaluation: the task's metrics, agreement with the dense model, MACs and tokens.

    For embeddings, `Neighbours` provides the metrics.

    Example:
        >>> from vitrim.tasks import make_task
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


def untrained_methods(configs: Iterable[MethodConfig], learned: Path | None) -> list[str]:
    """The learned methods without learned parameters: theirs are random."""
    known = None if learned is None else saved_method(learned)
    return [config.describe() for config in configs if not config.training_free and config.name != known]


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
        report = evaluation_report(loaded.name, job, facts, findings, dataset, problem)
        if first and decisions is not None:
            report.files += save_decisions([gauges[-1] for gauges in findings.gauges], Path(decisions))
        if first and predictions is not None:
            report.files.append(save_predictions(findings, dataset, Path(predictions)))
        if first and problem is not None and on_report is not None:
            on_report(report)
    if not findings.rows:
        raise DataError("there are no images to evaluate on")
    return report
