"""The decisions of `vitrim optimize` by hand: what races, what is timed, what is scored, what is handed over.

A `Race` here has no model: its three measurements (`times`, `losses`, `file_losses`) are tables of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from vitrim.core.registry import parse_method
from vitrim.data import ImageDataset
from vitrim.engines.engine import FileEngine
from vitrim.engines.formats.pt2 import PT2
from vitrim.errors import VitrimError
from vitrim.measure.store import Store
from vitrim.tuning import optimize_race as racing
from vitrim.tuning.halving import Evaluator
from vitrim.tuning.optimize_race import PLAIN, Candidate, Race, ScoredSetting, Setting
from vitrim.tuning.optimize_report import in_words
from vitrim.tuning.proxy import DatasetImages

IMAGES = 200


def score(kl: float, loss: float, error: float = 0.0, images: int = IMAGES) -> dict[str, float]:
    return {"loss": loss, "loss_error": error, "kl": kl, "images": images}


def engine(label: str, precision: str = "fp32") -> Any:
    return SimpleNamespace(label=label, precision=precision)


def setting(name: str, size: int | None = None) -> Setting:
    return Setting(parse_method(name), size)


FAST = engine("fast")


@dataclass
class Tables:
    """What is measured: milliseconds and losses by the name of a method, or of a dense file's engine and precision."""

    ms: dict[str, float] = field(default_factory=dict)
    lost: dict[str, dict[str, float]] = field(default_factory=dict)
    timed: list[str] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    quartile: float = 0.99
    batch_size: int = 32

    def key(self, setting: Any, on: Any) -> str:
        return f"{on.label} {on.precision}" if setting == Setting() else setting.name

    def times(self, pairs: Any, what: str) -> list[dict[str, float]]:
        names = [self.key(*pair) for pair in pairs]
        self.timed += names
        found = []
        for name in names:
            ratio = self.ms[names[0]] / self.ms[name]
            found.append({"p50_ms": self.ms[name], "speedup": ratio, "speedup_q1": ratio * self.quartile})
        return found

    def file_losses(self, candidates: Any, part: str) -> list[dict[str, float]]:
        names = [self.key(one.setting, one.engine) for one in candidates]
        self.scored += names
        return [self.lost[name] for name in names]

    def losses(self, settings: Any, part: str = "search") -> list[dict[str, float]]:
        self.scored += [one.name for one in settings if one.name not in self.scored]
        return [self.lost[one.name] for one in settings]

    def images(self, part: str) -> int:
        return IMAGES

    def __call__(self, configs: Any, part: str, start: int, stop: int, *seen: Any) -> list[Any]:
        """The divergence of every image, for the race."""
        return [{"kl": np.full(stop - start, self.lost[config.describe()]["kl"])} for config in configs]


def race(tables: Tables, *, labels: bool = True, engines: Any = (FAST,)) -> Any:
    images = SimpleNamespace(
        count=lambda part: IMAGES, batches=lambda *_: [SimpleNamespace(images=torch.zeros(4, 3, 2, 2))]
    )
    made = Race(None, None, SimpleNamespace(labels=labels), images, engines, 1, None, None, lambda text: None)
    made.times, made.losses, made.file_losses = tables.times, tables.losses, tables.file_losses
    made.evaluator = Evaluator(tables, Store(None), "kl")  # type: ignore[arg-type]
    return made


def schedule(name: str, kind: str, *shares: float) -> Any:
    """Settings topk:keep_rate=SHARE of a method of this kind, mildest first."""
    base = SimpleNamespace(kind=kind)
    at = {share: parse_method(f"topk:keep_rate={share - len(name) / 1000:.4f}") for share in shares}
    shares = {config.describe(): share for share, config in at.items()}
    cost = SimpleNamespace(share=lambda config: shares[config.describe()])
    return SimpleNamespace(name=name, space=SimpleNamespace(base=base), cost=cost, at=lambda share: at.get(share))


DENSE = Candidate(Setting(), FAST, {"p50_ms": 10.0, "speedup": 2.0, **score(0.0, 0.0)})


