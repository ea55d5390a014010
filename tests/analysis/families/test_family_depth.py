"""Depth: maps against libraries, their tables and their figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

import golden_files as golden
from golden_files import Reference
from made_tables import HEADER, NAMES, grids, rows
from vitrim.analysis.families.depth import (
    depth,
    depth_map,
    draw_depth_maps,
    draw_depth_pairs,
    emd,
    js_bits,
    kl_bits,
    mean_depth,
    pcc,
    scc,
    sim,
)
from vitrim.analysis.family import Tables
from vitrim.analysis.record import Record
from vitrim.errors import VitrimError


@golden.cases(["analysis/metrics_a"], arrays=["heat/*"])
def test_the_reference_maps(ref: Reference) -> None:
    for name in "ab":
        a, b = ref[f"heat/{name}/map1"], ref[f"heat/{name}/map2"]
        found = {
            "KL": kl_bits(a, b),
            "KL21": kl_bits(b, a),
            "JS": js_bits(a, b, reference=True),
            "PCC": pcc(a, b),
            "SCC": scc(a, b),
            "SIM": sim(a, b),
            "EMD": emd(a, b),
            "EMD_POT_same_dist": emd(a, b),
            "EMD_POT_rowmajor_dist": emd(a, b),
        }
        for key, value in found.items():
            ref.check(f"heat/{name}/{key}", torch.tensor(value, dtype=torch.float64))


def test_the_textbook_jensen_shannon_is_scipys_and_lower() -> None:
    from scipy.spatial.distance import jensenshannon

    ref = golden.load("analysis/metrics_a")
    a, b = ref["heat/a/map1"], ref["heat/a/map2"]
    assert js_bits(a, b) == pytest.approx(jensenshannon(a.ravel(), b.ravel(), base=2) ** 2, abs=1e-12)
    assert js_bits(a, b) == pytest.approx(0.0498, abs=1e-4)
    assert js_bits(a, b) == pytest.approx(js_bits(b, a), abs=1e-12)


def test_cells_without_mass() -> None:
    assert kl_bits([1, 1, 0], [1, 1, 0]) == 0
    assert kl_bits([1, 1, 0], [1, 0, 0]) == 1
    assert kl_bits([1, 0, 0], [1, 1, 0]) == math.inf
    assert js_bits([1, 0, 0], [1, 1, 0]) < 1


def test_constant_maps_have_no_correlation() -> None:
    flat, other = np.full((3, 3), 12.0), np.arange(9.0).reshape(3, 3)
    for measure in (pcc, scc, sim):
        assert math.isnan(measure(flat, other))
        assert math.isnan(measure(other, flat))
    assert emd(flat, flat) == pytest.approx(0, abs=1e-12)
    assert js_bits(flat, flat) == 0


@given(st.integers(1, 4), st.integers(2, 5), st.integers(0, 99))
def test_the_earth_movers_distance_is_a_metric(rows: int, columns: int, seed: int) -> None:
    a, b, c = np.random.default_rng(seed).random((3, rows, columns))
    assert emd(a, 3 * a) == pytest.approx(0, abs=1e-12)
    assert emd(a, b) == pytest.approx(emd(b, a), abs=1e-9)
    assert emd(a, c) <= emd(a, b) + emd(b, c) + 1e-9
    if rows == 1:  # on a line it is the area between the cumulated masses
        gap = np.cumsum(a / a.sum() - b / b.sum())
        assert emd(a, b) == pytest.approx(np.abs(gap).sum(), abs=1e-9)


def test_the_way_of_mass_follows_rows_and_columns() -> None:
    a, b = np.zeros((2, 5, 3))
    a[0, 0], b[4, 2] = 1, 1
    assert emd(a, b) == pytest.approx(math.hypot(4, 2))
    a, b = np.zeros((2, 5, 3))
    a[0, 0], b[1, 1] = 1, 1  # other ways where rows are taken for columns
    assert emd(a, b) == pytest.approx(math.hypot(1, 1))


def test_the_depth_of_a_known_schedule() -> None:
    kept = np.zeros((2, 3, 9), bool)
    kept[0, :, :2], kept[0, 0, 2:4], kept[0, 1, 2] = True, True, True
    kept[1, 0], kept[1, 2, :5] = True, True  # gone after the second, and back after the third
    depth = depth_map(kept, [3, 6, 9], 12)
    assert depth[0].tolist() == [12, 12, 9, 6, 3, 3, 3, 3, 3]
    assert depth[1].tolist() == [6] * 9
    pattern = mean_depth(depth)
    assert pattern.mean.tolist() == [9, 9, 7.5, 6, *[4.5] * 5]
    assert pattern.std[0] == 3
    assert (pattern.overall_mean, pattern.overall_std) == (depth.mean(), pytest.approx(depth.std()))
    with pytest.raises(VitrimError, match="for 2 blocks"):
        depth_map(kept, [3, 6], 12)


@pytest.mark.parametrize("measure", [kl_bits, js_bits, pcc, scc, sim, emd])
def test_maps_that_cannot_be_compared(measure) -> None:
    with pytest.raises(VitrimError, match="of one shape"):
        measure(np.ones((2, 2)), np.ones((2, 3)))


@pytest.mark.parametrize("wrong", [[[0, 0]], [[-1, 2]], [[math.nan, 1]]])
def test_maps_without_mass(wrong) -> None:
    for measure in (kl_bits, js_bits, emd):
        with pytest.raises(VitrimError, match="not all zero"):
            measure(np.array(wrong), np.ones((1, 2)))


def test_divergences_of_maps_have_a_direction(records: list[Record]) -> None:
    result = depth(records)
    by_name = {record.name: record for record in records}
    for row in rows(result, "depth_pairs"):
        a, b = (np.where(by_name[str(row[key])].kept()[:, 0], 4, 1).mean(0) for key in ("method_a", "method_b"))
        assert row["kl_bits_ab"] == pytest.approx(entropy(b, a, base=2))
        assert row["kl_bits_ba"] == pytest.approx(entropy(a, b, base=2))
        p, q = a / a.sum(), b / b.sum()
        assert row["js_bits"] == pytest.approx((entropy(p, (p + q) / 2, base=2) + entropy(q, (p + q) / 2, base=2)) / 2)
        assert row["pcc"] == pytest.approx(np.corrcoef(a, b)[0, 1])


def test_places_of_a_grid_that_is_no_square() -> None:
    """2 rows of 3 patches, of which only the last of the first row is dropped, by block 1 of 4."""
    kept = np.array([1, 1, 0, 1, 1, 1], bool)
    arrays = {"ids": np.arange(5), "kept": np.packbits(np.tile(kept, (5, 1, 1)), axis=-1)}
    record = Record({**HEADER, "method": "topk", "kind": "prune", "soft": False, "grid": [2, 3]}, arrays)
    found = [tuple(row.values())[1:4] for row in rows(depth([record]), "depth_maps")]
    assert found == [(0, 0, 4), (0, 1, 4), (0, 2, 1), (1, 0, 4), (1, 1, 4), (1, 2, 4)]


def test_maps_of_depth_share_one_scale_per_row(made: Tables) -> None:
    figure = draw_depth_maps(made)
    drawn = [axis.images[0] for axis in figure.axes if axis.images]
    means, deviations = drawn[: len(NAMES)], drawn[len(NAMES) :]
    assert {image.get_clim() for image in means} == {(0.0, 3.0)}
    assert {image.get_clim() for image in deviations} == {(0.0, 0.5)}
    assert means[0].get_array().tolist() == [[0, 1, 2], [1, 2, 3]]


def test_maps_of_pairs_know_which_measures_are_distances(made: Tables) -> None:
    figure = draw_depth_pairs(made)
    diagonals = {axis.get_title(): np.diag(axis.images[0].get_array())[0] for axis in figure.axes if axis.images}
    assert diagonals == {"PCC": 1, "SCC": 1, "SIM": 1, "KL, bits": 0, "JS, bits": 0, "EMD, patches": 0}
    [row] = rows(made, "depth_pairs", method_a=NAMES[0], method_b=NAMES[1])
    divergence = next(grid for grid, axis in zip(grids(figure), figure.axes, strict=False) if "KL" in axis.get_title())
    assert (divergence[0, 1], divergence[1, 0]) == (row["kl_bits_ab"], row["kl_bits_ba"])
