"""``vitrim analyze``: what reductions do to tokens and features, as tables, from images or from stored records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrim.cli import common
from vitrim.cli.measuring import DTYPES, Dtype, data_facts, run_batches, task_and_data
from vitrim.cli.setup import Data, DataOptions, Limit, Machine, Model, Reading, Record, Setup, Weights
from vitrim.errors import MissingPackageError, VitrimError

if TYPE_CHECKING:
    from rich.console import Console

    from vitrim.analysis.record import Record as Recorded
    from vitrim.analysis.subject import Subject
    from vitrim.analysis.tables import Outcome, Table
    from vitrim.core.config import MethodConfig
    from vitrim.measure.run import Measurement

Out = Annotated[Path, typer.Option("--out", help="folder for records, tables and analysis.json")]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        help="families with commas: patterns, depth, counts, features, loss, and those that run the model once more, "
        "sensitivity, attention, router, tsne, throughput (so does loss, if named); all; default: those of one pass",
    ),
]
Sizes = Annotated[
    str | None, typer.Option("--sizes", help="throughput: pixels a side, with commas; default: the model's own")
]


@dataclass(frozen=True, kw_only=True)
class Source(Weights):
    """The model to analyse, if there is one."""

    name: Annotated[str | None, typer.Argument(metavar="MODEL", help="model, as for `vitrim eval`")] = None

    def model(self) -> Model:
        """The model.

        Raises:
            VitrimError: none is named.
        """
        if self.name is None:
            raise VitrimError("give a model and --data, or stored records with --from")
        given = {field: getattr(self, field) for field in ("pretrained", "checkpoint", "model_option")}
        return Model(name=self.name, **given)


@dataclass(frozen=True, kw_only=True)
class Pictures(Reading):
    """The images to analyse it on, if there are any."""

    source: Annotated[
        str | None, typer.Option("--data", help="images with labels, as for `vitrim eval`; not with --from")
    ] = None
    limit: Limit = None
    data_option: DataOptions = None

    def data(self) -> Data:
        """The images.

        Raises:
            VitrimError: no source is given.
        """
        if self.source is None:
            raise VitrimError("give the images to analyse the model on with --data")
        given = {field: getattr(self, field) for field in ("split", "image_column", "label_column", "data_option")}
        return Data(source=self.source, limit=self.limit, **given)


@dataclass(frozen=True, kw_only=True)
class Stored(Setup):
    """Records of earlier runs."""

    stored: Annotated[
        list[Path] | None,
        typer.Option("--from", help="analyse this stored record instead, without model and data; may repeat"),
    ] = None

    def load(self) -> list[Recorded]:
        """Read the records."""
        from vitrim.analysis.record import Record as Recorded

        return [Recorded.load(file) for file in self.stored or ()]


def analyze(
    *,
    source: Source,
    pictures: Pictures,
    methods: common.MethodsBesideDense = None,
    stored: Stored,
    out: Out,
    only: Only = None,
    sizes: Sizes = None,
    batch_size: common.BatchSize = 32,
    dtype: Dtype = "fp32",
    workers: common.Workers = 0,
    machine: Machine,
    record: Record,
) -> None:
    """Analyse which patches reductions keep and merge, how deep they go, and what that does to features.

    All methods see the same batches, in one pass over the data. Everything can be made again from the records, with
    --from, without model or data. If the pass stops half-way, what was gathered is analysed.
    """
    configs = common.parse_methods(methods or ())
    common.check_choice("dtype", dtype, DTYPES)
    from vitrim.analysis.families import FAMILIES, check_stored, chosen
    from vitrim.analysis.output import check_output

    families = chosen(only.split(",")) if only else []
    _check_packages()
    check_output(out)
    report = Report(out, families, record)
    if stored.stored:
        if source.name is not None or pictures.source is not None or configs:
            raise VitrimError("--from analyses stored records: leave out the model, --data and the methods")
        check_stored(families)
        report.show(stored.load(), [], {"environment": machine.environment("float32")})
        return
    model, data = source.model(), pictures.data()
    pixels = _sizes(sizes)
    measurement, subject, found = _prepared(model, data, configs, machine, dtype, batch_size)
    subject = replace(subject, workers=workers, sizes=pixels)
    if families and not set(families) & set(FAMILIES):  # nothing to gather in a pass over all images
        report.show([], [], {**found, "complete": True}, subject)
        return
    with report.kept(measurement, found, subject):
        run_batches(measurement, subject.dataset, data.limit, subject.batch_size, workers, None)


def _sizes(text: str | None) -> tuple[int, ...]:
    """The sizes in pixels of ``--sizes``.

    Example:
        >>> _sizes("224,384")
        (224, 384)
    """
    parts = [] if text is None else text.split(",")
    wrong = next((part for part in parts if not part.strip().isdecimal() or int(part) == 0), None)
    if wrong is not None:
        raise VitrimError(f"--sizes takes whole numbers of pixels with commas, e.g. 224,384; got '{wrong}'")
    return tuple(map(int, parts))


def _check_packages() -> None:
    """Refuse, before any work, to start without the packages of the metrics."""
    for package in ("scipy", "sklearn", "ot"):
        if find_spec(package) is None:
            raise MissingPackageError(f"an analysis needs the package '{package}': pip install 'vitrim[analysis]'")


def _prepared(
    model: Model, data: Data, configs: list[MethodConfig], machine: Machine, dtype: str, batch_size: int
) -> tuple[Measurement, Subject, dict[str, Any]]:
    """The measurement that gathers the records, what else is run on its images, and what is known beforehand."""
    import torch

    from vitrim.analysis.collect import Collect
    from vitrim.analysis.subject import Subject
    from vitrim.measure.contestants import contestants
    from vitrim.measure.run import Measurement

    device = machine.select()
    dense = model.load()
    task, dataset = task_and_data(dense, model, data, None)
    batch_size = task.eval_batch(batch_size)
    precision = getattr(torch, DTYPES[dtype])
    models = contestants(dense, configs, task, device=device, dtype=precision, learned=model.learned)
    facts = data_facts(dataset, data, batch_size)
    found = {
        "environment": machine.environment(DTYPES[dtype]),
        "model": model.name,
        "weights": model.weights,
        "model_options": model.options,
        "task": task.name,
        "data": facts,
    }
    probe = Collect(num_images=facts["images"])
    own = dense.to(device=device, dtype=precision).eval()
    subject = Subject(
        own, configs, task, dataset, batch_size, limit=data.limit, seed=machine.seed, learned=model.learned
    )
    return Measurement(models, [probe], task, seed=machine.seed), subject, found


# ---- showing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """The tables and files of an analysis.

    Attributes:
        folder: where files go.
        families: those that were asked for, none for all.
        record: where the summary goes besides.
    """

    folder: Path
    families: Sequence[str]
    record: Record

    @contextmanager
    def kept(self, measurement: Measurement, found: dict[str, Any], subject: Subject) -> Iterator[None]:
        """Analyse what was gathered, also if something stops the pass, Ctrl-C too."""
        from vitrim.analysis.collect import records_of
        from vitrim.measure.bench import one_line_errors

        try:
            with one_line_errors("this batch size", kept="; what was gathered is kept"):
                yield
        finally:
            findings = measurement.findings()
            if findings.rows:
                data = found["data"]
                header = {
                    **{key: found[key] for key in ("model", "weights", "environment")},
                    "data": data["source"],
                    "split": data["split"],
                    "batch_size": data["batch_size"],
                    "seed": measurement.seed,
                }
                made = list(records_of(findings, header).values())
                complete = measurement.images == data["images"]
                self.show(made, made, {**found, "complete": complete}, subject if complete else None)

    def show(
        self,
        records: Sequence[Recorded],
        own: Sequence[Recorded],
        found: dict[str, Any],
        subject: Subject | None = None,
    ) -> None:
        """Print the tables and write the files.

        Args:
            records: to analyse.
            own: those of this run, to be written.
            found: entries of the summary.
            subject: for the families that run the model.
        """
        from vitrim.analysis.families import analyse, experiments, together
        from vitrim.analysis.output import write_records, write_tables

        out = self.record.console()
        files = write_records(self.folder, own)  # before any family can fail: a pass may have taken hours
        outcomes = analyse(records, self.families) if records else {}
        if subject is not None:
            outcomes = together(outcomes, experiments(subject, self.families))
        for outcome in outcomes.values():
            _print(out, outcome)
        headers = [dict(one.header) for one in records]
        files += write_tables(self.folder, outcomes, {"command": "analyze", **found, "records": headers})
        for file in files:
            out.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
        rows = [
            {"table": table.name, **row}
            for one in outcomes.values()
            for table in _shown(one.tables)
            for row in table.records()
        ]
        self.record.write("analyze", **found, rows=rows)


def _shown(tables: Iterable[Table]) -> Iterator[Table]:
    return (table for table in tables if table.shown != ())


def _print(out: Console, outcome: Outcome) -> None:
    """Print the tables and the notes of one family."""
    from rich.markup import escape

    for table in _shown(outcome.tables):
        columns = table.shown or table.columns
        values = zip(*(table.column(name) for name in columns), strict=True)
        rows = [[escape(_cell(value)) for value in row] for row in values]
        text = sum(name.startswith("method") for name in columns)
        common.print_table(out, table.title, [name.replace("_", " ") for name in columns], rows, text_columns=text)
    for note in outcome.notes:
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _cell(value: object) -> str:
    """A value as a table shows it.

    Example:
        >>> _cell(0.123456), _cell(None), _cell(float("nan")), _cell(3)
        ('0.1235', '-', '-', '3')
    """
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
