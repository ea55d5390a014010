"""The search against brute force over all schedules of a tiny model, under noise, and stopped and resumed."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitrim
from full_matrix import FULL_MATRIX, cells
from vitrim.errors import VitrimError
from vitrim.tuning.cost import Cost, within
from vitrim.tuning.proxy import Part, Scores
from vitrim.tuning.result import Result, Target, Trial
from vitrim.tuning.search import Search
from vitrim.tuning.space import Space
from vitrim.tuning.strategy import make_strategy
from vitrim.tuning.study import Evaluator, Study

TARGET = Target("macs", 0.615)
LIMIT = TARGET.limit
SPACE = Space(vitrim.ToMe(), num_layers=3, grid=(3, 4), num_prefix=1)

Damage = Callable[[vitrim.MethodConfig], float]


class TokenCost(Cost):
    """Tokens that the blocks compute, over those of the dense model."""

    unit = "macs"

    def share(self, config: vitrim.MethodConfig) -> float:
        counts = SPACE.counts(config)
        assert counts is not None
        return sum(count + 1 for count in counts) / (13 * 3)


class TimedCost(TokenCost):
    """A prediction that a clock corrects: by so much for every setting in ``wrong``, by nothing for others."""

    error = 0.02

    def __init__(self, wrong: dict[str, float]) -> None:
        self.wrong = wrong

    def measure(self, configs: Sequence[vitrim.MethodConfig]) -> list[float]:
        return [self.share(config) * self.wrong.get(SPACE.key(config), 1.0) for config in configs]


class Simulated:
    """Scores made of a planted damage, a part that an image has under every setting, and noise of its own."""

    batch_size = 8

    def __init__(self, damage: Damage, noise: float, seed: int = 0, images: int = 64) -> None:
        self.damage, self.noise, self.seed, self.count = damage, noise, seed, images
        self.calls = 0

    def images(self, part: Part) -> int:
        return self.count

    def __call__(self, configs: Sequence[vitrim.MethodConfig], part: Part, start: int, stop: int) -> list[Scores]:
        self.calls += len(configs)
        return [self._scores(config, part, start, stop) for config in configs]

    def _scores(self, config: vitrim.MethodConfig, part: Part, start: int, stop: int) -> Scores:
        # str keys of a process differ from run to run: the noise follows from the tokens instead
        key = [self.seed, len(part), *(SPACE.counts(config) or [])]
        own = np.random.default_rng(key).normal(0.0, self.noise, self.count)
        common = np.random.default_rng([self.seed, len(part)]).normal(1.0, 0.3, self.count)
        values = (self.damage(config) + common + own)[start:stop].astype(np.float32)
        return {"feature": values, "kl": values}


def planted(config: vitrim.MethodConfig) -> float:
    """Merging early is harmful, twice in a row too: the best schedule is neither constant nor a slope."""
    counts = SPACE.counts(config)
    assert counts is not None
    removed = -np.diff([12, *counts])
    return float((removed * [0.09, 0.01, 0.03]).sum() + 0.004 * (removed**2).sum())


def run(
    scorer: Simulated,
    file: Path | None = None,
    *,
    resume: bool = False,
    seed: int = 0,
    evaluations: int = 40,
    search: str = "evolution",
) -> tuple[Result, list[Trial]]:
    seen: list[Trial] = []
    study = Study(file, {"seed": seed}, resume=resume)
    search_ = Search(
        *(SPACE, TokenCost(), Evaluator(scorer, study), TARGET), strategy=make_strategy(search), seed=seed,
        on_trial=seen.append,
    )  # fmt: skip
    return search_.run(evaluations), seen


def brute_force(damage: Damage) -> tuple[float, str]:
    """The least damage of all schedules within the limit, and the tokens they leave."""
    every = [vitrim.ToMe(r=list(each)) for each in itertools.product(range(7), repeat=3)]
    fitting = [config for config in every if TokenCost().share(config) <= LIMIT]
    assert len(fitting) > 30
    best = min(fitting, key=damage)
    return damage(best), SPACE.key(best)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_planted_optimum_is_found_and_returned(seed: int) -> None:
    """In 30 evaluations."""
    least, key = brute_force(planted)
    result, seen = run(Simulated(planted, noise=0.0), seed=seed, evaluations=30)
    assert result.better
    assert planted(result.best.config) == pytest.approx(least, abs=1e-9)
    assert SPACE.key(result.best.config) == key
    assert len(seen) == len(result.trials) <= 30
    assert all(trial.share <= LIMIT for trial in seen)
    assert len({SPACE.key(trial.config) for trial in seen}) == len(seen), "nothing is scored twice"


@pytest.mark.slow
def test_a_setting_that_is_slower_than_predicted_is_not_chosen() -> None:
    def search_(wrong: dict[str, float]) -> Search:
        return Search(SPACE, TimedCost(wrong), Evaluator(Simulated(planted, 0.0), Study(None, {})), TARGET)

    _, first = search_({}).explore(LIMIT, 30)
    assert first.measured == first.share
    constant, second = (slow := search_({SPACE.key(first.config): 1.2})).explore(LIMIT, 30)
    assert constant.measured == constant.share
    assert second.config != first.config
    others = [trial for trial in slow.trials if trial.config != first.config]
    assert planted(second.config) == min(planted(trial.config) for trial in others)


@pytest.mark.slow
def test_what_is_nearest_is_chosen_where_every_finalist_is_too_slow() -> None:
    exact = Search(SPACE, TokenCost(), Evaluator(Simulated(planted, 0.0), Study(None, {})), TARGET)
    exact.explore(LIMIT, 30)
    slow = {SPACE.key(trial.config): 1.5 for trial in exact.trials}
    search_ = Search(SPACE, TimedCost(slow), Evaluator(Simulated(planted, 0.0), Study(None, {})), TARGET)
    _, chosen = search_.explore(LIMIT, 30)
    ranked = sorted(search_.trials, key=lambda trial: planted(trial.config))[:4]  # no noise: selection is by damage
    assert chosen.measured == min(1.5 * trial.share for trial in ranked)


@pytest.mark.parametrize("search", cells(["random", "tpe", "gp"], ["random", "tpe"]))
def test_every_search_comes_near_the_planted_optimum(search: str) -> None:
    least, _ = brute_force(planted)
    result, seen = run(Simulated(planted, noise=0.0), search=search, evaluations=18)
    constant = planted(result.constant.config)
    assert planted(result.best.config) - least <= 0.35 * (constant - least)
    assert all(trial.share <= LIMIT for trial in seen)


@pytest.mark.slow  # `test_race.py` never drops the best
def test_racing_keeps_the_best_of_a_generation() -> None:
    """Under noise of a fifth of the gaps: in at most 2 of 100 searches the best start is left behind."""
    lost = 0
    for seed in range(100):
        scorer = Simulated(planted, noise=0.02, seed=seed)
        _, seen = run(scorer, seed=seed, evaluations=6)
        best = min(seen, key=lambda trial: planted(trial.config))
        lost += best.images < scorer.count
    assert lost <= 2


def test_a_gain_beyond_noise_is_found_under_noise() -> None:
    result, _ = run(Simulated(planted, noise=0.05, images=200))
    assert result.better
    assert planted(result.best.config) < planted(result.constant.config)


@pytest.mark.full  # searches twenty times; `test_the_planted_optimum_is_found_and_returned` sees the choice
def test_pure_noise_gives_the_constant_schedule() -> None:
    """All settings do the same damage: at least 95 % of the searches return the constant one."""
    searches = 100 if FULL_MATRIX else 20
    searched = [
        run(Simulated(lambda config: 0.0, 0.2, seed), seed=seed, evaluations=24)[0].better for seed in range(searches)
    ]
    assert sum(searched) <= searches // 20


def test_a_gain_in_the_proxy_that_costs_kl_is_not_returned() -> None:
    class Two(Simulated):
        def _scores(self, config: vitrim.MethodConfig, part: Part, start: int, stop: int) -> Scores:
            values = super()._scores(config, part, start, stop)["feature"]
            return {"feature": values, "kl": -values}

    result, _ = run(Two(planted, noise=0.0))
    assert result.check["feature"].better
    assert not result.better
    assert result.best is result.constant


def test_bad_candidates_stop_early_and_the_best_is_scored_on_all_images() -> None:
    result, seen = run(Simulated(planted, noise=0.01))
    assert {trial.images for trial in seen} > {64}
    assert result.constant.images == result.searched.images == 64


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("search", "evaluations"), [("evolution", 16), ("random", 10), ("tpe", 8), ("gp", 7)])
def test_a_study_that_was_stopped_anywhere_ends_as_one_that_was_not(
    tmp_path: Path, search: str, evaluations: int
) -> None:
    scorer, how = Simulated(planted, noise=0.05), {"search": search, "evaluations": evaluations}
    whole, seen = run(scorer, tmp_path / "whole.jsonl", **how)
    assert {trial.source for trial in seen} >= ({search} - {"evolution"} | {"constant", "start"})
    text = (tmp_path / "whole.jsonl").read_bytes()
    lines = text.splitlines(keepends=True)
    # all of them write the same log
    step = 1 if FULL_MATRIX else max(len(lines) // (8 if search == "evolution" else 3), 1)
    for cut in range(1, len(lines), step):
        part = tmp_path / "part.jsonl"
        part.write_bytes(b"".join(lines[:cut]) + lines[cut][: len(lines[cut]) // 2])  # killed while it wrote
        again = Simulated(planted, noise=0.05)
        resumed, _ = run(again, part, resume=True, **how)
        assert part.read_bytes() == text
        assert resumed == whole
        measured = sum("scored" in json.loads(line) for line in lines[cut:])
        assert again.calls == measured, "what is in the study is not measured again"


def test_two_seeds_search_differently_and_one_seed_does_not(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        _, seen = run(Simulated(planted, noise=0.05), tmp_path / name, seed=seed, evaluations=16)
        texts.append([trial.config.describe() for trial in seen])
    assert texts[0] == texts[1] != texts[2]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_study_is_refused_where_it_does_not_belong(tmp_path: Path) -> None:
    scorer, file = Simulated(planted, noise=0.05), tmp_path / "study.jsonl"
    run(scorer, file, evaluations=8)
    with pytest.raises(VitrimError, match="is there already"):
        run(scorer, file, evaluations=8)
    with pytest.raises(VitrimError, match="another search: its seed is 0, and this one's 3"):
        run(scorer, file, resume=True, seed=3, evaluations=8)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    with pytest.raises(VitrimError, match="line 2, is damaged"):
        run(scorer, file, resume=True, evaluations=8)
    file.write_text("something else\n")
    with pytest.raises(VitrimError, match="line 1, is damaged"):
        run(scorer, file, resume=True, evaluations=8)
    file.write_text('{"rows": []}\n')
    with pytest.raises(VitrimError, match="is not a study"):
        run(scorer, file, resume=True, evaluations=8)


INSTEAD: tuple[Any, ...] = (None, True, 3, -1.5, "", "x", "AAAA", [], [[]], {}, {"feature": 3}, {"feature": "AAAA!"})


def damaged(line: bytes) -> Iterator[bytes]:
    """A line of a study with every kind of damage to each of its entries."""
    row = json.loads(line)
    yield from (b"", line[: len(line) // 2], b"\x00" * 40, b"\xff\xfe", b"[" * 100_000, b"3", b"null", b"[1]")
    for key, value in row.items():
        yield json.dumps({name: one for name, one in row.items() if name != key}).encode()
        yield json.dumps({(f"_{name}" if name == key else name): one for name, one in row.items()}).encode()
        for other in INSTEAD:
            if other != value:
                yield json.dumps({**row, key: other}).encode()
    for name, text in row["scores"].items() if "scored" in row else ():
        for other in (text[4:], text[:-1], f"{text}AAAA", f"\n{text}", text.replace("A", "*", 1) + "*"):
            yield json.dumps({**row, "scores": {**row["scores"], name: other}}).encode()


def refusal(file: Path, **how: Any) -> str:
    """What a search that is resumed from the file says of it; nothing where it ends well."""
    try:
        run(Simulated(planted, noise=0.05), file, resume=True, **how)
    except VitrimError as error:
        return str(error)
    return ""


def test_a_damaged_line_is_refused_by_its_number_and_a_damaged_end_is_measured_again(tmp_path: Path) -> None:
    """Whatever is wrong with a line of any kind: one line, and the file as it was; or the same study as without."""
    file, part, how = tmp_path / "whole.jsonl", tmp_path / "part.jsonl", {"evaluations": 3}
    run(Simulated(planted, noise=0.05), file, **how)
    lines = file.read_bytes().splitlines()
    scored = next(place for place, line in enumerate(lines) if b'"scored"' in line)
    tried = {True: 0, False: 0}
    for place in (scored, len(lines) - 2):
        for other in damaged(lines[place]):
            for rest in (lines[place + 1 :], []):
                given = b"".join(line + b"\n" for line in [*lines[:place], other, *rest])
                part.write_bytes(given)
                refused = refusal(part, **how)
                if refused:
                    assert re.fullmatch(rf".*part\.jsonl, line {place + 1}, is [^\n]*", refused), (other, refused)
                    assert part.read_bytes() == given
                else:
                    assert not rest, other
                    assert part.read_bytes() == file.read_bytes()
                tried[bool(refused)] += 1
    assert tried[True] > 100
    assert tried[False] > 50


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_a_limit_out_of_reach_names_the_one_that_is_within() -> None:
    low = Target("macs", 0.05)
    with pytest.raises(VitrimError, match=r"tome cannot go below [\d.]+% of the dense model's macs"):
        Search(SPACE, TokenCost(), Evaluator(Simulated(planted, 0.0), Study(None, {})), low).run(10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("limit", [0.5, 0.62, 0.8, 0.95])
def test_a_point_gives_the_mildest_setting_within_the_limit(limit: float) -> None:
    """Against a walk over all scales."""
    random = np.random.default_rng(0)
    for _ in range(6):
        point = tuple(random.random(3).tolist())
        found = within(SPACE, point, TokenCost(), limit)
        scales = np.linspace(0.0, 1.0 / min(point), 501)
        shares = [TokenCost().share(SPACE.config(point, scale)) for scale in scales]
        fitting = [share for share in shares if share <= limit]
        if found is None:
            assert not fitting
        else:
            assert max(fitting) - 1e-9 <= TokenCost().share(found) <= limit


@pytest.mark.parametrize(("batch_size", "images", "rounds"), [(1, 8, [2, 4, 8]), (1, 2, [2]), (8, 64, [8, 32, 64])])
def test_no_round_compares_single_images(batch_size: int, images: int, rounds: list[int]) -> None:
    scorer = Simulated(planted, 0.0, images=images)
    scorer.batch_size = batch_size
    assert Evaluator(scorer, Study(None, {})).rounds() == rounds


# ---- the same images on both sides -----------------------------------------------------------------------------------


def _known(whole: list[float], *others: list[float]) -> Search:
    """A search whose first trial has seen all 8 images, and whose other ones the first few."""
    scorer = Simulated(planted, noise=0.0)
    scorer.count = len(whole)
    search_ = Search(SPACE, TokenCost(), Evaluator(scorer, Study(None, {})), TARGET)
    for number, seen in enumerate([whole, *others]):
        values = np.array(seen, dtype=np.float32)
        point, scores = (1.0, 1.0, 1.0), {"feature": float(values.mean())}
        search_.trials.append(Trial(number, vitrim.ToMe(r=number), point, 0.5, "start", len(seen), scores))
        search_._seen.append(values)
    return search_


def test_a_candidate_is_compared_on_the_images_that_it_has_seen() -> None:
    """Damage falls from image to image: that of the first ones is not more than that of all."""
    whole = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    search_ = _known(whole)
    best = search_.trials[0]
    like = {"feature": np.array([8.0, 6.9, 6.1, 5.0], dtype=np.float32)}
    worse = {"feature": np.array([9.0, 8.1, 6.9, 6.0], dtype=np.float32)}
    assert search_._survivors([0, 1], [like, worse], best) == [0]
    assert search_._survivors([0, 1], [worse, like], None) == [0, 1]  # without a best, against the first


def test_what_a_stopped_candidate_would_have_come_to_follows_from_the_images_that_both_saw() -> None:
    """Half a point above the best on its first four images, so half a point above its mean of 4.5."""
    search_ = _known([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [8.5, 7.5, 6.5, 5.5], [7.0, 7.0])
    assert [(one.value, one.full) for one in search_._observations()] == [(4.5, True), (5.0, False), (4.0, False)]


def test_a_measured_cost_may_be_over_the_limit_by_the_error_of_predictions() -> None:
    """2 %: what costs 1 % more than the limit is taken, what costs 3 % more is not."""
    search_ = _known([1.0] * 8, [2.0] * 8, [3.0] * 8)
    search_.cost = TimedCost({})
    ranked = [search_.trials[1], search_.trials[2]]
    share = search_.cost.share(search_.trials[1].config)
    assert search_._first_within(ranked, share / 1.01).number == 1
    assert search_._first_within(ranked, share / 1.03).number == 2


def test_an_estimate_that_is_too_low_is_corrected_until_the_cost_is_within() -> None:
    """The mildest setting within the limit lies just below it, though every estimate is a tenth too low."""

    class Low(TokenCost):
        def estimate(self, config: vitrim.MethodConfig) -> float:
            return 0.9 * self.share(config)

    for limit in (0.5, 0.62, 0.8):
        for point in (None, (1.0, 0.5, 0.25)):
            found = within(SPACE, point, Low(), limit)
            assert found is not None
            assert limit - 0.15 < TokenCost().share(found) <= limit