def reduced(tables: Tables, settings: Any, *, bound: float = 0.02, speedup: float | None = None, **how: Any) -> Any:
    """What is chosen of settings (share of the MACs, name, KL, loss), mildest first, of one schedule; the race."""
    made = race(tables, **how)
    made.slope = 0.5
    made.known = {"one": [ScoredSetting(share, setting(name), score(kl, loss)) for share, name, kl, loss in settings]}
    return made.reduced(DENSE, bound, speedup), made


SETTINGS = [
    (0.9, "topk:keep_rate=0.9", 0.001, 0.0),
    (0.8, "topk:keep_rate=0.8", 0.004, 0.005),
    (0.7, "topk:keep_rate=0.7", 0.010, 0.010),
    (0.6, "topk:keep_rate=0.6", 0.030, 0.015),
    (0.5, "topk:keep_rate=0.5", 0.080, 0.040),
]
LOSSES = {name: score(kl, loss) for _, name, kl, loss in SETTINGS}
MS = {"fast fp32": 8.0, **{name: 8.0 * share for share, name, *_ in SETTINGS}}


STRONGEST = "topk:keep_rate=0.5"


# ---- the dense file --------------------------------------------------------------------------------------------------


def test_the_fastest_dense_file_within_the_bound() -> None:
    """Faster ones lose too much, PyTorch is no file, and what fp32 files lose is nothing."""
    engines = [engine("a"), engine("b"), engine("b", "bf16"), engine("b", "int8")]
    tables = Tables(
        ms={"eager fp32": 3.0, "a fp32": 9.0, "b fp32": 8.0, "b bf16": 6.0, "b int8": 4.0},
        lost={"b bf16": score(0.004, 0.001), "b int8": score(0.5, 0.03)},
    )
    made = race(tables, engines=engines)
    found = made.dense(0.01)
    assert (found.engine.label, found.engine.precision) == ("b", "bf16")
    assert [row["p50_ms"] for row in made.rows] == [3.0, 9.0, 8.0, 6.0, 4.0]
    assert [row["loss"] for row in made.rows] == [0.0, 0.0, 0.0, 0.001, 0.03]
    assert tables.scored == ["b bf16", "b int8"]
    assert made.dense(0.003).engine.precision == "fp32"  # slope 1: 0.004 nats are too many
    with pytest.raises(VitrimError, match="no file of these engines is within the bound"):
        race(tables, engines=engines[3:]).dense(0.01)


# ---- what races ------------------------------------------------------------------------------------------------------


def scored(schedules: Any, lost: Any, monkeypatch: pytest.MonkeyPatch, kept: int = 1) -> Any:
    for name, value in {"SHARES": (0.9, 0.7), "RACED_AT": 0.7, "KEPT": kept}.items():
        monkeypatch.setattr(racing, name, value)
    made = race(Tables(lost=lost))
    made.schedules = lambda configs: schedules
    made.score([])
    return made


def test_the_best_of_the_race_and_the_best_that_prunes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruning may win by time where merging wins by MACs: its best goes on, though others are before it."""
    schedules = [schedule(name, kind, 0.9, 0.7) for name, kind in (("a", "prune"), ("bb", "merge"), ("ccc", "prune"))]
    kl = {"a": 0.3, "bb": 0.1, "ccc": 0.2}
    lost = {
        one.at(share).describe(): score(kl[one.name] * (1 - share), 0.0) for one in schedules for share in (0.9, 0.7)
    }
    assert list(scored(schedules, lost, monkeypatch).known) == ["bb", "ccc"]
    assert list(scored(schedules, lost, monkeypatch, kept=2).known) == ["bb", "ccc"]  # not twice
    assert list(scored(schedules[1:2], lost, monkeypatch).known) == ["bb"]
    assert [share for share, *_ in scored(schedules, lost, monkeypatch).known["bb"]] == [0.9, 0.7]


@pytest.mark.parametrize("kls", [(0.1, 0.2), (0.02, 0.28)])
def test_slope_is_loss_per_nat(kls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of exactly 0.5 per nat give 0.5, whatever the divergences; settings beyond 0.3 nats do not count."""
    one = schedule("a", "merge", 0.9, 0.7)
    far = schedule("bb", "merge", 0.7)
    settings = dict(zip((0.9, 0.7), kls, strict=True))
    lost = {one.at(share).describe(): score(kl, 0.5 * kl) for share, kl in settings.items()}
    lost[far.at(0.7).describe()] = score(0.31, 0.9)
    assert scored([one, far], lost, monkeypatch, kept=2).slope == pytest.approx(0.5)


