"""Measures of lost information against libraries and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from scipy.stats import entropy, kendalltau

from vitrim.analysis.families.loss import concordance, cosine_distance, kl_nats, merging_error, spread_in_groups
from vitrim.errors import VitrimError


def test_distances_are_those_of_scipy() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 4, 3, 7))
    found = cosine_distance(a, b)
    p, q = np.abs(a), np.abs(b)
    for place in np.ndindex(4, 3):
        assert found[place] == pytest.approx(cosine(a[place], b[place]), abs=1e-12)
        assert kl_nats(p, q)[place] == pytest.approx(entropy(p[place], q[place]), abs=1e-12)
    assert np.isnan(cosine_distance(np.zeros(3), np.ones(3)))
    assert kl_nats([1, 0], [0, 1]) == np.inf


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 999))
def test_the_error_of_a_pair_is_definition_2_within_theorem_1(n_i: int, n_j: int, seed: int) -> None:
    x_i, x_j = (x / np.linalg.norm(x) for x in np.random.default_rng(seed).normal(size=(2, 5)))
    merged = (n_i * x_i + n_j * x_j) / (n_i + n_j)
    distance = cosine(x_i, x_j)
    found = merging_error([3 * x_i, x_j], [n_i, n_j], [0, 0])  # a token's length does not matter
    assert found.error == pytest.approx(n_i * cosine(x_i, merged) + n_j * cosine(x_j, merged), abs=1e-9)
    assert found.least == pytest.approx(n_i * n_j / (n_i + n_j) * distance, abs=1e-9)
    assert found.most == pytest.approx(2 * n_i * n_j / (n_i + n_j) * distance, abs=1e-9)


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 999))
def test_errors_of_groups_are_sums_over_their_members(images: int, tokens: int, groups: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, sizes = random.normal(size=(images, tokens, 4)), random.integers(1, 9, (images, tokens))
    labels, merged = random.integers(-1, groups, (images, tokens)), random.normal(size=(images, groups, 4))
    found, spread = merging_error(x, sizes, labels), spread_in_groups(x, sizes, labels, merged)
    for image in range(images):
        unit = x[image] / np.linalg.norm(x[image], axis=-1, keepdims=True)
        error = squared = apart = length = 0.0
        for group in range(groups):
            members = np.flatnonzero(labels[image] == group)
            if len(members):
                mean = np.average(unit[members], axis=0, weights=sizes[image, members])
                error += sum(sizes[image, i] * cosine(unit[i], mean) for i in members)
                squared += sum(sizes[image, i] * ((unit[i] - mean) ** 2).sum() for i in members)
                apart += sum(sizes[image, i] * ((x[image, i] - merged[image, group]) ** 2).sum() for i in members)
                length += sum(sizes[image, i] * (x[image, i] ** 2).sum() for i in members)
        assert found.error[image] == pytest.approx(error, abs=1e-9)
        assert found.most[image] == pytest.approx(squared, abs=1e-9)
        assert found.least[image] - 1e-9 <= found.error[image] <= found.most[image] + 1e-9
        if length:
            assert spread[image] == pytest.approx(apart / length, abs=1e-9)
        else:
            assert np.isnan(spread[image])


def test_sizes_and_groups_are_checked() -> None:
    with pytest.raises(VitrimError, match="a size and a group of every token"):
        merging_error(np.ones((3, 2)), [1, 1], [0, 0, 0])


@pytest.mark.parametrize("seed", range(5))
def test_concordance_is_kendalls_tau_without_ties(seed: int) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, 20))
    assert concordance(a, b) == pytest.approx((1 + kendalltau(a, b).statistic) / 2)
    a[3], b[5] = np.nan, np.nan
    known = np.isfinite(a) & np.isfinite(b)
    assert concordance(a, b) == pytest.approx((1 + kendalltau(a[known], b[known]).statistic) / 2)
    assert np.isnan(concordance([1, np.nan], [1, 2]))
