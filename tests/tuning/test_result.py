"""What is said of trials: which is returned, what is progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vitrim
from vitrim.tuning.halving import Difference
from vitrim.tuning.result import Result, Target, Trial, front_rows
from vitrim.tuning.tune import _improvements

CONSTANT, SEARCHED = vitrim.ToMe(r=4), vitrim.ToMe(r=[8, 4, 0])


def trial(number: int, score: float, config: Any = CONSTANT) -> Trial:
    return Trial(number, "tome", config, (1.0, 1.0), 0.6, "tpe", 8, {"feature": score})


@pytest.mark.parametrize("better", [True, False])
def test_the_setting_that_is_returned_is_marked_on_a_front(better: bool) -> None:
    """The searched one only where it is better beyond noise."""
    pair = trial(0, 2.0), trial(1, 1.0, SEARCHED)
    found = {"feature": Difference(-1.0, 0.1, 8)}
    result: Any = Result(*pair, found, better, pair, {}, "feature", Target("macs", 0.6), SimpleNamespace(unit="macs"))
    damage = {CONSTANT.describe(): 2.0, SEARCHED.describe(): 1.0}
    evaluator: Any = SimpleNamespace(
        proxy="feature", whole=lambda configs, part: [{"feature": np.array([damage[configs[0].describe()]])}]
    )
    rows = front_rows([result], evaluator)
    assert [(row["setting"], row["returned"]) for row in rows] == [("constant", not better), ("searched", better)]
    assert [row["on_front"] for row in rows] == [False, True]  # as cheap, and less damage
    same: Any = Result(pair[0], pair[0], {}, False, pair, {}, "feature", Target("macs", 0.6), result.cost)
    assert [row["returned"] for row in front_rows([same], evaluator)] == [True]


def test_progress_names_the_first_of_every_method_and_what_is_better_than_all_before() -> None:
    lines: list[tuple[int, int, str]] = []
    heard = _improvements(lambda *line: lines.append(line), 6, "feature")
    for number, score in ((0, 2.0), (1, 3.0), (2, 1.0), (0, 5.0), (1, 4.0), (2, 4.5)):
        heard(trial(number, score))
    assert [(done, most, bool(text)) for done, most, text in lines] == [
        (1, 6, True), (2, 6, False), (3, 6, True), (4, 6, True), (5, 6, True), (6, 6, False),
    ]  # fmt: skip
    assert lines[2][2] == "feature 1 at 40.0 % saved: tome:r=4 (tpe)"
