"""Speed over time: what is named as lost, and that the page is what the files give."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("benchmarks_track", ROOT / "benchmarks" / "track.py")
assert spec is not None
assert spec.loader is not None
track = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = track
spec.loader.exec_module(track)


def record(commit: str, ratio: float, **changes: Any) -> dict[str, Any]:
    spread = {"speedup_q1": 1.98 * ratio, "speedup_q3": 2.02 * ratio}
    row = {"method": "tome:r=13,last_block=class_token", "batch": 8, "speedup": 2 * ratio, "promised_speedup": 2.0}
    return {
        "commit": commit,
        "date": "2026-01-01",
        "settings": {"model": "m", "dtype": "float32", "threads": 2, "rounds": 3},
        "load": [0.1, 0.1, 0.1],
        "processor": "p",
        "torch": "2",
        "rows": [{**row, **spread, "ratio": ratio}],
        **changes,
    }


@pytest.mark.parametrize(("after", "named"), [(0.97, 0), (0.90, 1), (1.2, 0)])
def test_a_loss_of_more_than_five_percent_is_named(after: float, named: int) -> None:
    found = list(track.losses([record("a", 1.0), record("b", after)]))
    assert len(found) == named
    assert all("1.00 at a, 0.90 at b" in line for line in found)


def test_other_machines_are_not_compared() -> None:
    assert not list(track.losses([record("a", 1.0), record("b", 0.5, processor="q")]))


def test_a_loss_within_the_spread_is_not_named() -> None:
    noisy = record("b", 0.9)
    noisy["rows"][0]["speedup_q3"] = 2.0
    assert not list(track.losses([record("a", 1.0), noisy]))


def test_a_page_of_two_commits() -> None:
    records = [record("a", 1.0), record("b", 0.9)]
    assert "b of 2026-01-01" in track.page(records)
    assert "1.00 at a, 0.90 at b" in track.page(records)
    assert track.figure(records).count("<circle") == 2


def test_the_page_is_what_the_files_give() -> None:
    records = track.read(track.HISTORY)
    assert track.PAGE.read_text() == track.page(records), "run `python benchmarks/track.py --page`"
    assert track.FIGURE.read_text() == track.figure(records)
