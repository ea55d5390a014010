"""Costs against what the measuring engine counts, and against planted coefficients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

import vitrim
from full_matrix import cells
from vitrim.core.registry import make_method, methods
from vitrim.engines.macs import profile_of
from vitrim.errors import VitrimError
from vitrim.measure.latency import Budget, time_interleaved
from vitrim.tuning.cost import Fit, LatencyCost, MacsCost, latency_fit, samples, timer_on
from vitrim.tuning.space import Space, quiet

IMAGES = torch.zeros(2, 3, 32, 32)
SOME = ("tome", "topk", "mctf", "cropr", "l2", "evo_vit")


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=4, embed_dim=16, depth=4, num_heads=2, num_classes=5).eval()


# a count each, stages, and tokens that are kept aside: what differs in the sums that are fitted
@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", cells(SOME, ("tome", "topk", "evo_vit")))
def test_macs_are_those_of_the_engine_and_the_quick_ones_are_near(model: VisionTransformer, name: str) -> None:
    assert name in methods()
    space = Space.of(model, name)
    with quiet():
        cost = MacsCost(model, space)
        dense = profile_of(model, None, IMAGES).macs.total
        for config in [space.constant(0.2), *samples(space, 3, seed=9)]:
            share = profile_of(model, config, IMAGES).macs.total / dense
            assert cost.share(config) == share
            assert cost.estimate(config) == pytest.approx(share, rel=0.01)


def test_a_method_that_adapts_is_counted_on_the_images(model: VisionTransformer) -> None:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    space = Space.of(model, "algm")
    cost = MacsCost(model, space, [images])
    config = make_method("algm", threshold=0.2)
    dense = profile_of(model, None, images).macs.total
    assert cost.share(config) == profile_of(model, config, [images]).macs.total / dense
    with pytest.raises(VitrimError, match="algm adapts to the content of the images"):
        MacsCost(model, space)


@pytest.mark.slow
def test_the_latency_of_a_method_that_adapts_follows_the_tokens_of_real_images(model: VisionTransformer) -> None:
    """A clock that counts the tokens that ATM leaves, by a loop over the images, is predicted."""
    images = list(torch.randn(4, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    space = Space.of(model, "atm")

    def milliseconds(config: Any) -> float:
        left = 0.0
        with torch.no_grad(), vitrim.reduced(model, config, record=True) as reduction:
            for batch in images:
                model(batch)
                left += sum(reduction.mean_tokens_per_block)
        return 3.0 + left / len(images)

    def clock(configs: Any) -> tuple[Any, float]:
        return np.array([milliseconds(config) / 100.0 for config in configs]), 100.0

    with quiet():
        counted = MacsCost(model, space, images)
        fit, dense_ms = latency_fit(space, clock, number=20, counted=counted)
        cost = LatencyCost(space, fit, counted=counted)
        configs = samples(space, 6, seed=5)
        counts = [milliseconds(config) for config in configs]
    assert len(set(counts)) > 1
    for config, expected in zip(configs, counts, strict=True):
        assert dense_ms * cost.share(config) == pytest.approx(expected, rel=0.01)


def test_planted_coefficients_are_recovered_and_errors_are_those_of_leaving_one_out() -> None:
    random = np.random.default_rng(0)
    terms = np.concatenate([np.ones((12, 1)), random.random((12, 3))], axis=1)
    planted = np.array([2.0, 0.5, -0.25, 1.0])
    assert Fit.of(terms, terms @ planted).coefficients == pytest.approx(planted)
    values = terms @ planted + random.normal(0.0, 0.05, 12)
    errors = []
    for out in range(12):
        rest = np.arange(12) != out
        solution = np.linalg.lstsq(terms[rest], values[rest], rcond=None)[0]
        errors.append(abs(values[out] - terms[out] @ solution) / values[out])
    fit = Fit.of(terms, values)
    assert fit.error == pytest.approx(np.mean(errors))
    assert fit.worst == pytest.approx(np.max(errors))


def test_latency_is_timed_on_this_device_and_states_its_error(
    model: VisionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(time_interleaved, budget=Budget(1, 0.0, 1, 0))
    monkeypatch.setattr("vitrim.tuning.cost.time_interleaved", few)
    space = Space.of(model, "tome")
    with quiet():
        fit, dense_ms = latency_fit(space, lambda configs: timer_on(["eager"])(model, configs, [IMAGES]), number=8)
    assert dense_ms > 0.0
    assert 0.0 <= fit.error <= fit.worst
    assert LatencyCost(space, fit).error == fit.error


def test_settings_that_are_timed_more_are_fitted_with_the_first_ones(model: VisionTransformer) -> None:
    """A clock that is off by up to a third asks for half as many again; the fit is the least squares of all."""
    asked: list[np.ndarray[Any, Any]] = []
    noise = np.random.default_rng(0)

    def timed(configs: Any) -> tuple[Any, float]:
        asked.append(noise.uniform(0.7, 1.3, len(configs)))
        return asked[-1], 10.0

    space = Space.of(model, "tome")
    with quiet():
        cost = LatencyCost(space, latency_fit(space, timed, number=12)[0])
        configs = samples(space, 18, 0)
    assert [len(each) for each in asked] == [12, 6]
    terms = []
    for config in configs:
        counts = np.array([space.patches, *(space.counts(config) or [])]) + space.num_prefix
        enter, leave = counts[:-1] / counts[0], counts[1:] / counts[0]
        terms.append([1.0, enter.sum(), (enter**2).sum(), leave.sum(), (leave < enter).sum()])
    solution = np.linalg.lstsq(np.array(terms), np.concatenate(asked), rcond=1e-10)[0]
    assert cost.share(configs[-1]) == pytest.approx(float(np.array(terms[-1]) @ solution), rel=1e-6)
