"""The report: one page that asks for nothing, legible without its pictures, and the same as Markdown."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest

from made_tables import NAMES, results
from vitrim.analysis.family import FamilyResult
from vitrim.analysis.output import MOST, write_report
from vitrim.report import Table

SOME = {name: results()[name] for name in ("depth", "counts")}  # drawing takes time; `test_figures.py` draws all
SOME["counts"].notes.append("a note with <angles> & an ampersand")
VOID = {"meta", "link", "img", "br"}
FOUND = {
    "models": [{"model": "tiny", "weights": "random", "model_options": {"img_size": 64}}],
    "data": {"source": "folder/images.parquet", "split": "test", "images": 40, "batch_size": 8},
    "complete": False,
}


class Page(HTMLParser):
    """What is on a page; fails where a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report(out, SOME, FOUND, formats=["png", "svg"])
    return out


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "index.html").read_text())


@pytest.mark.slow
def test_the_page_asks_for_nothing(page: Page) -> None:
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object", "video")]
    targets = [
        value or "" for _, given in page.tags for key, value in given.items() if key in ("src", "href", "srcset")
    ]
    outside = [value for value in targets if not value.startswith(("data:", "#", "tables/"))]
    assert not outside
    style = (text for text in page.words if "color-scheme" in text)
    assert not re.search(r"url\(|@import|https?:", next(style))


@pytest.mark.slow
def test_every_picture_is_whole_and_has_words(page: Page, folder: Path) -> None:
    pictures = [given for tag, given in page.tags if tag == "img"]
    assert (
        len(pictures) == len(list((folder / "figures").glob("*.png"))) == len(list((folder / "figures").glob("*.svg")))
    )
    for given in pictures:
        assert len(given["alt"] or "") > 60
        content = base64.b64decode((given["src"] or "").removeprefix("data:image/png;base64,"))
        height, width = matplotlib.image.imread(io.BytesIO(content)).shape[:2]
        assert int(given["width"] or 0) == pytest.approx(width * 96 / 150, abs=1)
        assert int(given["height"] or 0) == pytest.approx(height * 96 / 150, abs=1)


def test_the_page_is_light_and_dark_and_prints(folder: Path) -> None:
    text = (folder / "index.html").read_text()
    for part in ("color-scheme: light dark", "(prefers-color-scheme: dark)", "@media print", 'name="viewport"'):
        assert part in text


def test_tables_stand_beside_the_figures(page: Page) -> None:
    made = [table for result in SOME.values() for table in result.tables]
    links = {given["href"] for tag, given in page.tags if tag == "a" and str(given.get("href")).startswith("tables/")}
    assert links == {f"tables/{table.name}.csv" for table in made}
    cells = [word.strip() for word in page.words]
    assert cells.count(NAMES[0]) >= 5
    counts = next(table for table in made if table.name == "counts")
    assert f"{counts.rows[0][3]:.4g}" in cells
    assert "a note with <angles> & an ampersand" in cells


def test_what_was_analysed_stands_at_the_top(page: Page, folder: Path) -> None:
    words = " ".join(page.words)
    for part in ("Token reductions of tiny on images.parquet", "img_size=64; weights: random", "40 of folder/images"):
        assert part in words
        assert part in (folder / "report.md").read_text()
    assert "before all images were seen" in words


def test_the_markdown_names_the_files(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    shown = re.findall(r"!\[([^\]]+)\]\((figures/[^)]+)\)", text)
    assert {file for _, file in shown} == {f"figures/{file.name}" for file in (folder / "figures").glob("*.png")}
    header = next(line for line in text.splitlines() if line.startswith("| method "))
    rule = text.splitlines()[text.splitlines().index(header) + 1]
    assert header.count("|") == rule.count("|")


@pytest.mark.slow
def test_files_are_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    write_report(tmp_path, {"counts": SOME["counts"]}, FOUND, formats=["png", "svg"])
    for file in (tmp_path / "figures").iterdir():
        assert file.read_bytes() == (folder / "figures" / file.name).read_bytes(), file.name


def test_a_family_without_a_figure_and_one_without_tables(tmp_path: Path) -> None:
    long = Table("long", "A long one", ("method", "number"), [("tome", float(row)) for row in range(MOST + 1)])
    write_report(tmp_path, {"other": FamilyResult([long]), "empty": FamilyResult(notes=["skipped: why"])}, {})
    page = Page((tmp_path / "index.html").read_text())
    assert "skipped: why" in page.words
    assert not [tag for tag, _ in page.tags if tag in ("img", "table")]
    assert f"A long one: {MOST + 1} rows" in " ".join(page.words)
    assert not (tmp_path / "figures").exists()
