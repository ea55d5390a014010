"""The table of an evaluation, of numbers that are made up."""

from __future__ import annotations

from typing import Any

from vitrim.engines.macs import PARTS, Macs, Profile
from vitrim.measure.evaluation_report import _table
from vitrim.measure.profile import _table as profile_table
from vitrim.measure.records import Row
from vitrim.tasks import make_task


def row(method: str, top1: float, macs: float, **more: Any) -> Row:
    metrics = {"top1": top1, "top5": 0.95, "agreement": 0.9, "cosine": 0.98765, "loss_error": 0.004}
    gmacs = dict.fromkeys(PARTS, macs / len(PARTS))
    saved = 1 - macs / 4.0
    return Row(method, {"images": 1000, **metrics, "gmacs": gmacs, "tokens_at_end": 98.0, "saved": saved, **more})


def test_changes_are_of_the_method_over_the_dense_model() -> None:
    rows = [row("dense", 0.8, 4.0), row("worse", 0.75, 3.0), row("better", 0.81, 5.0, tokens_at_end=None)]
    rows.append(row("same", 0.8, 2.0, loss_error=1 / 1000))
    heads, lines, *_ = _table("a title", rows, make_task("classification", 10)).cells()
    columns = ["method", "top-1", "change", "agree", "cosine", "GMACs", "MACs saved", "tokens"]
    assert [name for name in heads if name != "top-5"] == columns
    shown = [[text for name, text in zip(heads, line, strict=True) if name != "top-5"] for line in lines]
    assert shown == [
        ["dense", "80.00", "+0.00", "90.0", "0.9877", "4.00", "0.0", "98"],
        ["worse", "75.00", "-5.00±0.40", "90.0", "0.9877", "3.00", "25.0", "98"],
        ["better", "81.00", "+1.00±0.40", "90.0", "0.9877", "5.00", "-25.0", "-"],
        ["same", "80.00", "+0.00 (<0.30)", "90.0", "0.9877", "2.00", "50.0", "98"],
    ]


def profile(model: str, method: str, linear: int) -> Profile:
    return Profile(model, method, 10**6, Macs(linear * 10**9, 0, 0, 0), (9, 8))


def test_what_a_method_saves_is_of_the_dense_model_above_it() -> None:
    """Of two models, each with its own dense row."""
    rows = [profile("a", "dense", 10), profile("a", "tome:r=1", 8), profile("a", "evit", 5)]
    rows += [profile("b", "dense", 4), profile("b", "tome:r=1", 3)]
    heads, lines, *_ = profile_table(rows, "all").cells()
    place = list(heads).index("MACs saved %")
    assert [line[place] for line in lines] == ["0.0", "20.0", "50.0", "0.0", "25.0"]
    assert [line[0] for line in lines] == ["a", "", "", "b", ""]
