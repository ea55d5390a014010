"""Analyses of reductions: one pass over images, or stored records, turned into a folder with a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from vitrim.analysis.collect import Collect, records_of
from vitrim.analysis.families import FAMILIES, across, chosen, results_of
from vitrim.analysis.output import SUMMARY, in_folder, read_analysis, write_analysis, write_records
from vitrim.analysis.record import Record, distinct
from vitrim.analysis.subject import Subject
from vitrim.analysis.summary import milliseconds, scores
from vitrim.checked import Seed, checked_call
from vitrim.core.method import MethodConfig
from vitrim.core.registry import parse_methods
from vitrim.data import DataError
from vitrim.errors import VitrimError, check_installed, check_known, one_line_errors
from vitrim.files import check_folder
from vitrim.loading import ModelSpec, ScoredModel
from vitrim.measure.evaluation import DTYPES, paired_probes, standard_probes
from vitrim.measure.inputs import ScoredData
from vitrim.measure.records import read
from vitrim.report import Report
from vitrim.results import PictureFormat, PictureFormats, Pictures

PACKAGES = ("scipy", "sklearn", "ot", "matplotlib", "jinja2")
"""Import names of the packages that the metrics and the report need."""


@checked_call
def analyze(
    models: nn.Module | str | ModelSpec | Sequence[nn.Module | str | ModelSpec],
    methods: MethodConfig | str | Sequence[MethodConfig | str],
    data: Any,
    *,
    out: str | Path | Pictures,
    only: str | Sequence[str] | None = None,
    sizes: Sequence[int] = (),
    blocks: Sequence[int] = (),
    seed: Seed = 0,
    on_progress: Callable[[int, int], None] | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Report:
    """Analyse which patches reductions keep and merge, how deep patches get, and how features change.

    All methods see the same batches in one pass over the data. The folder ``out`` gets the report (``index.html``), its
    figures and tables, and one record per model and method, from which `analyze_records` rebuilds the report. If the
    pass is interrupted, also by Ctrl-C, the images read so far are analysed before the exception is raised again.

    Args:
        models: one or several; each a module, which is left unchanged, a name as on the command line, or a
            `vitrim.ScoredModel`.
        methods: one or several, configs or their text form. The dense model is always included. A model that cannot be
            reduced, such as Swin, is analysed alone under ``none``.
        data: labelled images: a source, a dataset, or a `vitrim.ScoredData`.
        out: folder, or a `vitrim.Pictures`, which also sets the formats of the figures (png, svg). A folder that is not
            empty must hold an analysis, which is replaced.
        only: families, as a sequence or comma-separated text; "all" for all. None runs the families that need a single
            pass: patterns, depth, counts, features, loss. The others run the model again and must be named:
            sensitivity, attention, router, tsne, throughput, and the second part of loss.
        sizes: image sides in pixels for the throughput family; empty for the model's own size.
        blocks: blocks, from 0, whose maps the attention and router families draw; empty for four or five over the
            depth.
        seed: seed of random weights, of methods that draw, and of shuffles; also sets torch's global seed.
        on_progress: called after every batch with the number of images processed and the total.
        on_report: called with the partial report if the pass is interrupted.

    Returns:
        A report with the tables and notes of all families; ``files`` lists the files written.

    Raises:
        VitrimError: an unknown or unsuitable argument, images that the model cannot process, or a folder with other
            content; nothing is written. Also if a named family fails; the records are kept.

    Example:
        >>> import io, tempfile
        >>> from PIL import Image
        >>> from vitrim.data import ImageDataset
        >>> from vitrim.loading import create_model
        >>> Image.new("RGB", (64, 64)).save(stream := io.BytesIO(), "png")
        >>> images = ImageDataset([stream.getvalue()] * 4, [0, 1, 2, 0])
        >>> model = create_model("test_vit", options={"img_size": 64, "num_classes": 3})
        >>> with tempfile.TemporaryDirectory() as out:
        ...     report = analyze(model, "tome:r=2", images, out=out, only="counts")
        >>> [row["tokens"] for row in report.rows if row["method"] == "tome:r=2"]
        [15.0, 13.0, 11.0, 9.0, 7.0, 5.0]
    """
    source, place, configs = ScoredData.of(data), Pictures.of(out), parse_methods(methods)
    if place.folder is None:
        raise VitrimError("an analysis is written: give a folder, out")
    specs = ScoredModel.each(models)
    _check_models(specs)
    wanted = _checked(place.folder, only, place.formats, sizes, blocks)

    beside = {"sizes": sizes, "blocks": blocks, "beside": len(specs) > 1}
    passes = [_Pass(Subject.opened(spec, configs, source, seed, **beside)) for spec in specs]
    if wanted.families and all(FAMILIES[name].of_records is None for name in wanted.families):
        return _analysed(passes, wanted, [], whole=True)
    try:
        with one_line_errors("this batch size", kept="; what was gathered is kept"):
            _read(passes, on_progress)
    except BaseException:
        report = _gathered(passes, wanted)
        if report is not None and on_report is not None:
            on_report(report)
        raise
    report = _gathered(passes, wanted)
    if report is None:
        raise DataError("there are no images to analyse")
    return report


class _Pass:
    """One model on its pass over the images."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.images = subject, int(subject.about["data"]["images"])
        probes = [Collect(num_images=self.images), *standard_probes(subject.task), *paired_probes(subject.task)]
        self.measurement = subject.measurement(subject.methods, probes)

    def records(self, *, timed: bool) -> list[Record]:
        """The records of the images seen so far, the dense model's first."""
        findings, subject = self.measurement.findings(), self.subject
        about, data, task = subject.about, subject.about["data"], subject.task
        # A record may be read on another machine, years later: it says what it is of.
        header = {key: about[key] for key in ("model", "weights", "environment")}
        header |= {
            "data": data["source"],
            "split": data["split"],
            "batch_size": data["batch_size"],
            "seed": subject.seed,
        }
        records = records_of(findings, header)
        times = milliseconds(subject) if records and timed else {}
        for row in findings.rows:
            known = {"gmacs": sum(row["gmacs"].values()), **({"ms": times[row.method]} if times else {})}
            if task.selects_by != "top1":  # top-1 follows from the records
                known |= scores(row, findings.rows[0], task.selects_by)
            record = records[row.method]
            records[row.method] = replace(record, header={**record.header, **known})
        return list(records.values())


