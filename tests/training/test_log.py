"""The log of a run, as it is taken up again on resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitrim.errors import VitrimError
from vitrim.training.log import Log

HEADER, ROWS = "update,epoch,total", ["0,0.5,3.25", "1,1.0,2.5", "2,1.5,nan"]
LINES = ['{"update": 1, "top1": 10.0}', '{"update": 2, "top1": 20.0}', '{"update": 3, "top1": null}']


def resumed(folder: Path, csv: list[str], lines: list[str], update: int, end: str = "") -> tuple[list[str], list[str]]:
    """The lines of both files after a resume from an update."""
    folder.mkdir(exist_ok=True)
    (folder / "log.csv").write_bytes("".join(f"{row}\r\n" for row in csv).encode("latin-1") + end.encode())
    (folder / "evaluations.jsonl").write_bytes("".join(f"{row}\n" for row in lines).encode("latin-1") + end.encode())
    Log(folder, from_update=update)
    return tuple((folder / name).read_text().splitlines() for name in ("log.csv", "evaluations.jsonl"))  # type: ignore[return-value]


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """Updates before the one it goes on from, and evaluations up to it."""
    found = resumed(tmp_path, [HEADER, *ROWS], LINES, 2, end="9,\x00")
    assert found == ([HEADER, *ROWS[:2]], LINES[:2])
    assert resumed(tmp_path, [HEADER, *ROWS], LINES, 9) == ([HEADER, *ROWS], LINES)


@pytest.mark.parametrize("row", ["x,1,2", "1,1", "1,1,2,3", "1,one,2", "\xff,1,2", "", "1.5,1,2", "\x00\x00"])
def test_a_damaged_row_is_refused_by_its_number_and_dropped_at_the_end(tmp_path: Path, row: str) -> None:
    with pytest.raises(VitrimError, match=r"log\.csv, line 3, is damaged: "):
        resumed(tmp_path, [HEADER, ROWS[0], row, ROWS[2]], LINES, 9)
    assert resumed(tmp_path, [HEADER, ROWS[0], row], LINES, 9)[0] == [HEADER, ROWS[0]]


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '{"top1": 3}', '{"update": "1"}', '{"update": true}', "\xff", "[" * 99999]
)
def test_a_damaged_evaluation_is_refused_by_its_number_and_dropped_at_the_end(tmp_path: Path, line: str) -> None:
    with pytest.raises(VitrimError, match=r"evaluations\.jsonl, line 2, is damaged: "):
        resumed(tmp_path, [HEADER, *ROWS], [LINES[0], line, LINES[2]], 9)
    assert resumed(tmp_path, [HEADER, *ROWS], [LINES[0], line], 9)[1] == [LINES[0]]


def test_a_log_without_updates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VitrimError, match=r"log\.csv, line 1, is damaged: it names no column 'update'"):
        resumed(tmp_path, ["epoch,total", "1,2"], LINES, 9)
