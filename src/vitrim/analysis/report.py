"""The report of an analysis: one page without a request to anywhere, the same as Markdown, and the figures' files."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitrim.analysis.drawings import Picture, Tables, pictures, tables_of
from vitrim.analysis.tables import Outcome, Table, cell
from vitrim.errors import unknown
from vitrim.files import write_text
from vitrim.plots.style import DPI, FORMATS, encoded, write

__all__ = ["check_formats", "write_report"]

PAGE, MARKDOWN = "index.html", "report.md"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
OPEN, MOST, MOST_MARKDOWN = 16, 400, 60
"""Rows of a table that is unfolded on the page, that is on the page, and that is in the Markdown."""
CSS_DPI = 96
TITLES = {
    "patterns": "Patterns: which patches stay, which are merged",
    "depth": "Depth: how far patches get",
    "counts": "Counts: tokens per block",
    "features": "Features: how far they move, and what that tells",
    "loss": "Loss: what each block costs",
    "sensitivity": "Sensitivity: batches, order, splitting layer",
    "attention": "Attention: one step ahead against precise",
    "router": "Router: what patches are ranked by",
    "tsne": "t-SNE: pruned tokens before the head",
    "throughput": "Throughput: images per second",
}
"""Of families; others are called by their names."""


class Shown(NamedTuple):
    """A figure on the page."""

    title: str
    caption: str
    alt: str
    png: str
    width: int
    height: int
    name: str


class Section(NamedTuple):
    """A family on the page."""

    name: str
    title: str
    notes: Sequence[str]
    figures: Sequence[Shown]
    tables: Sequence[Table]


def check_formats(text: str) -> list[str]:
    """The kinds of files in a list with commas.

    Raises:
        VitrimError: an unknown one.

    Example:
        >>> check_formats("png,svg")
        ['png', 'svg']
    """
    found = text.split(",")
    for kind in found:
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    return list(dict.fromkeys(found))


def write_report(
    folder: Path, outcomes: Mapping[str, Outcome], found: Mapping[str, Any], *, formats: Sequence[str] = ("png",)
) -> list[Path]:
    """Write ``index.html``, ``report.md`` and ``figures/``, from tables alone.

    Args:
        folder: where ``tables/`` lies, see `vitrim.analysis.output.write_tables`.
        outcomes: by family.
        found: entries of the summary; those that are known are named at the top.
        formats: of the files of figures; the page has its own, as PNG.

    Returns:
        The files.

    Raises:
        VitrimError: a file cannot be written.
    """
    tables, files, sections = tables_of(outcomes), [], []
    for family, outcome in outcomes.items():
        shown = []
        for picture in pictures(family, tables):
            content = encoded(picture.figure)  # which takes most of the time
            for kind in formats:
                files.append(folder / "figures" / f"{picture.drawing.name}.{kind}")
                write(content if kind == "png" else encoded(picture.figure, kind), files[-1])
            shown.append(_shown(picture, content))
        title = TITLES.get(family, family.capitalize())
        sections.append(Section(family, title, outcome.notes, shown, outcome.tables))
    title, facts = _title(found), list(_facts(found, tables))
    pages = {PAGE: _page(title, facts, sections), MARKDOWN: _markdown(title, facts, sections, formats[0])}
    for name, text in pages.items():
        files.append(folder / name)
        write_text(files[-1], text)
    return files


def _shown(picture: Picture, content: bytes) -> Shown:
    width, height = struct.unpack(">II", content[16:24])  # where a PNG has its size
    return Shown(
        picture.drawing.title,
        picture.drawing.alt,
        picture.alt,
        base64.b64encode(content).decode(),
        round(width * CSS_DPI / DPI),
        round(height * CSS_DPI / DPI),
        picture.drawing.name,
    )


def _title(found: Mapping[str, Any]) -> str:
    if "compared" in found:
        return "Analyses compared"
    models = [one["model"] for one in found.get("models", ())]
    data = found.get("data", {}).get("source")
    about = f" of {', '.join(models)}" if models else ""
    return f"Token reductions{about}{f' on {Path(data).name}' if data else ''}"


def _facts(found: Mapping[str, Any], tables: Tables) -> Iterator[tuple[str, str]]:
    """The facts a reader needs, by name."""
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
    yield "numbers", "analysis.json and tables/*.csv beside this page"


# ---- the page ----------------------------------------------------------------------------------------------------


def _page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    from jinja2 import Environment

    made = Environment(autoescape=True, trim_blocks=False).from_string(TEMPLATE.read_text(encoding="utf-8"))
    shown = [
        {**section._asdict(), "tables": [_table(table) for table in section.tables if table.shown != () or table.rows]}
        for section in sections
    ]
    return str(made.render(title=title, facts=facts, sections=shown, open=OPEN, zip=zip)) + "\n"


def _table(table: Table) -> dict[str, Any]:
    """A table as the page shows it: no rows where there are too many."""
    names = table.columns if table.shown is None else table.shown
    whole = 0 < len(table.rows) <= MOST and names
    columns = [{"name": name.replace("_", " "), "text": _is_text(table, name)} for name in names]
    rows = [list(map(cell, row)) for row in zip(*map(table.column, names), strict=True)] if whole else None
    return {"name": table.name, "title": table.title, "count": len(table.rows), "columns": columns, "rows": rows}


def _is_text(table: Table, name: str) -> bool:
    return any(isinstance(value, str) for value in table.column(name))


# ---- Markdown ----------------------------------------------------------------------------------------------------


def _markdown(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section], kind: str) -> str:
    lines = [f"# {title}", "", *(f"* {key}: {value}" for key, value in facts)]
    for section in sections:
        lines += ["", f"## {section.title}"]
        lines += [part for note in section.notes for part in ("", f"> {note}")]
        for figure in section.figures:
            alt = figure.alt.replace("[", "(").replace("]", ")")
            lines += ["", f"### {figure.title}", "", f"![{alt}](figures/{figure.name}.{kind})", "", figure.caption]
        for table in section.tables:
            lines += ["", *_markdown_table(table)]
    return "\n".join(lines) + "\n"


def _markdown_table(table: Table) -> Iterator[str]:
    where = f"[{table.name}.csv](tables/{table.name}.csv)"
    shown = _table(table)
    if shown["rows"] is None or len(table.rows) > MOST_MARKDOWN:
        yield f"{table.title}: {len(table.rows)} rows, in {where}."
        return
    yield f"{table.title} ({where}):"
    yield ""
    yield "| " + " | ".join(column["name"] for column in shown["columns"]) + " |"
    yield "|" + "|".join(" --- " if column["text"] else " ---: " for column in shown["columns"]) + "|"
    for row in shown["rows"]:
        yield "| " + " | ".join(value.replace("|", "\\|") for value in row) + " |"