def test_slope_is_one_image_at_the_largest_divergence_where_none_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = schedule("a", "merge", 0.9, 0.7)
    lost = {one.at(0.9).describe(): score(0.05, 0.0), one.at(0.7).describe(): score(0.25, 0.0)}
    assert scored([one], lost, monkeypatch).slope == pytest.approx(1 / IMAGES / 0.25)


# ---- the bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "kl", "loss", "error", "expected"),
    [
        (True, 0.04, 0.0, 0.0, True),  # 0.5 per nat: 2 points, as many as may be lost
        (True, 0.041, 0.0, 0.0, False),
        (True, 0.01, 0.03, 0.01, True),  # the loss is within its error of the bound
        (True, 0.01, 0.031, 0.01, False),
        (False, 9.0, 0.02, 0.0, True),  # disagreement is known well enough
        (False, 0.0, 0.021, 0.01, False),
    ],
)
def test_what_fits(labels: bool, kl: float, loss: float, error: float, expected: bool) -> None:
    made = race(Tables(), labels=labels)
    made.slope = 0.5
    assert made.fits(score(kl, loss, error), 0.02) is expected


@pytest.mark.parametrize(
    ("kl", "loss", "expected"),
    [
        (0.13, 0.02, True),  # 0.1 nats are free, and 0.03 cost 1.5 points
        (0.13, 0.021, False),  # the loss itself, error or not
        (0.15, 0.0, False),
    ],
)
def test_what_fits_at_another_size(monkeypatch: pytest.MonkeyPatch, kl: float, loss: float, expected: bool) -> None:
    made = race(Tables())
    made.slope = 0.5
    monkeypatch.setattr(Race, "free", lambda self, part: 0.1)
    assert made.fits(score(kl, loss, 0.01), 0.02, 208) is expected


# ---- what is timed, scored and chosen --------------------------------------------------------------------------------


def test_the_two_strongest_that_fit_are_timed_and_the_fastest_is_taken() -> None:
    tables = Tables(MS, LOSSES)
    chosen, made = reduced(tables, SETTINGS)
    assert tables.timed == ["fast fp32", "topk:keep_rate=0.6", "topk:keep_rate=0.7"]
    assert chosen.name == "topk:keep_rate=0.6"
    assert [row["saved"] for row in made.rows] == [pytest.approx(0.4), pytest.approx(0.3)]


def test_times_are_those_of_the_dense_row_over_the_ratio_of_the_own_run() -> None:
    """The dense file took 10 ms in its run and 8 beside the methods."""
    _, made = reduced(Tables(MS, LOSSES), SETTINGS)
    rows = {row["method"]: row for row in made.rows}
    row = rows["topk:keep_rate=0.6"]
    assert (row["own_p50_ms"], row["p50_ms"]) == (pytest.approx(4.8), pytest.approx(6.0))


def test_what_the_precision_loses_is_taken_off_the_bound() -> None:
    """Of 2 points the dense file takes one: settings beyond one point are not timed."""
    tables = Tables(MS, LOSSES)
    made = race(tables)
    made.slope = 0.5
    made.known = {"one": [ScoredSetting(share, setting(name), score(kl, loss)) for share, name, kl, loss in SETTINGS]}
    dense = Candidate(Setting(), FAST, {"p50_ms": 10.0, "speedup": 2.0, **score(0.02, 0.0)})
    made.reduced(dense, 0.02, None)
    assert sorted(tables.timed) == ["fast fp32", "topk:keep_rate=0.7", "topk:keep_rate=0.8"]


