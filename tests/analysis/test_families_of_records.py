"""The tables of families against sets, libraries and numpy, from records made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import entropy, kendalltau, spearmanr
from sklearn.metrics import homogeneity_completeness_v_measure

from vitrim.analysis.families.counts import counts
from vitrim.analysis.families.depth import depth
from vitrim.analysis.families.features import features
from vitrim.analysis.families.patterns import patterns
from vitrim.analysis.family import FamilyResult
from vitrim.analysis.record import Record, titled

IMAGES, SIDE, PATCHES, CLASSES = 40, 3, 9, 3
HEADER = {
    "num_prefix": 1,
    "num_layers": 4,
    "grid": [SIDE, SIDE],
    "blocks": [1],
    "feature_blocks": [],
    "adaptive": False,
}


def made(method: str, kind: str, seed: int, groups: int, right: float) -> Record:
    """A record of nine patches: clusters or, of a method that prunes, as many patches kept as there are groups."""
    draw = np.random.default_rng(seed)
    labels = np.stack([draw.permutation(np.arange(PATCHES) % groups) for _ in range(IMAGES)])
    kept = np.stack([draw.permutation(PATCHES) < groups for _ in range(IMAGES)])
    targets = np.arange(IMAGES) % CLASSES
    shown = np.where(np.arange(IMAGES) < right * IMAGES, targets, (targets + 1) % CLASSES)
    arrays = {
        "ids": np.arange(IMAGES),
        "batch": np.zeros(IMAGES, int),
        "targets": targets,
        "source": np.concatenate([np.zeros((IMAGES, 1), int), labels + 1], 1)[:, None],
        "kept": np.packbits(kept[:, None], axis=-1),
        "num_tokens": 1 + np.concatenate([np.full((IMAGES, 1), PATCHES), draw.integers(2, 9, (IMAGES, 3))], 1),
        "head": draw.normal(size=(IMAGES, 4)),
        "logits": np.eye(CLASSES)[shown],
    }
    return Record({**HEADER, "method": method, "kind": kind, "soft": False}, arrays)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return titled(
        [made("tome", "merge", 0, 6, 0.5), made("topk", "prune", 1, 4, 0.25), made("atm", "merge", 2, 3, 0.9)]
    )


def rows(result: FamilyResult, name: str) -> list[dict[str, object]]:
    return next(table for table in result.tables if table.name == name).records()


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
    assert row["v_chance"] != pytest.approx(row["v_measure"], abs=1e-6)


def test_static_pruning_has_its_bounds_and_chance() -> None:
    one, other = titled([made("topk", "prune", 1, 7, 1.0), made("l2", "prune", 2, 5, 1.0)])
    [row] = rows(patterns([one, other]), "overlap")
    assert (row["iou_least"], row["ioa_least"]) == (pytest.approx(3 / 9), pytest.approx(3 / 5))
    assert row["ioa_chance"] == pytest.approx(7 / 9)
    assert row["iou_chance"] != pytest.approx(row["ioa_chance"])


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


def test_counts_are_those_of_numpy(records: list[Record]) -> None:
    found = rows(counts(records[:1]), "counts")
    left = records[0].tokens()
    before = np.concatenate([np.full((IMAGES, 1), PATCHES + 1), left[:, :-1]], 1)
    for block, row in enumerate(found):
        assert (row["tokens"], row["tokens_std"]) == pytest.approx((left[:, block].mean(), left[:, block].std()))
        assert row["removed"] == pytest.approx((before - left)[:, block].mean())
        assert [row["p10"], row["median"], row["p90"]] == np.quantile(left[:, block], [0.1, 0.5, 0.9]).tolist()


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


def test_the_first_block_removes_what_is_gone_after_it(records: list[Record]) -> None:
    left = np.tile([7, 5, 5, 2], (IMAGES, 1))
    left[0] = [9, 6, 6, 1]
    header = {**records[0].header, "bounds": [8, 7, 6, 5], "thresholds": [0.1, 0.2, 0.3, 0.4]}
    found = rows(counts([Record(header, {**records[0].arrays, "num_tokens": left})]), "counts")
    assert [row["removed"] for row in found] == pytest.approx([10 - 7.05, 7.05 - 5.025, 0, 5.025 - 1.975])
    assert [(row["least"], row["most"]) for row in found] == [(7, 9), (5, 6), (5, 6), (1, 2)]
    assert [(row["bound"], row["threshold"]) for row in found] == [(8, 0.1), (7, 0.2), (6, 0.3), (5, 0.4)]


def test_an_anchor_is_compared_with_how_much_better_the_others_are() -> None:
    """Whichever of the two stands first in a pair: distance from the anchor against accuracy less the anchor's."""
    every = titled([made(name, "merge", place, 5, right) for place, (name, right) in enumerate(
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


@pytest.mark.parametrize("others", [2, 3])
def test_an_anchor_needs_three_others(others: int) -> None:
    names = ("tome", "gtp", "atm", "bat")[: others + 1]
    result = features(titled([made(name, "merge", place, 5, place / 8) for place, name in enumerate(names)]))
    found = [table for table in result.tables if table.name == "proxy_anchors"]
    methods = {row["method"] for table in found for row in table.records()}
    assert methods == (set(names) if others == 3 else set())


def test_places_of_a_grid_that_is_no_square() -> None:
    """2 rows of 3 patches, of which only the last of the first row is dropped, by block 1 of 4."""
    kept = np.array([1, 1, 0, 1, 1, 1], bool)
    arrays = {"ids": np.arange(5), "kept": np.packbits(np.tile(kept, (5, 1, 1)), axis=-1)}
    record = Record({**HEADER, "method": "topk", "kind": "prune", "soft": False, "grid": [2, 3]}, arrays)
    found = [tuple(row.values())[1:4] for row in rows(depth([record]), "depth_maps")]
    assert found == [(0, 0, 4), (0, 1, 4), (0, 2, 1), (1, 0, 4), (1, 1, 4), (1, 2, 4)]
