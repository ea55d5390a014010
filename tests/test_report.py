"""Reports: what a command prints, what it writes, what a notebook shows."""

from __future__ import annotations

import csv
import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from vitrim.errors import VitrimError
from vitrim.report import Report, Table

TABLE = Table("speed", "A [bold]title[/]", ("method", "ms", "of", "hidden"), [("<i>tome", 1.23456, None, 1)],
              shown=("method", "of", "ms"))  # fmt: skip


class Cells(HTMLParser):
    """The texts of the cells, by tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tag = tag

    def handle_data(self, data: str) -> None:
        self.found.append((self.tag, data))


def report() -> Report:
    return Report("bench", {"seed": 3}, [{"method": "tome", "ms": 1.23456}], [TABLE], ["one & only"])


def test_a_report_prints_the_columns_that_are_shown_and_no_markup() -> None:
    lines = str(report()).splitlines()
    assert lines[0].strip() == "A [bold]title[/]"
    words = [line.replace("┃", " ").replace("│", " ").split() for line in lines]
    assert ["method", "of", "ms"] in words
    assert ["<i>tome", "-", "1.235"] in words
    assert lines[-1] == "note: one & only"


def test_long_notes_are_one_line() -> None:
    note = " ".join(["word"] * 100)
    assert str(Report("x", notes=[note])) == f"note: {note}"


def test_a_table_that_is_not_shown_is_not_printed() -> None:
    hidden = Table("long", "Long", ("a",), [(1,)], shown=())
    assert str(Report("x", tables=[hidden])) == ""
    assert Report("x", tables=[hidden])._repr_html_() == ""


def test_a_notebook_gets_the_same_cells_escaped() -> None:
    found = Cells(report()._repr_html_()).found
    assert [text for tag, text in found if tag == "th"] == ["method", "of", "ms"]
    assert [text for tag, text in found if tag == "td"] == ["<i>tome", "-", "1.235"]
    assert [text for tag, text in found if tag == "small"] == ["one & only"]
    assert "<i>" not in report()._repr_html_()


def test_the_record_is_written_whole(tmp_path: Path) -> None:
    report().save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == report().record
    assert report().record == {"command": "bench", "seed": 3, "rows": [{"method": "tome", "ms": 1.23456}]}
    with pytest.raises(VitrimError):
        report().save(tmp_path)


def test_tables_are_data() -> None:
    table = Table("a", "", ("x", "y"), [(1, math.nan), (2, 0.5), (3, None)])
    assert table.records() == [{"x": 1, "y": None}, {"x": 2, "y": 0.5}, {"x": 3, "y": None}]
    assert list(csv.reader(io.StringIO(table.csv()))) == [["x", "y"], ["1", ""], ["2", "0.5"], ["3", ""]]
    assert table.column("y")[1] == 0.5


def test_text_columns_stand_at_their_left_edge() -> None:
    table = Table("a", "", ("one", "two", "number"), [("x", "y", "1"), ("long text", "longer", "1000")], text_columns=2)
    rows = [line for line in str(Report("x", tables=[table])).splitlines() if "│" in line]
    assert [row.split("│")[1:-1] for row in rows] == [
        [" x         ", " y      ", "      1 "],
        [" long text ", " longer ", "   1000 "],
    ]
    sides = table.html().split("</thead>")[1].split("</tr>")[0]
    assert sides.count("left") == 2
    assert sides.count("right") == 1


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_no_name_and_no_number_is_broken_at_any_width(width: int) -> None:
    methods = ["dense", "tome:r=13", "evit:keep_rate=0.7,blocks=3+6+9,fuse_token=true", "evit:keep_rate=0.5,blocks=3+6"]
    columns = ("method", "top-1", "change", "MACs saved", "ms at 1", "speed-up at 1", "speed-up at 32")
    rows = [(name, "71.25", "-1.25±0.41", "41.4", "12.31", "1.31 (1.20-1.40)", "1.50 (1.49-1.51)") for name in methods]
    out = Console(file=io.StringIO(), width=width)
    out.print(Table("t", "", columns, rows), crop=False)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines if " = " not in line)
    for cell in {cell for row in rows for cell in row[1:]}:
        assert text.count(cell) >= len(rows)
    for name in methods:
        assert any(name in line for line in lines)  # in the table, or in the key below


def test_a_table_of_texts_that_is_too_wide_is_a_list() -> None:
    out = Console(file=io.StringIO(), width=40)
    row = ("a_recipe_with_a_long_name", "segmenter:vit_base_patch16_384.augreg", "a paper of many words")
    out.print(Table("t", "", ("name", "model", "paper"), [row], text_columns=3), crop=False)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == row[0]
    assert any(row[1] in line for line in lines[1:])
    assert max(map(len, lines)) <= 45