def test_what_the_precision_disagrees_is_taken_off_without_labels() -> None:
    tables = Tables(MS, LOSSES)
    made = race(tables, labels=False)
    made.known = {"one": [ScoredSetting(share, setting(name), score(kl, loss)) for share, name, kl, loss in SETTINGS]}
    made.reduced(Candidate(Setting(), FAST, {"p50_ms": 10.0, "speedup": 2.0, **score(9.0, 0.012)}), 0.02, None)
    assert sorted(tables.timed) == ["fast fp32", "topk:keep_rate=0.8", "topk:keep_rate=0.9"]


def test_a_setting_behind_one_that_does_not_fit_is_left_alone() -> None:
    """Losses of few images go up and down; a stronger setting is not trusted where a milder one loses too much."""
    tables = Tables(MS, LOSSES)
    settings = [*SETTINGS[:1], (0.8, "topk:keep_rate=0.8", 0.5, 0.2), *SETTINGS[2:]]
    chosen, _ = reduced(tables, settings)
    assert tables.timed == ["fast fp32", "topk:keep_rate=0.9"]
    assert chosen.name == "topk:keep_rate=0.9"


def test_nothing_is_timed_where_nothing_fits() -> None:
    tables = Tables(MS, LOSSES)
    assert reduced(tables, [(0.9, "topk:keep_rate=0.9", 0.5, 0.2)])[0] is None
    assert tables.timed == []


def test_what_is_not_clearly_faster_is_not_scored() -> None:
    tables = Tables({**MS, "topk:keep_rate=0.6": 7.95}, LOSSES)  # its quartile is below 1
    chosen, _ = reduced(tables, SETTINGS)
    assert (tables.scored, chosen.name) == (["topk:keep_rate=0.7"], "topk:keep_rate=0.7")
    tables = Tables({**MS, "topk:keep_rate=0.6": 9.0, "topk:keep_rate=0.7": 9.0}, LOSSES)
    assert reduced(tables, SETTINGS)[0] is None
    assert tables.scored == []


def test_a_file_that_loses_too_much_on_other_images_is_not_taken() -> None:
    tables = Tables(MS, {**LOSSES, "topk:keep_rate=0.6": score(0.030, 0.05)})
    chosen, made = reduced(tables, SETTINGS)
    assert chosen.name == "topk:keep_rate=0.7"
    rows = {row["method"]: row for row in made.rows}
    assert (rows["topk:keep_rate=0.6"]["loss"], rows["topk:keep_rate=0.6"]["scored_on"]) == (0.05, "selection")


def test_the_speed_is_reached_with_the_least_loss() -> None:
    """The two mildest whose MACs promise 1.3 times are timed; the one that has it and loses least is taken."""
    tables = Tables(MS, LOSSES)
    chosen, _ = reduced(tables, SETTINGS, speedup=1.3)
    assert sorted(tables.timed) == ["fast fp32", "topk:keep_rate=0.6", "topk:keep_rate=0.7"]
    assert chosen.name == "topk:keep_rate=0.7"
    slow = Tables({**MS, "topk:keep_rate=0.7": 7.0}, LOSSES)  # 1.14 times, though its MACs promise 1.43
    assert reduced(slow, SETTINGS, speedup=1.3)[0].name == "topk:keep_rate=0.6"


