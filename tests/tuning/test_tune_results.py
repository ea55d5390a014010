"""A search on a tiny model: its target, its images, its file, and its resume."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

import vitrim
from searches import search, thirds
from vitrim.engines.macs import profile_of
from vitrim.errors import VitrimError
from vitrim.tasks import make_task
from vitrim.tuning import Result, Target
from vitrim.tuning.cost import LatencyCost
from vitrim.tuning.proxy import PARTS, DatasetImages, ModelScorer
from vitrim.tuning.result import Trial
from vitrim.tuning.search import Search, SearchSpec

IMAGES = torch.randn(48, 3, 32, 32, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("macs_counted_once")


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5).eval()


def images() -> DatasetImages:
    return thirds(IMAGES, 4)


def find(model: VisionTransformer, method: str = "tome", **changes: Any) -> Result:
    return search(model, method, images(), **{"target": "macs=0.7", "evaluations": 9, **changes})


class Found(NamedTuple):
    """A search, the trials that it reported, and its study."""

    result: Result
    trials: list[Trial]
    study: Path


@pytest.fixture(scope="module")
def found(model: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Found:
    trials: list[Trial] = []
    study = tmp_path_factory.mktemp("search") / "study.jsonl"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = find(model, about={"data": "noise"}, store=study, on_trial=trials.append)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return Found(result, trials, study)


def check_target(model: VisionTransformer, result: Result) -> None:
    """Every trial meets the target, by the engine's count on images of the search."""
    counted = 32 if result.best.config.is_adaptive() else 8  # or all there are
    few = [batch.images for batch in images().sample("search", counted)]
    dense = profile_of(model, None, few).macs.total
    for trial in result.trials:
        assert trial.share == profile_of(model, trial.config, few).macs.total / dense
        assert trial.share <= 0.705
    assert result.best in (result.constant, result.searched)
    assert result.verdict.startswith("searched:" if result.better else "constant:")


@pytest.mark.slow
def test_every_trial_meets_the_target_by_the_engines_count(model: VisionTransformer, found: Found) -> None:
    check_target(model, found.result)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["topk", "atm"])
def test_so_it_does_where_stages_or_a_threshold_are_searched(model: VisionTransformer, method: str) -> None:
    check_target(model, find(model, method, evaluations=3))


def test_the_result_is_a_file_that_reduces_the_model(model: VisionTransformer, found: Found, tmp_path: Path) -> None:
    result = found.result
    result.save(tmp_path / "best.json")
    config = vitrim.parse_method(f"@{tmp_path / 'best.json'}")
    assert config.describe() == result.config.describe()
    tuned = json.loads((tmp_path / "best.json").read_text())["tuned"]
    assert tuned["returned"] == ("searched" if result.better else "constant")
    assert tuned["images"] == dict.fromkeys(PARTS, 16)
    assert tuned["data"] == "noise"
    reduction = vitrim.reduce_(model, config, record=True)
    try:
        model(IMAGES[:1])
        assert reduction.tokens_per_block == [17 - 16 + count for count in config.counts(16, 3) or ()]
    finally:
        vitrim.restore_(model)


