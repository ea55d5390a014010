"""Measures of clusterings against scikit-learn and the reference, and stages put together and taken apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score, homogeneity_completeness_v_measure

import golden_files as golden
from golden_files import Reference
from vitrim.analysis.families.patterns import ami, completeness, compose, homogeneity, permuted, relabel, v_measure
from vitrim.errors import VitrimError


@golden.cases(["analysis/metrics_a"], arrays=["clus/*"])
def test_the_reference_clusters(ref: Reference) -> None:
    """Cluster 1 is one stage after cluster 0."""
    labels = [ref["clus/0/stage_a"], ref["clus/0/stage_b"]]
    for stage in "01":
        if stage == "1":
            labels = [compose(one, ref[f"clus/1/stage_{side}"]) for one, side in zip(labels, "ab", strict=True)]
        a, b = labels
        ref.check(f"clus/{stage}/abs_a", a)
        ref.check(f"clus/{stage}/abs_b", b)
        found = [float(measure(a, b)) for measure in (homogeneity, completeness, v_measure)]
        ref.check(f"clus/{stage}/hcv_true_a_pred_b", torch.tensor(found, dtype=torch.float64))
        if stage == "0":
            turned = [float(measure(b, a)) for measure in (homogeneity, completeness, v_measure)]
            ref.check("clus/0/hcv_code_true_b_pred_a", torch.tensor(turned, dtype=torch.float64))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_measures_are_those_of_scikit_learn(images: int, patches: int, ka: int, kb: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    a, b = (generator.integers(-1, k - 1, (images, patches)) for k in (ka, kb))
    expected = np.array([homogeneity_completeness_v_measure(one, other) for one, other in zip(a, b, strict=True)])
    found = np.stack([homogeneity(a, b), completeness(a, b), v_measure(a, b)], 1)
    assert np.allclose(found, expected, atol=1e-9)
    assert np.allclose(v_measure(a, b), v_measure(b, a), atol=1e-12)
    adjusted = [adjusted_mutual_info_score(one, other) for one, other in zip(a, b, strict=True)]
    assert np.allclose(ami(a, b), adjusted, atol=1e-12)


def test_permuted_labels_keep_their_sizes_and_are_drawn_per_image() -> None:
    labels = np.tile(np.repeat(np.arange(8), 8), (5, 1))
    found = permuted(labels, seed=1)
    assert np.array_equal(np.sort(found, 1), labels)
    assert len({tuple(row) for row in found}) == 5
    assert np.array_equal(found, permuted(labels, seed=1))
    assert not np.array_equal(found, permuted(labels, seed=2))
    assert abs(ami(labels, found).mean()) < 0.1 < v_measure(labels, found).mean()  # V is not corrected for chance


def test_other_patches_are_refused() -> None:
    with pytest.raises(VitrimError, match="clusters of the same patches"):
        v_measure([0, 1], [0, 1, 2])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 99))
def test_a_stage_is_found_again_from_the_labels_around_it(
    images: int, patches: int, sizes: list[int], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    labels = generator.integers(-1, 5, (images, patches))
    before, tokens = labels, 5
    for size in sizes:
        onward = generator.integers(-1, size, (images, tokens))
        after = compose(before, onward)
        for image in range(images):
            expected = [-1 if token < 0 else onward[image, token] for token in before[image]]
            assert after[image].tolist() == expected
        found = relabel(before, after, tokens)
        assert found.shape == onward.shape
        assert np.array_equal(compose(before, found), after)
        used = np.zeros_like(onward, bool)
        used[np.nonzero(before >= 0)[0], before[before >= 0]] = True
        assert np.array_equal(found[used], onward[used])
        before, tokens = after, size


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(VitrimError, match="token 3 goes nowhere"):
        compose([0, 3], [0, 1])
    with pytest.raises(VitrimError, match="no labels of one reduction"):
        relabel([0, 0], [0, 1])
    with pytest.raises(VitrimError, match="no labels of one reduction"):
        relabel([0, -1], [0, 1])