def test_where_the_speed_is_not_had_the_strongest_setting_is_timed() -> None:
    """An engine may gain less than MACs promise, so what they promise does not end the search."""
    slow = Tables({**MS, "topk:keep_rate=0.7": 7.0, "topk:keep_rate=0.6": 7.0}, LOSSES)
    chosen, _ = reduced(slow, SETTINGS, speedup=1.3)
    assert slow.timed == ["fast fp32", *(f"topk:keep_rate={rate}" for rate in (0.6, 0.7)), "fast fp32", STRONGEST]
    assert chosen.name == STRONGEST
    # none promises it, and what is reached is known all the same
    far = Tables(MS, LOSSES)
    chosen, made = reduced(far, SETTINGS, speedup=3.0)
    assert (chosen, far.timed) == (None, ["fast fp32", STRONGEST])
    assert (made.fastest["method"], made.fastest["speedup"]) == (STRONGEST, pytest.approx(2.0))
    made.rows.insert(0, {"method": "dense", "p50_ms": 20.0, "speedup": 1.0})
    assert in_words(made, DENSE, None, score(0.0, 0.0), 3.0).endswith(
        "; 3 times the speed of the dense file is not reached: the fastest setting here, topk:keep_rate=0.5, has 2.00 "
        "times, so the file is of the dense model"
    )
    # a strongest setting that was timed already is not timed again
    near = Tables({**MS, STRONGEST: 7.0}, LOSSES)
    assert reduced(near, SETTINGS[4:], speedup=1.5)[0] is None
    assert near.timed == ["fast fp32", STRONGEST]
    slower = Tables({**MS, STRONGEST: 9.0}, LOSSES)
    _, made = reduced(slower, SETTINGS[4:], speedup=1.5)
    made.rows.insert(0, {"method": "dense", "p50_ms": 20.0, "speedup": 1.0})
    words = in_words(made, DENSE, None, score(0.0, 0.0), 1.5)
    assert "1.5 times the speed of the dense file is not reached: no setting here is faster than it, so" in words


def test_no_more_are_timed_and_scored_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five schedules the three with the fewest MACs are timed, and the two fastest of these scored."""
    monkeypatch.setattr(racing, "TIMED", 3)
    monkeypatch.setattr(racing, "FINALISTS", 2)
    ms = {"fast fp32": 8.0, **dict(zip((name for _, name, *_ in SETTINGS), (7.0, 2.0, 5.0, 6.0, 4.0), strict=True))}
    tables = Tables(ms, {name: score(0.0, 0.0) for _, name, *_ in SETTINGS})
    made = race(tables)
    made.known = {name: [ScoredSetting(share, setting(name), score(0.0, 0.0))] for share, name, *_ in SETTINGS}
    chosen = made.reduced(DENSE, 0.02, None)
    assert sorted(tables.timed[1:]) == [f"topk:keep_rate={rate}" for rate in (0.5, 0.6, 0.7)]
    assert tables.scored == ["topk:keep_rate=0.5", "topk:keep_rate=0.7"]
    assert chosen.name == "topk:keep_rate=0.5"


def test_at_a_speed_those_that_lose_least_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three that have it, in the order of their MACs, the middle one loses least on the first third."""
    monkeypatch.setattr(racing, "FINALISTS", 1)
    tables = Tables(MS, LOSSES)
    made = race(tables)
    lost = {0.5: 0.03, 0.6: 0.01, 0.7: 0.02}
    made.known = {
        str(share): [ScoredSetting(share, setting(f"topk:keep_rate={share}"), score(0.1, loss))]
        for share, loss in lost.items()
    }
    assert made.reduced(DENSE, 0.0, 1.3).name == "topk:keep_rate=0.6"
    assert tables.scored == ["topk:keep_rate=0.6"]


# ---- image sizes -----------------------------------------------------------------------------------------------------

SIDES = {256: 1.3, 208: 0.85, 192: 0.7, 176: 0.6, 160: 0.5}
"""Shares of the MACs at 224 px."""
LOSS_ALONE = ((256, 0.12, -0.01), (208, 0.13, 0.002), (192, 0.14, 0.006), (176, 0.2, 0.03), (160, 0.5, 0.1))
ALONE = {f"dense at {side} px": score(kl, loss) for side, kl, loss in LOSS_ALONE}


@dataclass
class Half:
    """The cost of a method whose keep rate is its share of the MACs."""

    def share(self, config: Any) -> float:
        return float(config.keep_rate)

    def settled(self, config: Any) -> Any:
        return config