def test_a_resumed_search_gives_the_same_study_bit_for_bit(
    model: VisionTransformer, found: Found, tmp_path: Path
) -> None:
    text = found.study.read_bytes()
    lines = text.splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[: len(lines) // 2]))
    resumed = find(model, about={"data": "noise"}, store=cut, resume=True)
    assert cut.read_bytes() == text
    assert resumed.record() == found.result.record()
    with pytest.raises(VitrimError, match=r"of another run: its target is macs=0.7"):
        find(model, store=cut, resume=True, target="macs=0.6")


def test_measurements_of_other_weights_are_not_taken_over(
    model: VisionTransformer, found: Found, tmp_path: Path
) -> None:
    """The same model, images and search, but one weight is another: its scores would be those of the first."""
    cut, before = tmp_path / "cut.jsonl", found.study.read_bytes()
    cut.write_bytes(before)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[1].mlp.fc1.weight[3, 5] += 1e-3
    with pytest.raises(VitrimError):
        find(other, about={"data": "noise"}, store=cut, resume=True)
    assert cut.read_bytes() == before
    assert find(copy.deepcopy(model), about={"data": "noise"}, store=cut, resume=True).record() == found.result.record()


@pytest.mark.slow
def test_a_speedup_is_predicted_from_times_that_a_study_keeps(model: VisionTransformer, tmp_path: Path) -> None:
    asked: list[int] = []
    model = copy.deepcopy(model).train()  # as timm makes them

    def timed(model: Any, configs: Sequence[Any], *rest: Any) -> tuple[Any, float]:
        """A machine whose time is that of the tokens, a tenth more when it is asked again."""
        assert not model.training
        asked.append(len(configs))
        slower = 1.1 if len(asked) > 1 else 1.0
        return np.array([slower * sum(config.counts(16, 3)) / 48 for config in configs]), 10.0

    how = {"target": "speedup=1.5", "store": tmp_path / "study", "evaluations": 3, "timer": timed}
    result = find(model, **how)
    assert isinstance(result.cost, LatencyCost)
    assert result.cost.error < 0.01
    for trial in result.trials:
        assert trial.share == pytest.approx(sum(trial.config.counts(16, 3) or ()) / 48, rel=0.01)
        assert trial.share <= 1.0 / 1.5
    constant, best = result.constant, result.best
    assert constant.measured == pytest.approx(1.1 * constant.share, rel=0.01)
    assert result.record()["tuned"]["reached"] == best.measured == pytest.approx(1.1 * best.share, rel=0.01)
    again = find(model, **how, resume=True)
    assert again.record() == result.record()
    assert len(asked) == 2  # settings to learn from, and the best ones once more
    assert model.training


def test_agreement_is_reached_as_cheaply_as_possible(model: VisionTransformer) -> None:
    result = find(model, target="agree=0.6", spec=SearchSpec(proxy="kl"), evaluations=10)
    scorer = ModelScorer(model, make_task("classification", 5), images())
    assert 1.0 - scorer([result.config], "selection", 0, 16)[0]["agree"].mean() >= 0.6


def test_a_constant_that_agrees_is_compared_anew() -> None:
    """Where the searched setting is no better and the constant one at its cost agrees too little."""

    class Stub(Search):
        trials: tuple[Any, ...] = ()  # type: ignore[assignment]

        def __init__(self) -> None:
            self.target = Target("agree", 0.9)

        def reaches(self, limit: float) -> bool:
            return True

        def explore(self, limit: float, evaluations: int) -> tuple[Any, Any]:
            return f"constant at {limit}", f"searched at {limit}"

        def agreement(self, trial: Any) -> float:
            return 1.0 if trial.startswith("searched") or float(trial.split()[-1]) > 0.7 else 0.0

        def check(self, constant: Any, searched: Any, trials: Any = None) -> Result:
            better = self.agreement(constant) == 1.0  # than a constant one that costs more, which says nothing
            levels: Any = {"of": constant}
            return Result(constant, searched, levels, better, (), levels, "kl", self.target, None)  # type: ignore[arg-type]

    result = Stub().run(8)
    assert 0.7 < float(str(result.constant).split()[-1]) < 0.73
    assert result.check["of"] == result.levels["of"] == result.constant
    assert result.best is result.constant


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "macs=1.5"}, "a share is above 0 and below 1"),
        ({"target": "speedup=0.5"}, "a speed-up is above 1"),
        ({"target": "speed=2"}, "unknown target 'speed'; did you mean 'speedup'"),
        ({"target": "macs"}, "cannot read the target 'macs'"),
        ({"target": "macs=0.01"}, "tome cannot go below .* and 1.0% are asked for"),
        ({"method": "none"}, "nothing to tune"),
    ],
)
def test_what_cannot_be_is_one_line(
    model: VisionTransformer, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """And leaves no study, whose next search would be another one."""
    with pytest.raises(VitrimError, match=message):
        find(model, store=tmp_path / "study.jsonl", **changes)
    assert not list(tmp_path.iterdir())


def test_trials_are_reported_as_they_end(found: Found) -> None:
    assert tuple(found.trials) == found.result.trials
    assert [trial.number for trial in found.trials] == list(range(len(found.trials)))
    assert Target.parse("macs=0.7") == found.result.target


@pytest.mark.slow
def test_a_search_whose_time_is_over_chooses_among_what_it_tried_and_resumes_as_it_ended(
    model: VisionTransformer, tmp_path: Path
) -> None:
    file = tmp_path / "study.jsonl"
    result = find(model, evaluations=60, spec=SearchSpec(minutes=1e-8), store=file)
    trials = result.trials
    assert {trial.source for trial in trials} == {"constant", "start"}  # the clock is asked after the starts
    text = file.read_bytes()
    assert b"time is over" in text
    again = find(model, evaluations=60, store=file, resume=True)  # with all the time in the world
    assert again.record() == result.record()
    assert file.read_bytes() == text
    longer = find(model, evaluations=len(trials) + 2, spec=SearchSpec(minutes=10.0))
    assert len(longer.trials) > len(trials)