def _read(passes: Sequence[_Pass], on_progress: Callable[[int, int], None] | None) -> None:
    """Run the passes; ``on_progress`` is called after every batch with the images processed and the total."""
    seen, images = 0, sum(one.images for one in passes)
    for one in passes:
        subject, measurement = one.subject, one.measurement
        how: dict[str, Any] = {"limit": subject.limit, "workers": subject.workers, "collate": subject.task.collate}
        for batch in read(subject.dataset, subject.batch_size, **how):
            measurement.update(batch)
            if on_progress is not None:
                on_progress(seen + measurement.images, images)
        seen += measurement.images


def _gathered(passes: Sequence[_Pass], wanted: _Wanted) -> Report | None:
    """Write the records gathered so far and analyse them; None before the first batch."""
    whole = all(one.measurement.images == one.images for one in passes)
    records = [record for one in passes for record in one.records(timed=whole)]
    return _analysed(passes, wanted, records, whole=whole) if records else None


def _analysed(passes: Sequence[_Pass], wanted: _Wanted, records: Sequence[Record], *, whole: bool) -> Report:
    """Write the records and the report; the families that run the models only after all images."""
    # records first, before any family can fail: a pass may have taken hours
    files = write_records(wanted.folder, records) if records else []
    subjects = {str(one.subject.about["model"]): one.subject for one in passes}
    results = results_of(records or None, wanted.families, subjects if whole else None)
    models = [{key: one.about[key] for key in ("model", "weights", "model_options")} for one in subjects.values()]
    about = {**passes[0].subject.about, "models": models, "complete": whole}
    return write_analysis(wanted.folder, results, records, about, wanted.formats, files)


