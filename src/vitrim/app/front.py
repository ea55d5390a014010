"""The ``front.json`` of ``vitrim tune``, read with suspicion, and its picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitrim.app.records import Front, Point
from vitrim.errors import VitrimError
from vitrim.plots.style import DENSE_COLOUR, OKABE_ITO, SMALL, encoded, panels
from vitrim.tuning.result import non_dominated

__all__ = ["read_front"]

LARGEST = 1_000_000
MOST_POINTS = 200
LONGEST = 400
AGREE = "agree"
UNITS = {"macs": "MACs", "speedup": "latency"}


def read_front(content: bytes) -> Front:
    """Read the bytes of a ``front.json``.

    Where the file says in which share of the images a setting decides as the dense model does, the scores are that
    share in percent; else they are its damage, less being better. The file has no accuracy: a search needs no labels.
    The front is that of these scores.

    Raises:
        VitrimError: it is too large, no JSON, or not the front of a search.

    Example:
        >>> row = {"target": "macs=0.5", "setting": "constant", "config": "tome:r=8", "share": 0.5,
        ...        "scores": {"agree": 0.02}, "returned": True, "on_front": True}
        >>> front = read_front(json.dumps({"tuned": {"proxy": "feature"}, "rows": [row]}).encode())
        >>> front.measure, front.points[0].score
        ('decided as by the dense model, %', 98.0)
    """
    if len(content) > LARGEST:
        raise VitrimError(f"the file has {len(content) / 1e6:.1f} MB; a front.json has far less than 1 MB")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise VitrimError(
            "cannot read the file: it is no JSON; give the front.json of `vitrim tune --front`"
        ) from error
    rows = found.get("rows") if isinstance(found, dict) else None
    tuned = found.get("tuned") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not isinstance(tuned, dict) or not 1 <= len(rows) <= MOST_POINTS:
        raise VitrimError("this JSON is no front of searches; give the front.json of `vitrim tune --front`")
    score = AGREE if all(_has(row, AGREE) for row in rows) else str(tuned.get("proxy", "feature"))
    points = [_point(row, number, score) for number, row in enumerate(rows)]
    # of what is shown; the file's own front is that of the score which the search minimised
    kept = non_dominated([(one.share, -one.score if score == AGREE else one.score) for one in points])
    points = [replace(one, on_front=on) for one, on in zip(points, kept, strict=True)]
    kind = points[0].target.partition("=")[0]
    measure = "decided as by the dense model, %" if score == AGREE else f"damage ({_short(score)}), less is better"
    cost = UNITS.get(kind, "cost")
    png = _picture(points, cost, measure)
    words = f"{len(points)} settings: {measure} over {cost} in % of the dense model; the table has the numbers"
    return Front("; ".join(_about(tuned)), cost, measure, points, png, words)


def _has(row: Any, score: str) -> bool:
    return isinstance(row, dict) and isinstance(row.get("scores"), dict) and score in row["scores"]


def _point(row: Any, number: int, score: str) -> Point:
    """One row of the file.

    Raises:
        VitrimError: an entry is missing, or of another kind.
    """
    if not _has(row, score):
        raise VitrimError(f"row {number} of the file has no score '{_short(score)}'")
    values = [row.get("share"), row["scores"][score]]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in values):
        raise VitrimError(f"row {number} of the file: share and scores must be numbers")
    share, value = (float(one) for one in values)
    texts = [_short(row.get(key)) for key in ("target", "setting", "config")]
    shown = 100 * (1 - value) if score == AGREE else value
    return Point(texts[0], texts[1], texts[2], share, shown, False, row.get("returned") is True)


def _about(tuned: Mapping[str, Any]) -> Iterator[str]:
    made = tuned.get("made_for")
    name = made.get("model") or made.get("class") if isinstance(made, dict) else None
    yield from (f"{key}: {_short(value)}" for key, value in (("model", name), ("base", tuned.get("base"))) if value)
    images = tuned.get("images")
    if isinstance(images, dict) and isinstance(images.get("check"), int):
        yield f"measured on {images['check']} images"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _picture(points: Sequence[Point], cost: str, measure: str) -> bytes:
    """The points by kind, those of the front joined by a dotted line, the dense model as a star."""
    figure, (axis,) = panels(1, across=1, size=(5.6, 3.4), above=0.0)
    for setting, colour, marker in (("constant", OKABE_ITO[0], "o"), ("searched", OKABE_ITO[5], "D")):
        own = [(100 * one.share, one.score) for one in points if one.setting == setting]
        if own:
            axis.plot(*zip(*own, strict=True), marker, color=colour, label=setting, zorder=3)
    dense = 100.0 if measure.startswith("decided") else 0.0
    line = sorted([*((100 * one.share, one.score) for one in points if one.on_front), (100.0, dense)])
    axis.plot(*zip(*line, strict=True), ":", color=DENSE_COLOUR, linewidth=1, label="front", zorder=2)
    axis.plot([100.0], [dense], "*", color=DENSE_COLOUR, markersize=12, label="dense", zorder=4)
    axis.set_xlabel(f"{cost}, % of the dense model", fontsize=SMALL)
    axis.set_ylabel(measure, fontsize=SMALL)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=SMALL, frameon=False)
    return encoded(figure)
