"""Analyses of reductions: one pass over images, or stored records, turned into a folder with a report.

vitrim.analyze("vitrim:cifar10_vit", ["tome:r=8", "topk"], "cifar10-test.parquet", out="report")
analyze_records(["report/record_dense.npz", "report/record_tome_r_8.npz"], out="again")
compare_analyses(["report", "other_report"], out="compared")
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vitrim.analysis.collect import Collect, records_of
from vitrim.analysis.families import FAMILIES, across, chosen, results_of
from vitrim.analysis.family import FamilyResult
from vitrim.analysis.output import SUMMARY, in_folder, read_analysis, write_records, write_report, write_tables
from vitrim.analysis.record import Record, distinct, titled
from vitrim.analysis.subject import Subject
from vitrim.analysis.summary import milliseconds, scores, summary
from vitrim.core.method import MethodConfig
from vitrim.core.registry import fitting, parse_methods
from vitrim.data import DataError
from vitrim.errors import MissingPackageError, VitrimError, check_kinds, check_known, check_read, one_line_errors
from vitrim.files import check_folder
from vitrim.loading import MADE, ModelSpec
from vitrim.measure.earlier import earlier
from vitrim.measure.evaluation import DTYPES, paired_probes, standard_probes
from vitrim.measure.inputs import SCORED, DataSpec
from vitrim.measure.machine import environment, select_device
from vitrim.measure.records import read
from vitrim.measure.run import Measurement
from vitrim.measure.task_data import data_facts, open_task
from vitrim.plots.style import FORMATS
from vitrim.report import Report, Results

PACKAGES = ("scipy", "sklearn", "ot", "matplotlib", "jinja2")
"""Import names of the packages that the metrics and the report need."""


@earlier(models=ModelSpec, data=DataSpec, out=Results)
def analyze(
    models: nn.Module | str | ModelSpec | Sequence[nn.Module | str | ModelSpec],
    methods: MethodConfig | str | Sequence[MethodConfig | str],
    data: Any,
    *,
    out: str | Path | Results,
    only: str | Sequence[str] | None = None,
    sizes: Sequence[int] = (),
    blocks: Sequence[int] = (),
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Report:
    """Analyse which patches reductions keep and merge, how deep patches get, and how features change.

    All methods see the same batches in one pass over the data. The folder ``out`` gets the report (``index.html``), its
    figures and tables, and one record per model and method, from which `analyze_records` rebuilds the report. If the
    pass is interrupted, also by Ctrl-C, the images read so far are analysed before the exception is raised again.
    ``docs/analysis.md`` and the files of `vitrim.analysis.families` describe what each family measures.

    Args:
        models: one or several; each a module, which is left unchanged, a name as on the command line, or a
            `vitrim.ModelSpec`. All run with the same methods on the same images.
        methods: one or several, configs or their text form. The dense model is always included. A model that cannot be
            reduced, such as Swin, is analysed alone under ``none``.
        data: labelled images: a source, a dataset, or a `vitrim.DataSpec`.
        out: folder, or a `vitrim.Results`, which also sets the formats of the figures (png, svg). A folder that is not
            empty must hold an analysis, which is replaced.
        only: families, as a sequence or comma-separated text; "all" for all. None runs the families that need a single
            pass: patterns, depth, counts, features, loss. The others run the model again and must be named:
            sensitivity, attention, router, tsne, throughput, and the second part of loss.
        sizes: image sides in pixels for the throughput family; empty for the model's own size.
        blocks: blocks, from 0, whose maps the attention and router families draw; empty for four or five spread over
            the depth.
        seed: seed of random weights, of methods that draw, and of shuffles; also sets torch's global seed.
        on_progress: called after every batch with the number of images processed and the total.
        on_report: called with the partial report if the pass is interrupted.

    Returns:
        A report with the tables and notes of all families; ``files`` lists the files written.

    Raises:
        VitrimError: an unknown or unsuitable model, method, family, format, dtype or device, images that the model
            cannot process, or a folder with other content; nothing is written. Also if a named family fails; the
            records are kept.

    Example:
        >>> import io, tempfile
        >>> from PIL import Image
        >>> from vitrim.data import ImageDataset
        >>> stream = io.BytesIO()
        >>> Image.new("RGB", (64, 64)).save(stream, "png")
        >>> images = ImageDataset([stream.getvalue()] * 4, [0, 1, 2, 0])
        >>> from vitrim.loading import create_model
        >>> model = create_model("test_vit", options={"img_size": 64, "num_classes": 3})
        >>> with tempfile.TemporaryDirectory() as out:
        ...     report = analyze(model, "tome:r=2", images, out=out, only="counts")
        >>> [row["tokens"] for row in report.rows if row["method"] == "tome:r=2"]
        [15.0, 13.0, 11.0, 9.0, 7.0, 5.0]
    """
    source, place, configs = DataSpec.of(data), Results.of(out), parse_methods(methods)
    check_read(source, SCORED)
    check_read(place, ("formats",))
    check_kinds(on_progress=on_progress, on_report=on_report)
    _check_lists(sizes=sizes, blocks=blocks)
    if not isinstance(seed, int):
        raise VitrimError(f"seed is a whole number, not {seed!r:.60}")
    specs = ModelSpec.each(models)
    for one in specs:
        check_read(one, (*MADE, "device", "dtype"))
    dtype = "fp32" if specs[0].dtype is None else specs[0].dtype
    device = "cpu" if specs[0].device is None else specs[0].device
    check_kinds(dtype=dtype)
    check_known("dtype", dtype, DTYPES)
    folder, families, kinds = _checked(place.folder, only, place.formats, sizes, blocks)
    alone = [name for name in families if FAMILIES[name].of_records is None]
    names = [one.model if one.named else one.load().name for one in specs]
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise VitrimError(f"model {again} is given twice")

    where, precision = select_device(str(device)), getattr(torch, DTYPES[str(dtype)])
    passes = []
    for spec in specs:
        torch.manual_seed(seed)
        loaded = spec.load("cpu")
        task, dataset = open_task(loaded, source, embeddings=True)
        size, limit, workers = task.eval_batch(source.batch_size), source.limit, source.workers
        facts = data_facts(dataset, source.name(dataset), limit, size)
        found = {
            "environment": environment(device=str(device), dtype=DTYPES[str(dtype)], seed=seed),
            "model": loaded.name,
            "weights": loaded.weights,
            "model_options": loaded.options,
            "task": task.name,
            "data": facts,
        }
        own = (loaded.model if spec.named else copy.deepcopy(loaded.model)).to(device=where, dtype=precision).eval()
        suited = fitting(own, configs)
        subject = Subject(own, suited, task, dataset, size, limit, seed, workers, loaded.learned, sizes, blocks)
        _check_blocks(blocks, subject)
        probes = [Collect(num_images=facts["images"]), *standard_probes(task), *paired_probes(task)]
        measurement = subject.measurement(suited, probes)
        passes.append(_Pass(measurement, subject, found))
    if families and len(alone) == len(families):  # no family needs the pass over all images
        results = results_of(None, families, _subjects(passes))
        models_of = [{key: one.found[key] for key in ("model", "weights", "model_options")} for one in passes]
        return _write(folder, results, [], {**passes[0].found, "models": models_of, "complete": True}, kinds)
    seen, images = 0, sum(one.found["data"]["images"] for one in passes)
    try:
        with one_line_errors("this batch size", kept="; what was gathered is kept"):
            for measurement, subject, _ in passes:
                how: dict[str, Any] = {"limit": source.limit, "workers": source.workers}
                for batch in read(subject.dataset, subject.batch_size, **how, collate=subject.task.collate):
                    measurement.update(batch)
                    if on_progress is not None:
                        on_progress(seen + measurement.images, images)
                seen += measurement.images
    except BaseException:
        report = _gathered(passes, folder, families, kinds)
        if report is not None and on_report is not None:
            on_report(report)
        raise
    report = _gathered(passes, folder, families, kinds)
    if report is None:
        raise DataError("there are no images to analyse")
    return report


class _Pass(NamedTuple):
    """One model on its pass over the images: its measurement, its subject, and facts for the summary."""

    measurement: Measurement
    subject: Subject
    found: dict[str, Any]


def _subjects(passes: Sequence[_Pass]) -> dict[str, Subject]:
    """The subjects of all passes by model name; ``beside`` is set if there are several."""
    return {str(one.found["model"]): replace(one.subject, beside=len(passes) > 1) for one in passes}


def _gathered(passes: Sequence[_Pass], folder: Path, families: Sequence[str], formats: Sequence[str]) -> Report | None:
    """Write the records gathered so far and analyse them; None before the first batch."""
    records: list[Record] = []
    complete = all(one.measurement.images == one.found["data"]["images"] for one in passes)
    for one in passes:
        findings = one.measurement.findings()
        if findings.rows:
            data = one.found["data"]
            header = {
                **{key: one.found[key] for key in ("model", "weights", "environment")},
                "data": data["source"],
                **{key: data[key] for key in ("split", "batch_size")},
                "seed": one.measurement.seed,
            }
            own = records_of(findings, header)
            times = milliseconds(one.subject, one.subject.methods) if complete else {}
            for row in findings.rows:
                known = {"gmacs": sum(row["gmacs"].values()), **({"ms": times[row.method]} if times else {})}
                if one.subject.task.selects_by != "top1":  # top-1 follows from the records
                    known |= scores(row, findings.rows[0], one.subject.task.selects_by)
                own[row.method] = replace(own[row.method], header={**own[row.method].header, **known})
            records += own.values()
    if not records:
        return None
    files = write_records(folder, records)  # before any family can fail: a pass may have taken hours
    models = [{key: one.found[key] for key in ("model", "weights", "model_options")} for one in passes]
    results = results_of(records, families, _subjects(passes) if complete else None)
    found = {**passes[0].found, "models": models, "complete": complete}
    return _write(folder, results, records, found, formats, files)


def analyze_records(
    records: Sequence[Record | str | Path],
    *,
    out: str | Path,
    only: str | Sequence[str] | None = None,
    formats: str | Sequence[str] = ("png",),
) -> Report:
    """Analyse stored records as `analyze` does, without their models and images.

    Args:
        records: records or their files, all of the same images; from one or several analyses. Identical copies, such
            as the dense model of several analyses, count once.
        out, only, formats: see `analyze`; families that run the model are unavailable.

    Raises:
        VitrimError: a file that is not a record, records that cannot be compared, a family that needs a model, or any
            error of `analyze`.

    Example:
        >>> import numpy as np, tempfile
        >>> header = {"method": "tome:r=2", "kind": "merge", "blocks": [], "num_layers": 2}
        >>> header |= {"grid": [4, 4], "num_prefix": 1}
        >>> record = Record(header, {"ids": np.arange(2), "num_tokens": np.array([[15, 13], [15, 13]])})
        >>> with tempfile.TemporaryDirectory() as out:
        ...     report = analyze_records([record], out=out, only="counts")
        >>> [(row["block"], row["tokens"]) for row in report.rows]
        [(0, 15.0), (1, 13.0)]
    """
    _check_lists(records=records)
    folder, families, kinds = _checked(out, only, formats, stored=True)
    read = distinct([one if isinstance(one, Record) else in_folder(Path(one)) for one in records])
    return _write(folder, results_of(read, families), read, {}, kinds)


def compare_analyses(
    analyses: Sequence[str | Path],
    *,
    out: str | Path,
    only: str | Sequence[str] | None = None,
    formats: str | Sequence[str] = ("png",),
) -> Report:
    """Compare finished analyses, possibly of different images: depth, counts and features.

    Depth maps and counts are compared across all records. Distances between features are computed within each analysis;
    their correlation with the differences in accuracy is over the pairs of all analyses.

    Args:
        analyses: two or more folders that `analyze` wrote.
        out, only, formats: see `analyze`.

    Raises:
        VitrimError: a folder without a finished analysis, a family that needs the same images, or any error of
            `analyze`.
    """
    _check_lists(analyses=analyses)
    folder, families, kinds = _checked(out, only, formats, stored=True)
    groups = [read_analysis(Path(one)) for one in analyses]
    results = across(groups, families)
    found = {"compared": [str(group[0].header["report"]) for group in groups]}
    return _write(folder, results, [record for group in groups for record in group], found, kinds)


# ---- shared parts ----------------------------------------------------------------------------------------------------


NOTES = 6
"""Most notes printed in a terminal."""
LISTS: dict[str, tuple[str, Any]] = {
    "only": ("a text with commas or a list of families", str),
    "formats": ("a text with commas or a list of formats", str),
    "records": ("a list of records or their files", (Record, str, Path)),
    "analyses": ("a list of folders", (str, Path)),
    "sizes": ("a list of whole numbers of pixels", int),
    "blocks": ("a list of whole numbers of blocks", int),
}
"""Arguments that are lists: a description of each, and the types of its entries."""


def _check_lists(**given: object) -> None:
    for name, value in given.items():
        words, entries = LISTS[name]
        listed = isinstance(value, Iterable) and (entries is str or not isinstance(value, str))  # a text is of names
        if not listed or (isinstance(value, Collection) and not all(isinstance(one, entries) for one in value)):
            raise VitrimError(f"{name} is {words}, not {value!r:.60}")


def _check_blocks(blocks: Sequence[int], subject: Subject) -> None:
    beyond = next((one for one in blocks if not 0 <= one < subject.num_layers), None)
    if beyond is not None:
        raise VitrimError(f"there is no block {beyond} to draw; valid: 0 to {subject.num_layers - 1}")


def _checked(
    out: str | Path | None,
    only: str | Sequence[str] | None,
    formats: str | Sequence[str],
    sizes: Sequence[int] = (),
    blocks: Sequence[int] = (),
    *,
    stored: bool = False,
) -> tuple[Path, list[str], list[str]]:
    """Check the folder, families and formats; ``stored``: there are only records, no model."""
    if not isinstance(out, str | Path):
        raise VitrimError(f"out is a folder, not {out!r:.60}")
    _check_lists(only=() if only is None else only, formats=formats)
    families = chosen(only, sizes, blocks)
    alone = next((name for name in families if stored and FAMILIES[name].of_records is None), None)
    if alone is not None:
        raise VitrimError(f"{alone} runs the model, which stored records do not hold: give a model and its images")
    kinds = list(dict.fromkeys(formats.split(",") if isinstance(formats, str) else formats))
    for kind in kinds or ("",):
        check_known("format", kind, FORMATS)
    missing = next((package for package in PACKAGES if find_spec(package) is None), None)
    if missing is not None:
        raise MissingPackageError(f"an analysis needs the package '{missing}': pip install 'vitrim[analysis]'")
    folder = Path(out)
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SUMMARY).is_file():
        raise VitrimError(f"{folder} is not empty and holds no analysis: name another folder")
    return folder, families, kinds


def _write(
    folder: Path,
    results: Mapping[str, FamilyResult],
    records: Sequence[Record],
    found: Mapping[str, Any],
    formats: Sequence[str],
    files: Sequence[Path] = (),
) -> Report:
    """Write the tables and the report of ``results``; ``found`` overrides facts that follow from the records."""
    results = {**({"summary": summary(titled(records))} if records else {}), **results}
    headers = [record.header for record in records]
    models = {one["model"]: {"model": one["model"], "weights": one.get("weights")} for one in headers if "model" in one}
    origin: dict[str, Any] = {"models": list(models.values())}
    keys = ("data", "split", "batch_size")
    if headers and all(key in one for one in headers for key in keys):
        every = {(*(one[key] for key in keys), len(record)) for one, record in zip(headers, records, strict=True)}
        if len(every) == 1:  # all of the same images
            [(source, split, batch_size, images)] = every
            origin["data"] = {"source": source, "split": split, "images": images, "batch_size": batch_size}
    nowhere = {"environment": environment(device="cpu", dtype="float32", seed=0)}  # where no model runs
    found = {**origin, **nowhere, **found}

    told = {"command": "analyze", **found, "records": [dict(header) for header in headers]}
    written = [*files, *write_tables(folder, results, told)]
    written += write_report(folder, results, found, formats=formats)
    tables = [table for result in results.values() for table in result.tables if table.shown != ()]
    rows = [{"table": table.name, **row} for table in tables if table.name != "summary" for row in table.records()]
    notes = [note for name, result in results.items() if name != "summary" for note in result.notes]
    words = results["summary"].notes if "summary" in results else []
    for_people = []
    for table in tables:  # spaces in the names of columns
        shown = tuple(name.replace("_", " ") for name in table.shown or table.columns)
        columns = tuple(name.replace("_", " ") for name in table.columns)
        texts = sum(name.startswith("method") for name in shown)
        for_people.append(replace(table, columns=columns, shown=shown, text_columns=texts))
    return AnalysisReport("analyze", found, rows, for_people, notes, written, words)


@dataclass
class AnalysisReport(Report):
    """The findings of an analysis; a terminal shows the summary and where the rest is.

    Attributes:
        words: sentences below the summary.
    """

    words: list[str] = field(default_factory=list)

    def parts(self) -> Iterator[Any]:
        """Yield the summary, its sentence, the first notes, and the path of the page."""
        if self.tables and self.tables[0].name == "summary":
            yield from self.tables[0].parts()
        yield from self.words
        yield from (f"note: {note}" for note in self.notes[:NOTES])
        if len(self.notes) > NOTES:
            yield f"{len(self.notes) - NOTES} more notes are in the report"
        count = Counter(file.parent.name for file in self.files)
        page = next((file for file in self.files if file.name == "index.html"), None)
        if page is not None:
            yield f"{count['tables']} tables and {count['figures']} figures: open {page}"
