"""Patterns: overlap of sets, clusters, their tables and their figures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import (
    adjusted_mutual_info_score,
    homogeneity_completeness_v_measure,
    normalized_mutual_info_score,
)

import golden_files as golden
from golden_files import Reference
from made_tables import BLOCKS, NAMES, PATCHES, grids, made_record, rows
from vitrim.analysis.families.patterns import (
    ami,
    chance_iou,
    completeness,
    draw_homogeneity,
    draw_overlap,
    draw_overlap_blocks,
    draw_overlap_rates,
    draw_pattern_anchors,
    homogeneity,
    ioa,
    iou,
    least_ioa,
    least_iou,
    patterns,
    v_measure,
)
from vitrim.analysis.family import Tables
from vitrim.analysis.record import Record, titled
from vitrim.core.schedule import Keep
from vitrim.report import Table


def subsets(patches: int, count: int) -> list[np.ndarray]:
    """All sets of ``count`` patches as masks."""
    return [np.isin(np.arange(patches), chosen) for chosen in itertools.combinations(range(patches), count)]


def drawn(patches: int, counts: tuple[int, int], seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [np.isin(np.arange(patches), generator.permutation(patches)[:count]) for count in counts]


def kept(patches: int, rate: float, stage: int) -> int:
    """floor(P r^s), as the methods with the study's rule keep."""
    return Keep(rate, stage, "floor_initial_power").keep(patches, patches)


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


@given(st.integers(4, 200), st.floats(0, 1), st.floats(0, 1), st.integers(1, 4), st.integers(0, 99))
def test_no_static_pruning_is_below_the_bounds(patches: int, r1: float, r2: float, stage: int, seed: int) -> None:
    counts = tuple(kept(patches, rate, stage) for rate in (r1, r2))
    a, b = drawn(patches, counts, seed)
    assert ioa(a, b) >= least_ioa(patches, *counts) - 1e-12
    assert iou(a, b) >= least_iou(patches, *counts) - 1e-12


@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 3), (2, 3), (4, 3), (5, 4), (6, 6)])
def test_bounds_and_chance_are_least_and_mean_of_all_sets(a: int, b: int) -> None:
    first = subsets(6, a)[0]
    every = np.array([[iou(first, other), ioa(first, other)] for other in subsets(6, b)])
    assert least_iou(6, a, b) == every[:, 0].min()
    assert least_ioa(6, a, b) == every[:, 1].min()
    assert chance_iou(6, a, b) == pytest.approx(every[:, 0].mean(), abs=1e-12)
    if b:
        assert a / 6 == pytest.approx(every[:, 1].mean(), abs=1e-12)  # that of the table, see below


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
    for bound, expected in zip((least_ioa, least_iou), printed, strict=True):
        if expected is not None:
            counts = [[kept(196, rate, stage) for rate in rates] for stage in (1, 2, 3)]
            assert [round(bound(196, *pair), 3) for pair in counts] == expected


@golden.cases(["analysis/metrics_a"], arrays=["clus/*"])
def test_the_reference_clusters(ref: Reference) -> None:
    """Cluster 1 is one stage after cluster 0."""
    labels = [ref["clus/0/stage_a"], ref["clus/0/stage_b"]]
    for stage in "01":
        if stage == "1":
            labels = [ref[f"clus/1/stage_{side}"][one] for one, side in zip(labels, "ab", strict=True)]
        a, b = labels
        ref.check(f"clus/{stage}/abs_a", a)
        ref.check(f"clus/{stage}/abs_b", b)
        found = [float(measure(a, b)) for measure in (homogeneity, completeness, v_measure)]
        ref.check(f"clus/{stage}/hcv_true_a_pred_b", torch.tensor(found, dtype=torch.float64))
        if stage == "0":
            turned = [float(measure(b, a)) for measure in (homogeneity, completeness, v_measure)]
            ref.check("clus/0/hcv_code_true_b_pred_a", torch.tensor(turned, dtype=torch.float64))


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


