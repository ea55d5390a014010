"""The folder of an analysis: records, tables, figures, and the report, a page that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitrim.analysis.families import FAMILIES
from vitrim.analysis.family import FamilyResult, TableRow, Tables
from vitrim.analysis.figures import drawn
from vitrim.analysis.record import Record, titled
from vitrim.analysis.summary import summary
from vitrim.engines.machine import environment
from vitrim.errors import VitrimError
from vitrim.files import json_text, read_json, write_text
from vitrim.measure.decisions import file_name, write_arrays
from vitrim.report import Report, Table, cell
from vitrim.style import DPI, FORMATS, encoded, write

SUMMARY = "analysis.json"
NOTES = 6
"""Most notes printed in a terminal."""
ARRAYS_FORMAT = 1
"""Format of a family's arrays, see `vitrim.measure.decisions.read_arrays`."""


def read_analysis(folder: Path) -> list[Record]:
    """The records of a finished analysis, else `VitrimError`; ``report`` of their headers is the name of the folder."""
    files = sorted(folder.glob("record_*.npz")) if (folder / SUMMARY).is_file() else []
    if not files:
        raise VitrimError(
            f"{folder} holds no records of a finished analysis: give the folder of an analysis of a model"
        )
    if read_json(folder / SUMMARY).get("complete") is False:
        raise VitrimError(f"the analysis in {folder} was stopped before all images were seen: run it again")
    return [in_folder(file) for file in files]


def in_folder(file: Path) -> Record:
    """The record in a file; ``report`` of its header is the name of the folder."""
    found = Record.load(file)
    return replace(found, header={**found.header, "report": str(file.parent)})


