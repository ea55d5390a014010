"""Rank correlations and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vitrim.analysis.statistics import moments, spearman_ci, spearman_kendall
from vitrim.errors import VitrimError


def test_rank_correlations_by_counting() -> None:
    """Kendall's tau-b from concordant and discordant pairs, Spearman's rho from ranks."""
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, (2, 20))
    signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i in range(20) for j in range(i)]
    untied = [math.sqrt(sum(pair[side] != 0 for pair in signs)) for side in (0, 1)]
    found = spearman_kendall(x, y)
    assert found.kendall == pytest.approx(sum(a * b for a, b in signs) / math.prod(untied))
    ranks = [[np.mean([k for k, v in enumerate(sorted(one)) if v == value]) for value in one] for one in (x, y)]
    assert found.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert 0 <= found.spearman_p <= 1
    assert math.isnan(spearman_kendall([1, 1, 1], [1, 2, 3]).kendall)


@pytest.mark.parametrize(("x", "y"), [([1], [1]), ([1, 2], [1, 2, 3])])
def test_too_few_or_other_pairs(x: list[float], y: list[float]) -> None:
    with pytest.raises(VitrimError, match="two or more pairs"):
        spearman_kendall(x, y)


def bootstrapped(values: np.ndarray, statistic: Callable[[np.ndarray], Any], n: int, seed: int = 0) -> np.ndarray:
    """The ends of a 95 % percentile bootstrap interval, draw by draw: whole rows, with replacement."""
    generator, size = np.random.default_rng(seed), len(values)
    return np.quantile(
        [statistic(values[generator.integers(size, size=size)]) for _ in range(n)], [0.025, 0.975], axis=0
    )


def test_the_interval_of_the_mean_is_that_of_scipy_and_of_every_draw() -> None:
    values = np.random.default_rng(1).exponential(size=(60, 2))
    numbers = moments({"a": values[:, 0], "b": values[:, 1]}, n=4000)
    found = np.array([[numbers[f"{name}_{end}"] for name in "ab"] for end in ("low", "high")])
    expected = stats.bootstrap(
        (values,), np.mean, axis=0, method="percentile", n_resamples=4000, rng=0
    ).confidence_interval
    assert np.allclose(found, expected, atol=0.05)
    assert np.allclose(found, bootstrapped(values, lambda rows: rows.mean(0), 4000), atol=1e-12)
    assert numbers == moments({"a": values[:, 0], "b": values[:, 1]}, n=4000)


def test_rows_are_drawn_whole() -> None:
    pairs = np.stack([np.arange(30.0), np.arange(30.0)], 1)
    assert spearman_ci(pairs, n=20)[0] == pytest.approx(1)


@pytest.mark.parametrize("pairs", [np.random.default_rng(2).integers(0, 5, (15, 2)), np.ones((4, 2))])
def test_the_interval_of_spearman_is_that_of_every_draw(pairs: np.ndarray) -> None:
    found = spearman_ci(pairs, n=50, seed=3)
    expected = bootstrapped(pairs, lambda rows: spearman_kendall(*rows.T).spearman, 50, seed=3)
    assert np.allclose(found, expected, atol=1e-12, equal_nan=True)


def test_a_summary_has_the_population_standard_deviation() -> None:
    values = np.random.default_rng(4).exponential(size=(7, 2))
    found = moments({"a": values[:, 0], "b": values[:, 1]})
    assert [found["a"], found["b"]] == pytest.approx([fmean(column) for column in values.T])
    assert [found["a_std"], found["b_std"]] == pytest.approx([pstdev(column) for column in values.T])


def test_no_images_have_no_summary() -> None:
    with pytest.raises(VitrimError, match="of one image or more"):
        moments({"iou": []})
