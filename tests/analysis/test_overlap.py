"""Overlap of sets of patches: definitions, lower bounds and chance."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrim.analysis.families.patterns import (
    chance_ioa,
    chance_iou,
    ioa,
    ioa_lower_bound,
    iou,
    iou_lower_bound,
    least_ioa,
    least_iou,
)
from vitrim.errors import VitrimError


def subsets(patches: int, count: int) -> list[np.ndarray]:
    """All sets of ``count`` patches as masks."""
    return [np.isin(np.arange(patches), chosen) for chosen in itertools.combinations(range(patches), count)]


def drawn(patches: int, counts: tuple[int, int], seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [np.isin(np.arange(patches), generator.permutation(patches)[:count]) for count in counts]


def test_overlap_is_that_of_sets() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.random((2, 5, 3, 17)) < 0.4
    for image, stage in np.ndindex(5, 3):
        one, other = (set(np.flatnonzero(mask[image, stage])) for mask in (a, b))
        assert iou(a, b)[image, stage] == len(one & other) / len(one | other)
        assert ioa(a, b)[image, stage] == len(one & other) / len(other)
    assert np.array_equal(iou(a, b), iou(b, a))
    assert np.array_equal(iou(a, a), np.ones((5, 3)))


def test_empty_sets_give_zero() -> None:
    empty, some = np.zeros(4, bool), np.ones(4, bool)
    assert (iou(empty, empty), ioa(some, empty), iou(some, empty), ioa(empty, some)) == (0, 0, 0, 0)


def test_sets_of_other_patches_are_refused() -> None:
    with pytest.raises(VitrimError, match="two sets of the same patches"):
        iou(np.ones(4, bool), np.ones(5, bool))


@settings(deadline=None, max_examples=60)
@given(st.integers(4, 200), st.floats(0, 1), st.floats(0, 1), st.integers(1, 4), st.integers(0, 99))
def test_no_static_pruning_is_below_the_bounds(patches: int, r1: float, r2: float, stage: int, seed: int) -> None:
    counts = tuple(int(round(rate**stage * patches, 9)) for rate in (r1, r2))
    a, b = drawn(patches, counts, seed)
    assert ioa(a, b) >= ioa_lower_bound(patches, r1, r2, stage) - 1e-12
    assert iou(a, b) >= iou_lower_bound(patches, r1, r2, stage) - 1e-12


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 3), (2, 3), (4, 3), (5, 4), (6, 6)])
def test_bounds_and_chance_are_least_and_mean_of_all_sets(a: int, b: int) -> None:
    first = subsets(6, a)[0]
    every = np.array([[iou(first, other), ioa(first, other)] for other in subsets(6, b)])
    assert least_iou(6, a, b) == every[:, 0].min()
    assert least_ioa(6, a, b) == every[:, 1].min()
    assert chance_iou(6, a, b) == pytest.approx(every[:, 0].mean(), abs=1e-12)
    if b:
        assert chance_ioa(6, a) == pytest.approx(every[:, 1].mean(), abs=1e-12)


STUDY = {
    (0.9, 0.7): ([0.854, 0.604, 0.194], [0.597, 0.296, 0.066]),
    (0.9, 0.5): ([0.796, 0.224, 0.0], None),
    (0.9, 0.25): ([0.592, 0.0, 0.0], None),
    (0.7, 0.5): ([0.398, 0.0, 0.0], None),
    (0.9, 0.9): (None, [0.796, 0.612, 0.449]),
    (0.7, 0.7): (None, [0.398, 0.0, 0.0]),
    (0.5, 0.5): (None, [0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize(("rates", "printed"), STUDY.items())
def test_bounds_of_the_study(rates: tuple[float, float], printed: tuple[list[float] | None, ...]) -> None:
    for bound, expected in zip((ioa_lower_bound, iou_lower_bound), printed, strict=True):
        if expected is not None:
            assert [round(bound(196, *rates, stage), 3) for stage in (1, 2, 3)] == expected


@pytest.mark.parametrize("wrong", [(1.1, 0.5, 1), (0.5, -0.1, 1), (0.5, 0.5, 0)])
def test_rates_and_stages_are_checked(wrong: tuple[float, float, int]) -> None:
    with pytest.raises(VitrimError, match=r"expected a (keep rate|stage)"):
        iou_lower_bound(196, *wrong)