def write_records(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Write each record to ``record_METHOD.npz``, or ``record_MODEL_METHOD.npz`` for several models, and return the
    files. ``folder`` is created if necessary; records of an earlier analysis in it are deleted.
    """
    files = []
    several = len({record.header.get("model") for record in records}) > 1
    for record in records:
        name = f"{record.header['model']}_{record.method}" if several else record.method
        files.append(folder / f"record_{file_name(name)}.npz")
        record.save(files[-1])
    for old in set(folder.glob("record_*.npz")) - set(files):
        old.unlink()
    return files


def write_analysis(
    folder: Path,
    results: Mapping[str, FamilyResult],
    records: Sequence[Record],
    found: Mapping[str, Any],
    formats: Sequence[str],
    files: Sequence[Path] = (),
) -> AnalysisReport:
    """Write the tables and the report of ``results``, with a summary of the records, in place of earlier ones.

    ``found`` are entries of ``analysis.json``, which override those that follow from the records; ``files`` those
    written before.
    """
    results = {**({"summary": summary(titled(records))} if records else {}), **results}
    nowhere = {"environment": environment(device="cpu", dtype="float32", seed=0)}  # where no model runs
    found = {**_origin(records), **nowhere, **found}
    record = {"command": "analyze", **found, "records": [dict(record.header) for record in records]}
    written = [*files, *write_tables(folder, results, record), *write_report(folder, results, found, formats=formats)]
    # An earlier report in the folder may have had more tables and figures: what was not written now goes.
    for place in ("tables/*.csv", "arrays/*.npz", *(f"figures/*.{kind}" for kind in FORMATS)):
        for old in set(folder.glob(place)) - set(written):
            old.unlink()
    tables = [table for result in results.values() for table in result.tables if table.shown != ()]
    rows = [{"table": table.name, **row} for table in tables if table.name != "summary" for row in table.records()]
    notes = [note for name, result in results.items() if name != "summary" for note in result.notes]
    words = results["summary"].notes if "summary" in results else []
    return AnalysisReport("analyze", found, rows, tables, notes, written, words)


def _origin(records: Sequence[Record]) -> dict[str, Any]:
    """The models of records, and their data if all are of the same images, as far as the headers name them."""
    headers = [record.header for record in records]
    models = {one["model"]: {"model": one["model"], "weights": one.get("weights")} for one in headers if "model" in one}
    keys = ("data", "split", "batch_size")
    every = {(*map(record.header.get, keys), len(record)) for record in records}
    if len(every) != 1 or not all(key in one for one in headers for key in keys):
        return {"models": list(models.values())}
    [(source, split, batch_size, images)] = every
    data = {"source": source, "split": split, "images": images, "batch_size": batch_size}
    return {"models": list(models.values()), "data": data}


@dataclass
class AnalysisReport(Report):
    """The findings of an analysis; a terminal shows the summary, the sentences below it (``words``), and where the rest
    is.
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


def write_tables(folder: Path, results: Mapping[str, FamilyResult], found: Mapping[str, Any]) -> list[Path]:
    """Write ``tables/TABLE.csv``, ``arrays/FAMILY.npz`` of families with arrays, and ``analysis.json`` with
    ``found``.
    """
    files = []
    tables = {table.name: table for result in results.values() for table in result.tables}
    for name, table in tables.items():
        files.append(folder / "tables" / f"{name}.csv")
        write_text(files[-1], table.csv())
    for name, result in results.items():
        if result.arrays:
            files.append(folder / "arrays" / f"{name}.npz")
            write_arrays(files[-1], {"format": ARRAYS_FORMAT, "family": name}, result.arrays)
    summary = {
        **found,
        "tables": {name: table.records() for name, table in tables.items() if table.shown != ()},
        "notes": [note for result in results.values() for note in result.notes],
    }
    files.append(folder / SUMMARY)
    write_text(files[-1], json_text(summary, indent=2) + "\n")
    return files


# ---- the report ------------------------------------------------------------------------------------------------------

PAGES = {"index.html": "report.html.jinja", "report.md": "report.md.jinja"}
"""The files of a report, and their templates beside this file."""
OPEN, MOST, MOST_MARKDOWN = 16, 400, 60
"""Most rows of a table that is unfolded on the page, that is on the page, and that is in the Markdown."""
CSS_DPI = 96


def write_report(
    folder: Path, results: Mapping[str, FamilyResult], found: Mapping[str, Any], *, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Write ``index.html``, ``report.md`` and ``figures/`` from tables alone; return the files. The page embeds PNG."""
    from jinja2 import Environment

    tables, files, sections = Tables.of(results), [], []
    for family, result in results.items():
        figures = []
        for drawing, figure in drawn(family, tables):
            content = encoded(figure)  # takes most of the time
            for kind in formats:
                files.append(folder / "figures" / f"{drawing.name}.{kind}")
                write(content if kind == "png" else encoded(figure, kind), files[-1])
            sides = struct.unpack(">II", content[16:24])  # width and height in the PNG header
            # The page shows a figure at the size it was drawn for, whatever its resolution.
            width, height = (round(side * CSS_DPI / DPI) for side in sides)
            shown = {"png": base64.b64encode(content).decode(), "width": width, "height": height}
            figures.append({"drawing": drawing, "alt": drawing.alt(tables), **shown})
        heading = FAMILIES[family].title if family in FAMILIES else family.capitalize()
        every = [_table(table) for table in result.tables]
        some = [one for one, table in zip(every, result.tables, strict=True) if table.shown != () or table.rows]
        section = {"name": family, "title": heading, "notes": result.notes, "figures": figures}
        sections.append({**section, "every_table": every, "tables": some})
    models = [one["model"] for one in found.get("models", ())]
    about, data = f" of {', '.join(models)}" if models else "", found.get("data", {}).get("source")
    title = f"Token reductions{about}{f' on {Path(data).name}' if data else ''}"
    if "compared" in found:
        title = "Analyses compared"
    facts = list(_facts(found, tables))
    values = {"title": title, "facts": facts, "sections": sections, "kind": formats[0]}
    for name, template in PAGES.items():
        made = Environment(
            autoescape=name.endswith("html"), trim_blocks=name.endswith("md"), keep_trailing_newline=True
        )
        text = made.from_string(Path(__file__).with_name(template).read_text(encoding="utf-8"))
        files.append(folder / name)
        write_text(files[-1], text.render(**values, open=OPEN, most=MOST_MARKDOWN, zip=zip))
    return files


def _facts(found: Mapping[str, Any], tables: Tables) -> Iterator[tuple[str, str]]:
    """The facts at the top of the report, as names and texts."""
    for model in found.get("models", ()):
        options = "".join(f", {key}={value}" for key, value in (model.get("model_options") or {}).items())
        yield "model", f"{model['model']}{options}; weights: {model['weights']}"
    if "compared" in found:
        yield "analyses", ", ".join(found["compared"])
    data = found.get("data")
    if data:
        yield "images", f"{data['images']} of {data['source']}, {data['split'] or 'no split'}"
        yield "batches of", str(data["batch_size"])
    elif "counts" in tables:
        yield "images", ", ".join(map(str, dict.fromkeys(tables["counts"].column("images"))))
    if found.get("complete") is False:
        yield "stopped", "before all images were seen"
    environment = found.get("environment", {})
    if environment:
        yield "seed", str(environment["seed"])
        yield "made with", f"vitrim {environment['vitrim']}, torch {environment['torch']}, {environment['dtype']}"
        yield "on", f"{environment['device']} ({environment['device_name']})"
    yield "numbers", "analysis.json and tables/*.csv beside this page; in brackets: 95 % bootstrap intervals"


def _table(table: Table) -> dict[str, Any]:
    """A table as the page shows it, with intervals beside their means; without rows if there are too many."""
    means = [name for name in table.columns if f"{name}_low" in table.columns]
    beside = {f"{name}{end}" for name in means for end in ("_std", "_low", "_high")}
    names = [name for name in (table.columns if table.shown is None else table.shown) if name not in beside]
    text = [any(isinstance(value, str) for value in table.column(name)) for name in names]
    columns = [{"name": name.replace("_", " "), "text": one} for name, one in zip(names, text, strict=True)]
    whole = 0 < len(table.rows) <= MOST and names
    rows = [[_cell(row, name) for name in names] for row in table.records()] if whole else None
    return {"name": table.name, "title": table.title, "count": len(table.rows), "columns": columns, "rows": rows}


def _cell(row: TableRow, name: str) -> str:
    """A number with its interval, if there is one."""
    low, high = (row.get(f"{name}_{end}") for end in ("low", "high"))
    return cell(row[name]) + ("" if low is None or high is None else f" [{cell(low)}, {cell(high)}]")
