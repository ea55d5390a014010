"""Measures between the features of two models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import golden_files as golden
from golden_files import Reference
from vitrim.analysis.families.features import cca, cca_measures, center, cka, mean_cca, mean_sq_cca, procrustes, pwcca
from vitrim.errors import VitrimError


@golden.cases(["analysis/metrics_a"], arrays=["feat/*"])
def test_the_reference_features(ref: Reference) -> None:
    a, b = ref["feat/ab/A"].T, ref["feat/ab/B"].T
    ref.check("feat/ab/rho", torch.from_numpy(cca(a, b)))
    found = {
        "pwcca_dist": pwcca(a, b),
        "pwcca_dist_swapped": pwcca(b, a),
        "mean_sq_cca": mean_sq_cca(a, b),
        "mean_cca": mean_cca(a, b),
        "cka_dist": cka(a, b),
        "procrustes": procrustes(a, b),
    }
    assert np.allclose(cca_measures(a, b), [pwcca(a, b), pwcca(b, a), mean_cca(a, b)], atol=1e-12)
    for key, value in found.items():
        ref.check(f"feat/ab/{key}", torch.tensor(value, dtype=torch.float64))


def random(seed: int, images: int = 40, channels: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(images, channels))


def rotation(seed: int, channels: int = 5) -> np.ndarray:
    return np.linalg.qr(random(seed, channels, channels))[0]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 99), st.floats(0.1, 10))
def test_rotation_scale_and_offset_change_nothing(seed: int, scale: float) -> None:
    a, b = random(seed), random(seed + 100) + random(seed)
    turned = scale * (b + 7) @ rotation(seed)
    for measure in (procrustes, cka, mean_cca, mean_sq_cca):
        assert measure(a, turned) == pytest.approx(measure(a, b), abs=1e-9)
        assert measure(a, b) == pytest.approx(measure(b, a), abs=1e-9)
    assert pwcca(a, turned) == pytest.approx(pwcca(a, b), abs=1e-9)
    for distance in (procrustes, cka, pwcca):
        assert distance(b, turned) == pytest.approx(0, abs=1e-6)
        assert 0 < distance(a, b) < 2


def test_cca_takes_any_invertible_map_and_the_others_do_not() -> None:
    a = random(1)
    skewed = a @ np.diag([1, 2, 4, 8, 16])
    assert mean_cca(a, skewed) == pytest.approx(1, abs=1e-9)
    assert procrustes(a, skewed) > 0.01
    assert cka(a, skewed) > 0.01


def test_cca_is_that_of_scikit_learn() -> None:
    from sklearn.cross_decomposition import CCA

    a, b = random(2), random(3) + random(2)
    variates = CCA(n_components=5, scale=False, max_iter=5000, tol=1e-12).fit_transform(a, b)
    expected = [np.corrcoef(one, other)[0, 1] for one, other in zip(*(one.T for one in variates), strict=True)]
    assert np.allclose(cca(a, b), expected, atol=1e-6)


def test_features_are_centred_over_images() -> None:
    found = center(random(4) + 100)
    assert np.allclose(found.mean(0), 0)
    assert np.linalg.norm(found) == pytest.approx(1)
    assert not center(np.ones((3, 2))).any()
    assert np.isnan(cka(np.ones((3, 2)), random(1, 3)))


def test_half_precision_on_disk_hardly_changes_a_distance() -> None:
    a, b = random(5, 200, 16), random(6, 200, 16)
    stored = [one.astype(np.float16) for one in (a, b)]
    assert procrustes(*stored) == pytest.approx(procrustes(a, b), rel=1e-3)


def test_what_cannot_be_compared() -> None:
    with pytest.raises(VitrimError, match="of the same images, got 40 and 39"):
        procrustes(random(0), random(0, 39))
    with pytest.raises(VitrimError, match="got 5 images and 5 channels"):
        cca(random(0, 5), random(1, 5))
    with pytest.raises(VitrimError, match=r"\(images, channels\)"):
        cka(np.ones(3), np.ones(3))
