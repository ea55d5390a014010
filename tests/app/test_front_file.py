"""The front of a search: the file that `vitrim tune` writes, and files that only look like it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vitrim.app.uploads import read_front
from vitrim.errors import VitrimError


def row(**changes: Any) -> dict[str, Any]:
    whole = {
        "target": "macs=0.5",
        "setting": "searched",
        "config": "tome:r=[1,2]",
        "share": 0.5,
        "scores": {"agree": 0.03, "feature": 0.2},
        "returned": True,
        "on_front": True,
    }
    return whole | changes


def file(*rows: Any, **tuned: Any) -> bytes:
    return json.dumps({"tuned": tuned, "rows": rows}).encode()


def test_agreement_where_the_file_has_it_and_damage_where_not() -> None:
    rows = row(), row(share=0.7, scores={"agree": 0.0}), row(share=0.8, scores={"agree": 0.1})
    front = read_front(file(*rows, images={"check": 64}))
    found = [(point.share, point.score, point.on_front) for point in front.points]
    assert found == [(0.5, 97, True), (0.7, 100, True), (0.8, 90, False)]
    assert (front.cost, front.measure) == ("MACs", "decided as by the dense model, %")
    assert front.about == "measured on 64 images"
    assert front.png.startswith(b"\x89PNG")
    damage = read_front(file(row(scores={"kl": 0.2}, target="speedup=1.5"), proxy="kl"))
    assert (damage.cost, damage.measure, damage.points[0].score) == ("latency", "damage (kl), less is better", 0.2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not valid JSON"),
        (b"\xff\xfe\x00", "it is not valid JSON"),
        (b"[" * 100_000, "it is not valid JSON"),
        (b"[]", "must be options by name"),
        (b'{"method": "tome", "options": {}}', "rows is missing; tuned is missing"),
        (file(), "must have at least 1 entries"),
        (file(*[row()] * 201), "must have at most 200 entries"),
        (file(row(), 3, proxy="kl"), "rows=3: must be options by name"),
        (file(row(), row(scores={"feature": 1}), proxy="kl"), "row 0 of the file has no score 'kl'"),
        (file(row(share="much")), "rows.0.share=much: must be a number"),
        (file(row(share=float("nan"))), "rows.0.share=nan: must be a finite number"),
        (file(row(share=10**400)), "rows.0.share=a number of 1329 bits"),
        (b" " * 1_000_001, "the file has 1.0 MB"),
    ],
    ids=range(13),
)
def test_other_files(content: bytes, message: str) -> None:
    with pytest.raises(VitrimError) as error:
        read_front(content)
    assert message in str(error.value)


def test_long_texts_are_cut() -> None:
    (point,) = read_front(file(row(config="x" * 5000))).points
    assert len(point.method) < 500
