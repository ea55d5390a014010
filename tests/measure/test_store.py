"""Finished units are read again, and only where they belong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vitrim.errors import VitrimError
from vitrim.measure.store import Store

MADE = {"a": 1.5, "b": [0.1, None], "c": {"x": "y"}}


def work(file: Path | None, **how: Any) -> tuple[list[Any], list[str]]:
    """The three units, two of them at once, and those that were measured for it."""
    measured: list[str] = []

    def measure(names: list[str], places: Any) -> list[Any]:
        measured.extend(names[place] for place in places)
        return [MADE[names[place]] for place in places]

    store = Store(file, {"seed": how.pop("seed", 0)}, **how)
    found = store.values(["a", "b"], lambda places: measure(["a", "b"], places))
    return [*found, *store.values(["c"], lambda places: measure(["c"], places))], measured


def test_what_is_in_the_file_is_not_measured_again_wherever_it_stopped(tmp_path: Path) -> None:
    assert work(tmp_path / "deep" / "whole") == (list(MADE.values()), list(MADE))
    assert work(None) == (list(MADE.values()), list(MADE))
    text = (tmp_path / "deep" / "whole").read_bytes()
    lines = text.splitlines(keepends=True)
    assert len(lines) == 4
    for cut in range(1, len(lines) + 1):
        part = tmp_path / "part"
        part.write_bytes(b"".join(lines[:cut]) + b"".join(lines[cut : cut + 1])[:9])  # killed while it wrote
        assert work(part, resume=True) == (list(MADE.values()), list(MADE)[max(cut - 1, 0) :])
        assert part.read_bytes() == text


def test_a_file_is_refused_where_it_does_not_belong(tmp_path: Path) -> None:
    file = tmp_path / "store"
    work(file)
    before = file.read_bytes()
    with pytest.raises(VitrimError, match=r"is there already: resume it \(--resume\)"):
        work(file)
    with pytest.raises(VitrimError, match="is of another run: its seed is 0, and this one's 3"):
        work(file, resume=True, seed=3)
    assert file.read_bytes() == before
    for text in ("something else\n", '{"rows": []}\n', '{"rows": []}\n{"rows": []}\n'):
        file.write_text(text)
        with pytest.raises(VitrimError, match="line 1, is damaged"):
            work(file, resume=True)


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    def refused() -> Any:
        raise VitrimError("no")

    with pytest.raises(VitrimError, match="no"):
        Store(tmp_path / "store").value("a", refused)
    assert not list(tmp_path.iterdir())


def damaged(line: bytes) -> Iterator[bytes]:
    """A line with every kind of damage to each of its entries."""
    row = json.loads(line)
    yield from (b"", line[: len(line) // 2], b"\x00" * 40, b"\xff\xfe", b"[" * 100_000, b"3", b"null", b"[1]")
    for key, value in row.items():
        yield json.dumps({name: one for name, one in row.items() if name != key}).encode()
        yield json.dumps({(f"_{name}" if name == key else name): one for name, one in row.items()}).encode()
        for other in (None, True, 3, -1.5, "", "x", [], [[]], {}, {"feature": 3}):
            if other != value:
                yield json.dumps({**row, key: other}).encode()


def refusal(file: Path) -> str:
    """The error of a run that is resumed from the file; "" if it ends well."""
    try:
        work(file, resume=True)
    except VitrimError as error:
        return str(error)
    return ""


def test_a_damaged_line_is_refused_by_its_number_and_a_damaged_end_is_measured_again(tmp_path: Path) -> None:
    """Whatever is wrong: one line, and the file as it was; or the same file as without."""
    work(tmp_path / "whole")
    whole, part = (tmp_path / "whole").read_bytes(), tmp_path / "part"
    lines = whole.splitlines()
    tried = {True: 0, False: 0}
    for place in range(1, len(lines)):
        for other in damaged(lines[place]):
            for rest in (lines[place + 1 :], []):
                given = b"".join(line + b"\n" for line in [*lines[:place], other, *rest])
                part.write_bytes(given)
                refused = refusal(part)
                if refused:
                    assert re.fullmatch(rf".*part, line {place + 1}, is damaged[^\n]*", refused), (other, refused)
                    assert part.read_bytes() == given
                else:
                    assert not rest, other
                    assert part.read_bytes() == whole
                tried[bool(refused)] += 1
    assert tried[True] > 50
    assert tried[False] > 50


def test_a_run_ends_where_it_ended_before_and_goes_on_where_it_went_on(tmp_path: Path) -> None:
    def attempt(over: list[bool], *, resume: bool = True) -> list[bool]:
        store, ended = Store(tmp_path / "store", resume=resume), list[bool]()
        for number, each in enumerate(over):
            ended.append(store.ended(f"before {number}", lambda each=each: each))
            if ended[-1]:
                break
            store.value(f"unit {number}", lambda number=number: number)
        return ended

    assert attempt([False, False, True], resume=False) == [False, False, True]
    assert attempt([True, True, False]) == [False, False, True]
