"""Shapes of settings: their points, what a search tries of them, and a search that ends by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

import vitrim
from vitrim.errors import VitrimError
from vitrim.tuning import Result, search
from vitrim.tuning.search import SearchSpec
from vitrim.tuning.space import Space, normal, slope
from vitrim.tuning.strategy import Curves, Observation, RandomSearch, Slopes, bend_of, curve, make_strategy

SPACE = Space(vitrim.ToMe(), num_layers=6, grid=(8, 8), num_prefix=1)
IMAGES = torch.randn(6, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=3).eval()


def by_tokens(model: object, configs: Sequence[vitrim.MethodConfig], *rest: object) -> tuple[Any, float]:
    """A machine whose time is that of the tokens: costs nothing to ask."""
    return np.array([sum(config.counts(16, 3) or ()) / 48 for config in configs]), 10.0


def find(model: VisionTransformer, method: str = "tome", **changes: Any) -> Result:
    given = {"target": "speedup=1.3", "timer": by_tokens, "evaluations": 10, **changes}
    return search(model, method, list(IMAGES), **given)


def is_curve(point: tuple[float, ...]) -> bool:
    return bool(np.allclose(curve(*bend_of(point), len(point)), point, atol=1e-6))


def test_slopes_are_nine_and_all_of_them_are_starts() -> None:
    points = Slopes().starts(SPACE)
    assert len(points) == 9
    assert points[4] == (1.0,) * 6
    assert points == [slope(s / 4, 6) for s in range(-4, 5)]
    steps = [np.diff(point) for point in points]
    assert all(np.allclose(step, step[0]) for step in steps)
    assert list(make_strategy("evolution", "slope").propose(SPACE, [], 0)) == []


@pytest.mark.parametrize("bred", [True, False])
def test_curves_lead_to_curves_and_follow_from_the_seed(bred: bool) -> None:
    strategy = Curves(bred=bred)
    seen = [Observation(curve(a, -a, 6), vitrim.ToMe(), abs(a - 1.0), True) for a in (-1.0, 0.5, 1.0, 2.0, 2.5)]
    first, again, other = (list(islice(strategy.propose(SPACE, seen, seed), 8)) for seed in (0, 0, 1))
    assert first == again != other
    assert all(is_curve(point) for _, point in first)
    assert {source for source, _ in first} <= ({"mutation", "crossover"} if bred else {"random"})
    starts = strategy.starts(SPACE)
    assert len(starts) == 4
    assert all(is_curve(point) for point in starts)
    assert [float(np.sign(point[-1] - point[0])) for point in sorted(starts)] == [1.0, 1.0, -1.0, -1.0]


def test_a_free_search_is_what_it_was() -> None:
    strategy = make_strategy("random")
    assert isinstance(strategy, RandomSearch)
    assert strategy.starts(SPACE) == SPACE.starts()


@pytest.mark.parametrize("shape", ["slope", "curve"])
def test_every_trial_of_a_search_has_the_shape(model: VisionTransformer, shape: str) -> None:
    result = find(model, spec=SearchSpec(shape=shape))
    assert 2 < len(result.trials) <= 10
    for trial in result.trials:
        straight = bool(np.allclose(np.diff(trial.point, 2), 0.0))
        assert straight if shape == "slope" else is_curve(trial.point)
    assert result.about["shape"] == shape


def test_stages_of_a_shape_are_those_of_the_method(model: VisionTransformer) -> None:
    result = find(model, "topk:blocks=[1,2]", spec=SearchSpec(shape="slope"), evaluations=3)
    assert {len(trial.point) for trial in result.trials} == {2}
    free, placed = (Space(vitrim.TopK(), 12, (8, 8), 1, placed=placed) for placed in (False, True))
    assert (free.blocks, placed.blocks) == (tuple(range(12)), (3, 6, 9))


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("slopes", "evolution", "unknown shape 'slopes'; did you mean 'slope'"),
        ("curve", "gp", "shape curve is searched by evolution or random, and gp moves"),
        ("slope", "tpe", "shape slope is searched"),
    ],
)
def test_wrong_shapes(name: str, strategy: str, message: str) -> None:
    with pytest.raises(VitrimError, match=message):
        make_strategy(strategy, name)


@pytest.mark.slow
def test_a_search_whose_time_is_over_chooses_among_what_it_tried_and_resumes_as_it_ended(
    model: VisionTransformer, tmp_path: Path
) -> None:
    study = tmp_path / "study.jsonl"
    result = find(model, evaluations=60, spec=SearchSpec(minutes=1e-8), study=study)
    trials = result.trials
    assert {trial.source for trial in trials} == {"constant", "start"}  # the clock is asked after the starts
    text = study.read_bytes()
    assert b'{"ended": "its time is over"}' in text
    again = find(model, evaluations=60, study=study, resume=True)  # with all the time in the world
    assert again.record() == result.record()
    assert study.read_bytes() == text
    assert "shape" not in result.about
    longer = find(model, evaluations=len(trials) + 2, spec=SearchSpec(minutes=10.0))
    assert len(longer.trials) > len(trials)
    with pytest.raises(VitrimError, match="needs some time"):
        find(model, spec=SearchSpec(minutes=0.0))


def test_normal_points_are_curves_of_their_own() -> None:
    assert bend_of(normal([1.0] * 6)) == pytest.approx((0.0, 0.0))