def sized(lost: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[Any, Tables]:
    """A race at the sizes above in which two schedules are known at 224 px, before other sizes are scored."""
    monkeypatch.setattr(racing, "SHARES", (0.9, 0.8, 0.7))
    monkeypatch.setattr(racing, "AGAIN", 1)
    monkeypatch.setattr(racing, "within", lambda space, point, cost, share: parse_method(f"topk:keep_rate={share}"))
    tables = Tables(MS, {**LOSSES, **ALONE, **lost})
    made = race(tables, **how)
    made.slope, made.others = 0.5, dict.fromkeys(SIDES)
    made._macs = {None: 100, **{side: round(100 * share) for side, share in SIDES.items()}}
    made._space = lambda config, size: (SimpleNamespace(base=config), Half())
    for name, reach in (("weak", 2), ("strong", 3)):
        made.known[name] = [
            ScoredSetting(share, setting(one), score(kl, loss)) for share, one, kl, loss in SETTINGS[:reach]
        ]
        base = SimpleNamespace(describe=lambda name=name: name, kind="prune")
        made.raced[name] = racing.RacedSchedule(SimpleNamespace(base=base), Half(), None, "all")  # type: ignore[arg-type]
    made.known["strong, all"] = made.known.pop("strong")
    made.known["weak, all"] = made.known.pop("weak")
    made.raced = {f"{name}, all": one for name, one in made.raced.items()}
    return made, tables


def merged(side: int, *losses: tuple[float, float]) -> dict[str, Any]:
    return {
        f"topk:keep_rate={share} at {side} px": score(kl, loss)
        for share, (kl, loss) in zip((0.9, 0.8, 0.7), losses, strict=False)
    }


LOST = {
    **merged(208, (0.135, 0.002), (0.14, 0.003), (0.15, 0.004)),
    **merged(192, (0.15, 0.007), (0.25, 0.05)),
    **merged(256, (0.13, 0.0), (0.14, 0.0), (0.15, 0.001)),
}


def test_methods_are_tried_at_the_smallest_sizes_within_the_bound_and_at_the_next_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best schedule alone, milder settings first, and not beyond one that loses too much (0.8 at 192 px)."""
    made, tables = sized(LOST, monkeypatch)
    made.score_sizes(DENSE, 0.02, None)
    assert tables.scored[:5] == list(ALONE)
    assert sorted(tables.scored[5:]) == sorted(LOST)
    assert [one.share for one in made.known["strong, all at 208 px"]] == pytest.approx(
        [0.85 * 0.9, 0.85 * 0.8, 0.85 * 0.7]
    )
    assert [one.setting.size for one in made.known[PLAIN]] == [208, 192, 176, 160]


def test_divergence_that_a_change_of_size_costs_by_itself_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the dense model at the next larger size, on the same part of the images; else at the next smaller one."""
    made, _ = sized({}, monkeypatch)
    parts = {"search": 0.12, "selection": 0.1}
    made.losses = lambda settings, part="search": (
        [score(parts[part], 0.0)] if settings[0].size == 256 else [score(0.05, 0.0)]
    )
    assert made.expected(score(0.16, 0.9), 192) == pytest.approx(0.5 * 0.04)
    assert made.expected({**score(0.16, 0.9), "scored_on": "selection"}, 192) == pytest.approx(0.5 * 0.06)
    assert made.expected(score(0.08, 0.9), 192) == 0.0
    assert made.expected(score(0.08, 0.9)) == pytest.approx(0.04)
    del made.others[256]
    made.losses = lambda settings, part="search": [score({208: 0.06}[settings[0].size], 0.0)]
    assert made.expected(score(0.16, 0.9), 192) == pytest.approx(0.5 * 0.1)


def test_a_smaller_image_is_one_more_candidate_and_is_scored_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 px with a method wins here; 192 px alone is scored beside it, though slower ones than four are not."""
    monkeypatch.setattr(racing, "FINALISTS", 1)
    made, tables = sized(LOST, monkeypatch)
    tables.ms |= dict.fromkeys((*ALONE, *LOST), 8.0)
    tables.ms |= {"topk:keep_rate=0.9 at 192 px": 4.0, "dense at 192 px": 5.0}
    made.score_sizes(DENSE, 0.02, None)
    before = len(tables.scored)
    chosen = made.reduced(DENSE, 0.02, None)
    assert chosen.setting == setting("topk:keep_rate=0.9", 192)
    assert tables.scored[before:] == ["topk:keep_rate=0.9 at 192 px", "dense at 192 px"]
    assert {"dense at 208 px", "dense at 192 px"} < set(tables.timed)
    row = chosen.row
    assert (row["method"], row["img_size"]) == ("topk:keep_rate=0.9 at 192 px", 192)
    assert row["saved"] == pytest.approx(1 - 0.7 * 0.9)


def test_a_smaller_image_beyond_the_bound_is_compared_with_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """208 px, the largest of the smaller ones, loses too much on the first third; it is fastest, and it fits later."""
    made, tables = sized(LOST, monkeypatch)
    tables.ms |= dict.fromkeys((*ALONE, *MS), 8.0)
    tables.ms |= {"dense at 208 px": 4.0, "topk:keep_rate=0.6": 5.0, "fast fp32": 8.0}
    monkeypatch.setattr(Race, "_promising", lambda self, scored, room, speedup: [])
    made.known = {PLAIN: [ScoredSetting(0.85, Setting(None, side), score(0.2, 0.05)) for side in (208, 192)]}
    assert made.reduced(DENSE, 0.02, None) is None
    assert (made.plain_fits, made.plain.name) == (False, "dense at 208 px")
    assert tables.timed == ["fast fp32", "dense at 208 px"]
    found = ScoredSetting(0.6, setting("topk:keep_rate=0.6"), score(0.01, 0.0))
    monkeypatch.setattr(Race, "_promising", lambda self, scored, *_: [one for one in scored if one is found])
    made.known["one"] = [found]
    before, tables.lost["dense at 208 px"] = len(tables.scored), score(0.0, 0.0)
    chosen = made.reduced(DENSE, 0.02, None)
    assert chosen.name == "topk:keep_rate=0.6"
    assert tables.scored[before:] == ["topk:keep_rate=0.6", "dense at 208 px"]
    assert made.plain.row["scored_on"] == "selection"
    made.reduced(DENSE, 1.0, 1.2)
    assert made.plain_fits  # at a speed there is no bound to exceed
    assert tables.timed[-2:] == ["fast fp32", "topk:keep_rate=0.6"]


def test_of_more_sizes_within_the_bound_methods_are_tried_at_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "SIZES", 1)
    made, tables = sized(LOST, monkeypatch)
    made.score_sizes(DENSE, 0.02, None)
    assert {name.rpartition(" at ")[2] for name in tables.scored[5:]} == {"192 px", "256 px"}


def test_images_without_a_method_are_timed_however_many_methods_have_fewer_macs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(racing, "TIMED", 3)
    made, tables = sized(LOST, monkeypatch)
    tables.ms |= dict.fromkeys((*ALONE, *LOST), 7.0)
    made.score_sizes(DENSE, 0.02, None)
    made.reduced(DENSE, 0.02, None)
    assert tables.timed == ["fast fp32", "topk:keep_rate=0.7 at 208 px", "dense at 192 px", "dense at 208 px"]


def test_without_other_sizes_nothing_more_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    made, tables = sized({}, monkeypatch)
    made.others = {}
    made.score_sizes(DENSE, 0.02, None)
    assert (tables.scored, PLAIN in made.known) == ([], False)


def test_at_a_speed_the_two_mildest_sizes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all shares, since only the strongest may have the speed."""
    every = {**LOST, **merged(192, (0.15, 0.007), (0.25, 0.05), (0.4, 0.2))}
    made, tables = sized(every, monkeypatch)
    made.score_sizes(DENSE, 1.0, 1.3)
    assert sorted(tables.scored[5:]) == sorted(every)


# ---- the sentence ----------------------------------------------------------------------------------------------------


def test_the_sentence() -> None:
    """12 ms in PyTorch, 6 of the dense file; 5 of the reduced one, so 2.4 times as fast as PyTorch."""
    made = race(Tables())
    made.rows = [{"p50_ms": 12.0}]
    dense = Candidate(Setting(), engine("onnxruntime", "bf16"), {"p50_ms": 6.0, "speedup": 2.0})
    row = {"p50_ms": 5.0, "speedup": 1.2, "saved": 0.35}
    chosen = Candidate(setting("topk:keep_rate=0.6"), FAST, row)
    assert in_words(made, dense, chosen, score(0.1, 0.0123, 0.004)) == (
        "12.0 ms per batch of 1 as you run it now (PyTorch, fp32); 6.0 with ONNX Runtime in bf16; 5.0 with "
        "topk:keep_rate=0.6 (35 % of the MACs saved): 2.4 times as fast, 1.2 points of top-1 fewer on 200 images not "
        "searched on (standard error 0.4)"
    )
    made.plain = Candidate(Setting(None, 208), FAST, {"speedup": 1.1, **score(0.02, 0.003, 0.002)})
    chosen.row.update(score(0.1, 0.01, 0.003))
    assert in_words(made, dense, chosen, score(0.1, 0.0123, 0.004)).endswith(
        " (standard error 0.4); 208 px without a method would give 1.10 times the speed of the dense file at 0.3 "
        "points of top-1 fewer, and this gives 1.20 at 1.0 points of top-1 fewer, on the images it was chosen by "
        "(standard errors 0.2 and 0.3)"
    )
    made.plain_fits = False
    assert (
        "; 208 px without a method, which exceeded the bound on other images, would give 1.10 times the speed"
        in in_words(made, dense, chosen, score(0.1, 0.0123, 0.004))
    )
    made.plain = chosen  # it is itself one without a method
    assert "would give" not in in_words(made, dense, chosen, score(0.1, 0.0123, 0.004))
    made.loss.labels = False
    assert in_words(made, dense, None, score(0.1, -0.004)) == (
        "12.0 ms per batch of 1 as you run it now (PyTorch, fp32); 6.0 with ONNX Runtime in bf16, 2.0 times as fast, "
        "0.4 points of agreement more on 200 images not searched on (standard error 0.0); reducing tokens does not pay "
        "here within the bound, so the file is of the dense model"
    )


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_int8_is_calibrated_on_images_of_the_whole_first_third() -> None:
    """Of 600 sorted images the first third is every third; 64 of it, from the first to the last."""
    images = torch.arange(600.0)[:, None, None, None].expand(600, 1, 2, 2)
    parts = DatasetImages(TensorDataset(images, torch.arange(600)), 200, 32)
    made = Race(None, None, SimpleNamespace(labels=True), parts, (FAST,), 1, None, None, lambda text: None)
    found = made.calibration()[:, 0, 0, 0]
    assert (len(found), found[0], found[-1]) == (64, 0.0, 597.0)
    assert {6.0, 9.0, 12.0} >= set(found.diff().tolist())
    assert made._some(4)[:, 0, 0, 0].tolist() == [0.0, found[21], found[42], 597.0]


def test_a_file_of_bytes_is_calibrated_on_the_first_third_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last third is for checking: nothing may be chosen by it, and no range of int8 either."""
    data = ImageDataset([bytes([number]) for number in range(90)], [0] * 90)
    given: list[Any] = []
    monkeypatch.setattr(racing, "export", lambda *_, images, **__: given.append(images))
    parts = DatasetImages(data, 30, 32)
    made = Race(None, None, SimpleNamespace(), parts, (FAST,), 1, None, tmp_path, lambda text: None)
    made.take_bytes(Candidate(Setting(), FileEngine(PT2), {}), data)
    assert [given[0].images[place][0] for place in range(len(given[0]))] == list(range(0, 90, 3))
