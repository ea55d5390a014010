"""The end of ``vitrim analyze``: from gathered or stored records to tables, files and the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrim.cli import common
from vitrim.cli.setup import Record

if TYPE_CHECKING:
    from rich.console import Console

    from vitrim.analysis.record import Record as Recorded
    from vitrim.analysis.subject import Subject
    from vitrim.analysis.tables import Outcome, Table
    from vitrim.measure.run import Measurement


class Pass(NamedTuple):
    """One model on its way over the images.

    Attributes:
        measurement: gathers the records.
        subject: the model and its images, for families that run the model.
        found: entries of the summary, known beforehand.
    """

    measurement: Measurement
    subject: Subject
    found: dict[str, Any]

    def records(self) -> list[Recorded]:
        """The records of what was gathered; none before the first batch."""
        from vitrim.analysis.collect import records_of

        findings = self.measurement.findings()
        if not findings.rows:
            return []
        data = self.found["data"]
        header = {
            **{key: self.found[key] for key in ("model", "weights", "environment")},
            "data": data["source"],
            "split": data["split"],
            "batch_size": data["batch_size"],
            "seed": self.measurement.seed,
        }
        return list(records_of(findings, header).values())

    @property
    def complete(self) -> bool:
        """Tell whether all images were seen."""
        return bool(self.measurement.images == self.found["data"]["images"])


@dataclass(frozen=True)
class Report:
    """The tables and files of an analysis.

    Attributes:
        folder: where files go.
        families: those that were asked for, none for all.
        formats: of the files of figures.
        record: where the summary goes besides.
    """

    folder: Path
    families: Sequence[str]
    formats: Sequence[str]
    record: Record

    @contextmanager
    def kept(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Analyse what was gathered, also if something stops a pass, Ctrl-C too."""
        from vitrim.analysis.output import write_records
        from vitrim.errors import one_line_errors

        try:
            with one_line_errors("this batch size", kept="; what was gathered is kept"):
                yield
        finally:
            made = [record for one in passes for record in one.records()]
            if made:
                # before any family can fail: a pass may have taken hours
                files = write_records(self.folder, made)
                models = [{key: one.found[key] for key in ("model", "weights", "model_options")} for one in passes]
                complete = all(one.complete for one in passes)
                subject = passes[0].subject if complete else None
                self.show(made, {**passes[0].found, "models": models, "complete": complete}, files, subject)

    def show(
        self,
        records: Sequence[Recorded],
        found: dict[str, Any],
        files: Sequence[Path] = (),
        subject: Subject | None = None,
    ) -> None:
        """Print the tables of records and write the report.

        Args:
            records: to analyse.
            found: entries of the summary.
            files: that were written before.
            subject: for the families that run the model.
        """
        from vitrim.analysis.families import analyse, experiments, together

        outcomes = analyse(records, self.families) if records else {}
        if subject is not None:
            outcomes = together(outcomes, experiments(subject, self.families))
        self._write(outcomes, records, {**_origin(records), **found}, files)

    def compare(self, analyses: Sequence[Sequence[Recorded]], found: dict[str, Any]) -> None:
        """Print the tables over finished analyses and write the report."""
        from vitrim.analysis.compare import compare

        outcomes = compare(analyses, self.families)
        every = [record for analysis in analyses for record in analysis]
        compared = [str(analysis[0].header["report"]) for analysis in analyses]
        self._write(outcomes, every, {**_origin(every), **found, "compared": compared}, ())

    def _write(
        self,
        outcomes: Mapping[str, Outcome],
        records: Sequence[Recorded],
        found: dict[str, Any],
        files: Sequence[Path],
    ) -> None:
        from vitrim.analysis.output import write_tables
        from vitrim.analysis.report import write_report

        out = self.record.console()
        for outcome in outcomes.values():
            _print(out, outcome)
        headers = [dict(one.header) for one in records]
        summary = {"command": "analyze", **found, "records": headers}
        written = [*files, *write_tables(self.folder, outcomes, summary)]
        written += write_report(self.folder, outcomes, found, formats=self.formats)
        for file in written:
            out.print(f"wrote {file}", markup=False, highlight=False, soft_wrap=True)
        rows = [
            {"table": table.name, **row}
            for one in outcomes.values()
            for table in _shown(one.tables)
            for row in table.records()
        ]
        self.record.write("analyze", **found, rows=rows)


def _origin(records: Sequence[Recorded]) -> dict[str, Any]:
    """The models of records, and their images where all are of the same, as entries of the summary."""
    headers = [record.header for record in records]
    models = {one["model"]: {"model": one["model"], "weights": one.get("weights")} for one in headers if "model" in one}
    found: dict[str, Any] = {"models": list(models.values())}
    keys = ("data", "split", "batch_size")
    if headers and all(key in one for one in headers for key in keys):
        every = {(*(one[key] for key in keys), len(record)) for one, record in zip(headers, records, strict=True)}
        if len(every) == 1:
            [(source, split, batch_size, images)] = every
            found["data"] = {"source": source, "split": split, "images": images, "batch_size": batch_size}
    return found


def _shown(tables: Iterable[Table]) -> Iterator[Table]:
    return (table for table in tables if table.shown != ())


def _print(out: Console, outcome: Outcome) -> None:
    """Print the tables and the notes of one family."""
    from rich.markup import escape

    from vitrim.analysis.tables import cell

    for table in _shown(outcome.tables):
        columns = table.shown or table.columns
        values = zip(*(table.column(name) for name in columns), strict=True)
        rows = [[escape(cell(value)) for value in row] for row in values]
        text = sum(name.startswith("method") for name in columns)
        common.print_table(out, table.title, [name.replace("_", " ") for name in columns], rows, text_columns=text)
    for note in outcome.notes:
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
