"""``vitrim eval``: accuracy of reduced models next to the dense one, on a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.measuring import DTYPES, Dtype, data_facts, run_batches, task_and_data
from vitrim.cli.setup import Data, Machine, Model, Record
from vitrim.errors import VitrimError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from vitrim.core.method import MethodConfig
    from vitrim.measure.partial import Partial
    from vitrim.measure.probes import Probe
    from vitrim.measure.processes import Processes
    from vitrim.measure.records import Row
    from vitrim.measure.run import Findings, Measurement
    from vitrim.tasks import Task

Out = Annotated[Path | None, typer.Option("--out", help="keep what is gathered in this folder, every half minute")]
Resume = Annotated[bool, typer.Option("--resume", help="go on from what is in --out")]
ProtocolChanges = Annotated[
    list[str] | None,
    typer.Option("--protocol", help="of segmentation, key=value: mode, window, stride, size, side, flip; may repeat"),
]
DecisionsFolder = Annotated[
    Path | None,
    typer.Option("--decisions", help="write where every token went into this folder, one .npz per method"),
]


def evaluate(
    *,
    model: Model,
    data: Data,
    methods: common.MethodsBesideDense = None,
    batch_size: common.BatchSize = 32,
    dtype: Dtype = "fp32",
    workers: common.Workers = 0,
    out: Out = None,
    resume: Resume = False,
    decisions: DecisionsFolder = None,
    protocol: ProtocolChanges = None,
    machine: Machine,
    record: Record,
) -> None:
    """Evaluate reduced models next to the dense one: accuracy, agreement, cosine, MACs, tokens.

    All methods see the same batches, in one pass over the data. If it stops half-way, what was gathered is kept. Many
    processes share the batches: accelerate launch -m vitrim eval ...
    """
    configs = common.parse_methods(methods or ())
    common.check_choice("dtype", dtype, DTYPES)
    import torch

    from vitrim.measure.contestants import contestants
    from vitrim.measure.evaluation import standard_probes
    from vitrim.measure.processes import Processes
    from vitrim.measure.run import Measurement

    device = machine.select()
    processes = Processes.launched(machine.device)
    dense = model.load()
    task, dataset = task_and_data(dense, model, data, protocol)
    batch_size = task.eval_batch(batch_size)
    precision = getattr(torch, DTYPES[dtype])
    device = processes.device or device
    models = contestants(dense, configs, task, device=device, dtype=precision, learned=model.learned)
    probes = [*standard_probes(task), *_recording(decisions)]
    measurement = Measurement(models, probes, task, processes=processes, seed=machine.seed)
    found: dict[str, Any] = {
        "environment": {**machine.environment(DTYPES[dtype]), "processes": processes.count},
        "weights": model.weights,
        "model_options": model.options,
        "untrained": _untrained(configs, model.learned),
        "task": task.name,
        "data": data_facts(dataset, data, batch_size),
    }
    settings = {"model": model.name, "methods": [config.describe() for config in configs], **found}
    partial = _partial(out, resume, settings, processes, dense, dataset)
    report = Report(model.name, task, found, record, decisions, dataset)
    with _reported(measurement, report, f"batch {batch_size}, {dtype}", partial):
        run_batches(measurement, dataset, data.limit, batch_size, workers, partial)


def _recording(decisions: Path | None) -> list[Probe]:
    """The probe that records where tokens went, if that is wanted."""
    if decisions is None:
        return []
    from vitrim.files import check_folder
    from vitrim.measure.decisions import Record as Decide

    check_folder(decisions)
    return [Decide()]


def _partial(
    folder: Path | None, resume: bool, settings: dict[str, Any], processes: Processes, model: nn.Module, dataset: Any
) -> Partial | None:
    """The folder of what is gathered, if one is given; it knows model and data by their contents."""
    if folder is None:
        if resume:
            raise VitrimError("--resume goes on from what is in --out: give --out too")
        return None
    from vitrim.data.fingerprint import fingerprint
    from vitrim.measure.partial import Partial, weights_fingerprint

    contents = {"parameters": weights_fingerprint(model), "images": fingerprint(dataset)}
    return Partial(folder, {**settings, **contents}, processes, resume=resume)


def _untrained(configs: list[MethodConfig], learned: Path | None) -> list[str]:
    """The methods that have parameters to learn and were given none."""
    from vitrim.core.reduce import saved_method

    known = None if learned is None else saved_method(learned)
    return [config.describe() for config in configs if not config.training_free and config.name != known]


@contextmanager
def _reported(measurement: Measurement, report: Report, setting: str, partial: Partial | None) -> Iterator[None]:
    """Report the results, those gathered so far if something stops the run, Ctrl-C too: hours of work are not lost.

    Raises:
        VitrimError: what stopped it, in one line.
    """
    from vitrim.errors import one_line_errors

    problem: str | None = "stopped before the end"
    try:
        with one_line_errors(setting, kept="; what was gathered is kept"):
            yield
        problem = None
    except VitrimError as error:
        problem = str(error)
        raise
    finally:
        if partial is not None and measurement.turns:
            partial.keep(measurement, now=True)
        # after an error the other processes may never come to the place where results are put together
        findings = measurement.findings(together=problem is None)
        if findings.rows and measurement.processes.index == 0:
            report.show(findings, problem)


# ---- showing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """The table and the record of an evaluation.

    Attributes:
        model: as on the command line.
        task: has the metrics.
        found: entries of the record besides the rows.
        record: where it goes.
        decisions: the folder for what happened to every token, if wanted.
        dataset: names the classes.
    """

    model: str
    task: Task
    found: dict[str, Any]
    record: Record
    decisions: Path | None
    dataset: Any

    def show(self, findings: Findings, problem: str | None) -> None:
        """Print the table, and write the record and the decisions."""
        out = self.record.console()
        self._print(out, findings.rows)
        for note in self._notes():
            out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
        ended: dict[str, Any] = {"complete": True} if problem is None else {"complete": False, "error": problem}
        if self.record.json is not None:
            self.record.write("eval", **self.found, **ended, rows=self._rows(findings))
        if self.decisions is not None:
            from vitrim.measure.decisions import save_decisions

            for file in save_decisions([gauges[-1] for gauges in findings.gauges], self.decisions):
                out.print(f"decisions: {file}", markup=False, highlight=False, soft_wrap=True)

    def _rows(self, findings: Findings) -> list[dict[str, Any]]:
        """The rows of the record: with the scores of every class, which are too many for the table."""
        classes = findings.classes(self.dataset, self.task.num_classes)
        return [
            {"model": self.model, **row, **({"classes": found} if found else {})}
            for row, found in zip(findings.rows, classes, strict=True)
        ]

    def _print(self, out: Console, rows: list[Row]) -> None:
        dense, data = rows[0], self.found["data"]
        seen = f"{dense['images']} of {data['images']}" if dense["images"] < data["images"] else f"{dense['images']}"
        title = f"{self.model} on {data['source']}: {seen} images in batches of {data['batch_size']}"
        out.print(title, markup=False, highlight=False, soft_wrap=True)
        names = list(dense)
        metrics = self.task.shown or names[names.index("images") + 1 : names.index("agreement")]
        columns = ["method", *map(_title, metrics), "change", "agree", "cosine", "GMACs", "saved", "tokens"]
        common.print_table(out, "", columns, [self._cells(row, dense, metrics) for row in rows])

    def _cells(self, row: Row, dense: Row, metrics: Sequence[str]) -> list[str]:
        from rich.markup import escape

        total, full = sum(row["gmacs"].values()), sum(dense["gmacs"].values())
        main = self.task.selects_by
        return [
            escape(row.method),
            *(f"{100 * row[metric]:.2f}" for metric in metrics),
            f"{100 * (row[main] - dense[main]):+.2f}",
            f"{100 * row['agreement']:.1f}",
            f"{row['cosine']:.4f}",
            f"{total:.2f}" if full >= 1 else f"{total:.4f}",
            f"{100 * (1 - total / full):.1f}",
            f"{row['tokens_at_end']:.1f}".removesuffix(".0"),
        ]

    def _notes(self) -> Iterator[str]:
        """Notes needed to read the table correctly."""
        yield (
            f"metrics, agree ({self.task.agreement_means}) and saved (MACs) in %; change of "
            f"{_title(self.task.selects_by)} in points; cosine of what the head reads; tokens left at the end, class "
            "token included"
        )
        if self.found["weights"] == "random":
            yield (
                "the model has random weights (neither --pretrained nor --checkpoint), so its accuracy is meaningless; "
                "agree and cosine still say how much the reduction changes"
            )
        if self.found["untrained"]:
            yield (
                f"{', '.join(self.found['untrained'])}: with random parameters, as nothing was given that learned "
                "them; --checkpoint takes the folder of a run of `vitrim train`"
            )
        classes, known = self.found["data"]["classes"], self.task.num_classes
        if self.task.by_number and classes == known:
            yield (
                "the classes of data and model have different names: accuracy is right only if every label is the "
                "index of the model's class"
            )
        elif classes not in (None, known) and self.task.places is None:
            yield (
                f"the data has {classes} classes and the model {known}: accuracy is right only if every label is the "
                "index of the model's class"
            )


def _title(metric: str) -> str:
    """The heading of a metric's column.

    Example:
        >>> _title("top5"), _title("mAP_occurring")
        ('top-5', 'mAP occurring')
    """
    return metric.replace("top", "top-").replace("_", " ")