def test_the_v_measure_is_not_corrected_for_chance() -> None:
    labels = np.tile(np.repeat(np.arange(8), 8), (5, 1))
    found = np.random.default_rng(1).permuted(labels, axis=-1)
    assert abs(ami(labels, found).mean()) < 0.1 < v_measure(labels, found).mean()


def test_patterns_are_those_of_sets_and_of_scikit_learn(records: list[Record]) -> None:
    result = patterns([records[2], records[0], records[1]])  # the record that keeps fewer comes first
    by_name = {record.name: record for record in records}
    for row in rows(result, "overlap"):
        a, b = (by_name[str(row[key])].kept()[:, 0] for key in ("method_a", "method_b"))
        both, least = (a & b).sum(1), np.minimum(a.sum(1), b.sum(1))
        assert row["iou"] == pytest.approx((both / (a | b).sum(1)).mean())
        assert row["ioa"] == pytest.approx((both / least).mean())  # of the smaller set
        assert row["ioa_chance"] == pytest.approx(max(a.sum(1)[0], b.sum(1)[0]) / PATCHES)
    [row] = rows(result, "clusters")
    pairs = zip(*(by_name[str(row[key])].labels()[:, 0] for key in ("method_a", "method_b")), strict=True)
    expected = np.mean([homogeneity_completeness_v_measure(*pair) for pair in pairs], axis=0)
    assert [row[key] for key in ("homogeneity", "completeness", "v_measure")] == pytest.approx(expected.tolist())
    one, other = (by_name[str(row[key])].labels()[:, 0] for key in ("method_a", "method_b"))
    dealt = [np.random.default_rng(seed).permuted(other, axis=-1) for seed in range(1, 30)]
    chance = [v_measure(one, labels).mean() for labels in dealt]
    assert min(chance) <= row["v_chance"] <= max(chance)  # one draw among others
    assert row["v_chance"] != pytest.approx(row["v_measure"], abs=1e-6)


@pytest.mark.slow
def test_likeness_to_an_anchor_is_ranked_with_the_difference_in_accuracy() -> None:
    """Figures 18 to 23 of the study's supplement: IoU of what stays at the end, NMI of the clusters."""
    made = [made_record(f"method_{seed}", "merge", seed, 3 + seed % 3, 0.2 + 0.15 * seed) for seed in range(5)]
    result = patterns(titled(made))
    accuracy = {one.method: float(np.mean(one.correct())) for one in made}  # type: ignore[arg-type]
    pairs = rows(result, "pattern_proxies")
    assert len(pairs) == 10
    for row in pairs:
        one, other = (next(each for each in made if each.method == row[key]) for key in ("method_a", "method_b"))
        a, b = one.labels()[:, -1], other.labels()[:, -1]
        nmi = [normalized_mutual_info_score(*pair) for pair in zip(a, b, strict=True)]
        assert row["v_measure"] == pytest.approx(np.mean(nmi))
        sets = zip(one.kept()[:, -1], other.kept()[:, -1], strict=True)
        assert row["iou"] == pytest.approx(np.mean([(x & y).sum() / (x | y).sum() for x, y in sets]))
        assert row["signed"] == pytest.approx(accuracy[other.method] - accuracy[one.method])
    for anchor in rows(result, "pattern_anchors", measure="iou"):
        own = [row for row in pairs if anchor["method"] in (row["method_a"], row["method_b"])]
        others = [({row["method_a"], row["method_b"]} - {anchor["method"]}).pop() for row in own]
        gaps = [accuracy[other] - accuracy[anchor["method"]] for other in others]
        assert anchor["others"] == 4
        assert anchor["spearman"] == pytest.approx(spearmanr([row["iou"] for row in own], gaps).statistic)
    assert {row["measure"] for row in rows(result, "pattern_anchors")} == {"iou", "v_measure"}
    blank = [
        Record(one.header, {k: v for k, v in one.arrays.items() if k in ("ids", "source", "kept")}) for one in made
    ]
    assert "pattern_proxies" not in {table.name for table in patterns(titled(blank)).tables}