@checked_call
def analyze_records(
    records: Sequence[Record | str | Path],
    *,
    out: str | Path,
    only: str | Sequence[str] | None = None,
    formats: PictureFormats = ("png",),
) -> Report:
    """Analyse stored records as `analyze` does, without their models and images.

    Args:
        records: records or their files, all of the same images; identical copies, such as a dense model's, count once.
        out, only, formats: see `analyze`; families that run the model are unavailable.

    Raises:
        VitrimError: as `analyze`; a file that is not a record, or records that cannot be compared.

    Example:
        >>> import numpy as np, tempfile
        >>> header = {"method": "tome", "kind": "merge", "blocks": [], "num_layers": 2, "grid": [4, 4], "num_prefix": 1}
        >>> record = Record(header, {"ids": np.arange(2), "num_tokens": np.array([[15, 13], [15, 13]])})
        >>> with tempfile.TemporaryDirectory() as out:
        ...     [row["tokens"] for row in analyze_records([record], out=out, only="counts").rows]
        [15.0, 13.0]
    """
    wanted = _checked(out, only, formats, stored=True)
    read = distinct([one if isinstance(one, Record) else in_folder(Path(one)) for one in records])
    return write_analysis(wanted.folder, results_of(read, wanted.families), read, {}, wanted.formats)


@checked_call
def compare_analyses(
    analyses: Sequence[str | Path],
    *,
    out: str | Path,
    only: str | Sequence[str] | None = None,
    formats: PictureFormats = ("png",),
) -> Report:
    """Compare finished ``analyses``, folders that `analyze` wrote, possibly of different images: depth, counts and
    features.

    Depth maps and counts are compared across all records. Distances between features are computed within each analysis;
    their correlation with the differences in accuracy is over the pairs of all analyses.

    Raises:
        VitrimError: as `analyze`; a folder without a finished analysis, or a family that needs the same images.
    """
    wanted = _checked(out, only, formats, stored=True)
    groups = [read_analysis(Path(one)) for one in analyses]
    results = across(groups, wanted.families)
    found = {"compared": [str(group[0].header["report"]) for group in groups]}
    records = [record for group in groups for record in group]
    return write_analysis(wanted.folder, results, records, found, wanted.formats)


# ---- checks ----------------------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """The folder of a report, its families, and the formats of its figures."""

    folder: Path
    families: list[str]
    formats: list[PictureFormat]


def _check_models(specs: Sequence[ScoredModel]) -> None:
    """Check that models differ, and the dtype in which each runs."""
    for spec in specs:
        check_known("dtype", spec.dtype or "fp32", DTYPES)
    names = [spec.model if spec.named else spec.load().name for spec in specs]
    again = next((name for name in names if names.count(name) > 1), None)
    if again is not None:
        raise VitrimError(f"model {again} is given twice")


def _checked(
    out: str | Path,
    only: str | Sequence[str] | None,
    formats: Sequence[PictureFormat],
    sizes: Sequence[int] = (),
    blocks: Sequence[int] = (),
    *,
    stored: bool = False,
) -> _Wanted:
    """Check the folder, families and formats; ``stored``: there are only records, no model."""
    families = chosen(only, sizes, blocks)
    alone = next((name for name in families if stored and FAMILIES[name].of_records is None), None)
    if alone is not None:
        raise VitrimError(f"{alone} runs the model, which stored records do not hold: give a model and its images")
    check_installed("an analysis", *PACKAGES, extra="analysis")
    folder = Path(out)
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SUMMARY).is_file():
        raise VitrimError(f"{folder} is not empty and holds no analysis: name another folder")
    return _Wanted(folder, families, list(dict.fromkeys(formats)))
