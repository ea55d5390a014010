"""The summary: what is joined in its picture, and scores by data with the best and worst of each keep rate."""

from __future__ import annotations

import numpy as np
import pytest

from made_tables import made_record
from vitrim.analysis.family import Tables
from vitrim.analysis.record import Record, titled
from vitrim.analysis.summary import by_data, draw_frontier, summary
from vitrim.errors import VitrimError


def of(method: str, right: float, seed: int, **header: object) -> Record:
    made = made_record(method, "none" if method == "dense" else "merge", seed, 4, right)
    return Record({**made.header, **header}, made.arrays)


def test_settings_of_one_method_are_joined_over_cost() -> None:
    """ATM's Figures 4 and 5: a line per method, and per schedule of it."""
    rows = {
        "dense": (4.6, 10.0, 0.8),
        "tome:r=8": (3.0, 8.0, 0.7),
        "tome:r=13": (2.0, 5.0, 0.6),
        "tome:r=[1,2,3]": (3.5, 9.0, 0.5),
    }
    records = [
        of(method, right, seed, gmacs=macs, ms=time, model="vit")
        for seed, (method, (macs, time, right)) in enumerate(rows.items())
    ]
    figure = draw_frontier(Tables({table.name: table for table in summary(titled(records)).tables}))
    over_macs, over_speed = figure.axes
    lines = {line.get_label(): line.get_xydata().round(3).tolist() for line in over_macs.lines}
    assert lines == {"dense": [[4.6, 80]], "tome": [[2.0, 60], [3.0, 70]], "tome, rising r": [[3.5, 50]]}
    speeds = {line.get_label(): line.get_xdata().tolist() for line in over_speed.lines}
    assert speeds["tome"] == [125, 200]
    untimed = [Record({key: value for key, value in one.header.items() if key != "ms"}, one.arrays) for one in records]
    figure = draw_frontier(Tables({table.name: table for table in summary(titled(untimed)).tables}))
    assert len(figure.axes) == 1
    assert draw_frontier(Tables({table.name: table for table in summary(titled(records[:1])).tables})) is None


def test_scores_by_data_name_the_best_and_worst_of_each_rate() -> None:
    """Tables 2 and 6 of the study: methods by rate and data; a multi-label score comes from the header."""
    high, low = "topk:keep_rate=0.9", "topk:keep_rate=0.25"
    records = [
        *(of("dense", right, 0, data="a.parquet", model=name) for right, name in ((0.5, "one"), (0.7, "base"))),
        of(high, 0.8, 1, data="a.parquet"),
        of("evit:keep_rate=0.9", 0.6, 2, data="a.parquet"),
        of("tome:r=8", 0.9, 3, data="a.parquet"),
        of(low, 0.2, 4, data="a.parquet"),
        of("dense", 0.5, 5, data="coco:b"),
        of(high, 0.4, 6, data="coco:b", score=61.5),
        of("evit:keep_rate=0.9", 0.4, 7, data="coco:b", score=62.5),
    ]
    [table] = by_data(records)
    found = {row["method"]: row for row in table.records()}
    assert found["dense"]["a"] == pytest.approx(70)  # the better of two
    assert (found[high]["a_place"], found["evit:keep_rate=0.9"]["a_place"]) == ("best 1", "worst 1")
    assert (found[high]["b_place"], found["evit:keep_rate=0.9"]["b_place"]) == ("worst 1", "best 1")
    assert (found[high]["b"], found[high]["rate"], found[low]["rate"]) == (61.5, 0.9, 0.25)
    assert found[low]["a_place"] is None  # alone at its rate
    assert found[low]["b"] is None
    assert [found[name]["above_dense"] for name in (high, low, "tome:r=8")] == [2, 0, 1]
    assert by_data(records[:4]) == []
    with pytest.raises(VitrimError, match="two records of topk"):
        by_data([*records, of(high, 0.1, 8, data="a.parquet")])
    assert np.isfinite([row["a"] for row in found.values()]).all()


@pytest.mark.parametrize(
    ("right", "weights", "doubted"), [(20, "given", True), (27, "given", False), (20, "random", False)]
)
def test_a_dense_model_that_guesses_is_named_below_the_table(right: int, weights: str, doubted: bool) -> None:
    """Half of 40 images of two classes, and two standard errors more, are 26.3 images."""
    first = np.zeros(40, np.int32)
    targets = np.where(np.arange(40) < right, 0, 1)
    header = {"method": "dense", "blocks": [], "num_layers": 0, "grid": [0, 0], "model": "vit", "weights": weights}
    arrays = {"ids": np.arange(40), "first": first, "targets": targets, "logits": np.zeros((40, 2), np.float32)}
    words = summary(titled([Record(header, arrays)])).notes
    assert any("right on 50.0 % of 40 images, as if by chance" in line for line in words) == doubted