def test_points_of_an_anchor_have_its_sign(made: Tables) -> None:
    axes = draw_pattern_anchors(made).axes
    for place, measure in ((1, "iou"), (4, "v_measure")):
        axis = axes[place]  # of the second name, which is second in the pair with the first
        [pair] = rows(made, "pattern_proxies", method_a=NAMES[0], method_b=NAMES[1])
        point = next(line for line in axis.lines if line.get_label() == NAMES[0])
        assert (point.get_xdata()[0], point.get_ydata()[0]) == (pair[measure], -100 * pair["signed"])


def test_homogeneity_does_not_depend_on_the_order_of_records(records: list[Record]) -> None:
    """The record that keeps more tokens is the truth: Eq. 3 is homogeneity, by scikit-learn."""
    merging = [record for record in records if record.header["kind"] == "merge"]
    assert len(merging) == 2
    [row], [turned] = (rows(patterns(each), "clusters") for each in (merging, merging[::-1]))
    assert row == turned
    milder, stronger = sorted(merging, key=lambda record: -record.tokens()[:, -1].sum())
    assert milder.tokens()[:, -1].sum() > stronger.tokens()[:, -1].sum()
    assert (row["method_a"], row["method_b"]) == (milder.name, stronger.name)
    pairs = zip(milder.labels()[:, -1], stronger.labels()[:, -1], strict=True)
    expected = np.mean([homogeneity_completeness_v_measure(*pair)[:2] for pair in pairs], axis=0)
    assert [row["homogeneity"], row["completeness"]] == pytest.approx(expected.tolist())
    assert row["homogeneity"] != pytest.approx(row["completeness"])


def test_static_pruning_has_its_bounds_and_chance() -> None:
    one, other = titled([made_record("topk", "prune", 1, 7, 1.0), made_record("l2", "prune", 2, 5, 1.0)])
    [row] = rows(patterns([one, other]), "overlap")
    assert (row["iou_least"], row["ioa_least"]) == (pytest.approx(3 / 9), pytest.approx(3 / 5))
    assert row["ioa_chance"] == pytest.approx(7 / 9)
    assert row["iou_chance"] != pytest.approx(row["ioa_chance"])


def test_overlap_is_one_map_per_stage(made: Tables) -> None:
    maps = grids(draw_overlap(made))
    assert len(maps) == len(BLOCKS)
    for grid, block in zip(maps, BLOCKS, strict=True):
        assert np.diag(grid).tolist() == [1, 1, 1]
        [row] = rows(made, "overlap", method_a=NAMES[0], method_b=NAMES[2], block=block)
        assert grid[0, 2] == grid[2, 0] == row["iou"]


def test_homogeneity_turned_round_is_completeness(made: Tables) -> None:
    [row] = rows(made, "clusters", method_a=NAMES[0], method_b=NAMES[1], block=BLOCKS[0])
    grid = grids(draw_homogeneity(made))[0]
    assert (grid[0, 1], grid[1, 0]) == (row["homogeneity"], row["completeness"])


def test_lines_over_blocks_have_their_bounds_dashed(made: Tables) -> None:
    first = draw_overlap_blocks(made).axes[0]
    line = next(line for line in first.lines if line.get_label() == NAMES[1])
    found = rows(made, "overlap", method_a=NAMES[0], method_b=NAMES[1])
    assert line.get_ydata().tolist() == [row["iou"] for row in found]
    dashed = [tuple(one.get_ydata()) for one in first.lines if one.get_linestyle() == "--"]
    assert tuple(row["iou_least"] for row in found) in dashed
    assert first.collections  # the interval


def test_lines_over_rates_are_of_one_method(made: Tables) -> None:
    figure = draw_overlap_rates(made)
    assert [axis.get_title() for axis in figure.axes] == [
        "IoA, block 1",
        "IoA, block 3",
        "IoU, block 1",
        "IoU, block 3",
    ]
    [row] = rows(made, "overlap", method_a=NAMES[0], method_b=NAMES[1], block=1)
    shown = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in shown] == [
        ([row["kept_b"]], [row["ioa"]])
    ]
    one_each = [row for row in made["overlap"].rows if NAMES[2] in row]
    table = made["overlap"]
    assert draw_overlap_rates(Tables({"overlap": Table("overlap", "", table.columns, one_each)})) is None
