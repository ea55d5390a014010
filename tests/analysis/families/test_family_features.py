"""Features: distances against libraries, what they tell, and their figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau, spearmanr

import golden_files as golden
from golden_files import Reference
from made_tables import NAMES, made_record, rows
from vitrim.analysis.families.features import (
    cca,
    center,
    cka,
    draw_features,
    draw_proxy,
    draw_proxy_anchors,
    features,
    procrustes,
)
from vitrim.analysis.family import Tables
from vitrim.analysis.record import Record, titled
from vitrim.errors import VitrimError


@golden.cases(["analysis/metrics_a"], arrays=["feat/*"])
def test_the_reference_features(ref: Reference) -> None:
    a, b = ref["feat/ab/A"].T, ref["feat/ab/B"].T
    both = cca(a, b)
    ref.check("feat/ab/rho", torch.from_numpy(both.correlations))
    found = {
        "pwcca_dist": both.pwcca_ab,
        "pwcca_dist_swapped": cca(b, a).pwcca_ab,
        "mean_sq_cca": (both.correlations**2).mean(),
        "mean_cca": both.correlations.mean(),
        "cka_dist": cka(a, b),
        "procrustes": procrustes(a, b),
    }
    for key, value in found.items():
        ref.check(f"feat/ab/{key}", torch.tensor(value, dtype=torch.float64))


def mean_cca(a: np.ndarray, b: np.ndarray) -> float:
    return float(cca(a, b).correlations.mean())


def pwcca(a: np.ndarray, b: np.ndarray) -> float:
    return cca(a, b).pwcca_ab


def random(seed: int, images: int = 40, channels: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(images, channels))


def rotation(seed: int, channels: int = 5) -> np.ndarray:
    return np.linalg.qr(random(seed, channels, channels))[0]


@given(st.integers(0, 99), st.floats(0.1, 10))
def test_rotation_scale_and_offset_change_nothing(seed: int, scale: float) -> None:
    a, b = random(seed), random(seed + 100) + random(seed)
    turned = scale * (b + 7) @ rotation(seed)
    for measure in (procrustes, cka, mean_cca):
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
    assert np.allclose(cca(a, b).correlations, expected, atol=1e-6)


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


def test_differences_in_accuracy_have_a_sign(records: list[Record]) -> None:
    result = features(records)
    signed = {(row["method_a"], row["method_b"]): row["signed"] for row in rows(result, "features")}
    assert signed == {
        ("tome", "topk"): pytest.approx(-0.25),
        ("tome", "atm"): pytest.approx(0.4),
        ("topk", "atm"): pytest.approx(0.65),
    }
    plain = [Record(record.header, {k: v for k, v in record.arrays.items() if k != "targets"}) for record in records]
    dense = Record({**plain[0].header, "kind": "none", "method": "dense", "title": "dense"}, plain[0].arrays)
    [row] = [row for row in rows(features([dense, *plain[1:]]), "features") if row["method_b"] == "topk"]
    agreement = (plain[0].first() == plain[1].first()).mean()
    assert row["signed"] == pytest.approx(agreement - 1)


def test_an_anchor_is_compared_with_how_much_better_the_others_are() -> None:
    """Whichever of the two stands first in a pair: distance from the anchor against accuracy less the anchor's."""
    every = titled([made_record(name, "merge", place, 5, right) for place, (name, right) in enumerate(
        (("tome", 0.5), ("gtp", 0.25), ("atm", 0.9), ("bat", 0.1), ("mctf", 0.7)))])  # fmt: skip
    result = features(every)
    far = {frozenset((row["method_a"], row["method_b"])): row["procrustes"] for row in rows(result, "features")}
    accuracy = {record.name: record.correct().mean() for record in every}  # type: ignore[union-attr]
    found = [row for row in rows(result, "proxy_anchors") if row["measure"] == "procrustes"]
    assert {row["method"] for row in found} == set(accuracy)
    for row in found:
        others = [name for name in accuracy if name != row["method"]]
        distances = [far[frozenset((row["method"], name))] for name in others]
        better = [accuracy[name] - accuracy[row["method"]] for name in others]
        assert row["others"] == 4
        assert row["spearman"] == pytest.approx(spearmanr(distances, better).statistic)
        assert row["kendall"] == pytest.approx(kendalltau(distances, better).statistic)


@pytest.mark.parametrize("others", [3, 4])
def test_an_anchor_needs_four_others(others: int) -> None:
    names = ("tome", "gtp", "atm", "bat", "mctf")[: others + 1]
    result = features(titled([made_record(name, "merge", place, 5, place / 8) for place, name in enumerate(names)]))
    found = [table for table in result.tables if table.name == "proxy_anchors"]
    methods = {row["method"] for table in found for row in table.records()}
    assert methods == (set(names) if others == 4 else set())


def test_features_and_what_they_tell(made: Tables) -> None:
    first = draw_features(made).axes[0]
    line = next(line for line in first.lines if line.get_label() == NAMES[0])
    found = rows(made, "features", method_a="dense", method_b=NAMES[0])
    assert line.get_ydata().tolist() == [row["procrustes"] for row in found]
    proxy = draw_proxy(made).axes[0]
    points = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in proxy.lines}
    heads = rows(made, "features", block="head")
    assert points == {(row["procrustes"], 100 * row["difference"]) for row in heads}
    [row] = rows(made, "proxy", measure="procrustes")
    assert f"{row['spearman']:.2f} [{row['spearman_low']:.2f}, {row['spearman_high']:.2f}]" in proxy.get_title()
    assert f"{row['kendall']:.2f}, n = 6" in proxy.get_title()


def test_differences_to_an_anchor_have_a_sign(made: Tables) -> None:
    axis = draw_proxy_anchors(made).axes[0]  # of the first name, which is second in the pair with the dense model
    [pair] = rows(made, "features", method_a="dense", method_b=NAMES[0], block="head")
    point = next(line for line in axis.lines if line.get_label() == "dense")
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (pair["procrustes"], -100 * pair["signed"])
