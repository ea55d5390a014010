"""The table of families, and several analyses beside each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from made_subjects import subject
from tiny import GEOMETRY
from vitrim.analysis.families import across, beside, results_of
from vitrim.analysis.families.depth import depth_map, js_bits, mean_depth
from vitrim.analysis.families.features import features
from vitrim.analysis.family import FamilyResult
from vitrim.analysis.record import Record, titled
from vitrim.errors import VitrimError
from vitrim.report import Table


def test_experiments_run_where_they_are_named(model: nn.Module, data: TensorDataset) -> None:
    own = subject(model, data, "topk:keep_rate=0.5", limit=6)
    assert results_of(None, [], {"vit": own}) == {}
    found = results_of(None, ["router", "patterns", "attention"], {"vit": own})
    assert list(found) == ["attention", "router"]
    assert "router: estimated from 6 images, fewer than 30" in found["router"].notes
    with pytest.raises(VitrimError, match="unknown family 'speed'"):
        results_of(None, ["speed"], {"vit": own})


@pytest.mark.slow
def test_nothing_is_left_of_an_experiment(model: nn.Module, data: TensorDataset) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    own = subject(model, data, "mctf:r=4", "topk", limit=4)
    results_of(None, ["attention", "router", "loss"], {"vit": own})
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert set(GEOMETRY) <= {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes"}


METHODS = ("dense", "topk", "tome")


def analysis(data: str, images: int, seed: int) -> list[Record]:
    """Records with random numbers: 4 patches, 3 blocks of which the second reduces, 2 classes."""
    draw = np.random.default_rng(seed)
    found = []
    for method in METHODS:
        header = {"method": method, "kind": "none" if method == "dense" else "prune", "num_prefix": 1, "num_layers": 3}
        header |= {"grid": [2, 2], "blocks": [] if method == "dense" else [1], "feature_blocks": [], "data": data}
        arrays = {
            "ids": np.arange(images),
            "num_tokens": np.full((images, 3), 5),
            "head": draw.normal(size=(images, 3)),
            "logits": draw.normal(size=(images, 2)),
            "targets": draw.integers(0, 2, images),
        }
        arrays["first"] = arrays["logits"].argmax(1)
        if method != "dense":
            arrays["kept"] = np.packbits(draw.random((images, 1, 4)) < 0.5, axis=-1)
        found.append(Record(header, arrays))
    return found


@pytest.fixture(scope="module")
def analyses() -> list[list[Record]]:
    return [analysis("a/cifar.parquet", 40, 1), analysis("b/camvid.parquet", 50, 2)]


@pytest.mark.slow
def test_maps_are_compared_across_data(analyses: Sequence[Sequence[Record]]) -> None:
    pairs = next(table for table in across(analyses)["depth"].tables if table.name == "depth_pairs")
    row = next(
        row for row in pairs.records() if {row["method_a"], row["method_b"]} == {"topk with cifar", "topk with camvid"}
    )
    maps = [mean_depth(depth_map(one[1].kept(), [1], 3)).mean.reshape(2, 2) for one in analyses]
    assert row["js_bits"] == pytest.approx(js_bits(*maps))


def test_pairs_of_features_are_within_an_analysis_and_correlated_over_all(analyses: Sequence[Sequence[Record]]) -> None:
    tables = {table.name: table for table in across(analyses, ["features"])["features"].tables}
    rows = tables["features"].records()
    assert len(rows) == 2 * 3
    assert all(row["method_a"].split(" with ")[1] == row["method_b"].split(" with ")[1] for row in rows)
    assert [row["images"] for row in rows] == [40] * 3 + [50] * 3
    assert set(tables["proxy"].column("pairs")) == {6}
    alone = features(titled(analyses[0])).tables[0].records()
    assert [row["procrustes"] for row in rows[:3]] == [row["procrustes"] for row in alone]


def test_the_sign_of_an_anchor(analyses: Sequence[Sequence[Record]]) -> None:
    """With five records every anchor has four others; their difference is that of the other over the anchor."""
    more = [
        Record({**analyses[0][1].header, "method": name}, analysis("x", 40, seed)[1].arrays)
        for name, seed in (("random", 3), ("l2", 5))
    ]
    five = [*analyses[0], *more]
    tables = {table.name: table for table in features(titled(five)).tables}
    assert set(tables["proxy_anchors"].column("others")) == {4}
    from scipy.stats import spearmanr

    anchor = next(
        row for row in tables["proxy_anchors"].records() if (row["method"], row["measure"]) == ("tome", "procrustes")
    )
    accuracy = {
        record.method: float((record.arrays["logits"].argmax(1) == record.arrays["targets"]).mean()) for record in five
    }
    points = []
    for row in tables["features"].records():
        names = {row["method_a"], row["method_b"]}
        if "tome" in names:
            [other] = names - {"tome"}
            points.append((row["procrustes"], accuracy[other] - accuracy["tome"]))
    assert anchor["spearman"] == pytest.approx(spearmanr(*zip(*points, strict=True)).statistic)


def test_analyses_that_cannot_be_compared(analyses: Sequence[Sequence[Record]]) -> None:
    with pytest.raises(VitrimError, match="needs two finished analyses or more, got 1"):
        across(analyses[:1])
    with pytest.raises(VitrimError, match="patterns needs records of the same images; analyses are compared by depth"):
        across(analyses, ["patterns"])
    with pytest.raises(VitrimError, match="there are two records of dense"):
        across([analyses[0], analyses[0]])


def test_the_same_data_in_two_folders_is_told_apart_by_them(analyses: Sequence[Sequence[Record]]) -> None:
    named = [
        [Record({**record.header, "report": name}, record.arrays) for record in analyses[0]] for name in ("one", "two")
    ]
    names = across(named)["counts"].tables[0].column("method")
    assert dict.fromkeys(names) == dict.fromkeys(f"{method} in {name}" for name in ("one", "two") for method in METHODS)


def test_results_of_several_models_stand_beside_each_other() -> None:
    def made(value: float, tables: tuple[str, ...]) -> FamilyResult:
        found = [Table(name, name, ("method", "method_b", "value"), [("tome", "topk", value)]) for name in tables]
        return FamilyResult(found, ["few images"], {"images": np.full(2, value), "tome/depth": np.full(3, value)})

    found = beside({"small": made(1.0, ("one",)), "large": made(2.0, ("one", "two"))})
    assert [(table.name, table.rows) for table in found.tables] == [
        ("one", [("tome on small", "topk on small", 1.0), ("tome on large", "topk on large", 2.0)]),
        ("two", [("tome on large", "topk on large", 2.0)]),
    ]
    assert found.notes == ["small: few images", "large: few images"]
    assert {key: array.tolist() for key, array in found.arrays.items()} == {
        "images": [2.0] * 2,  # both saw the same ones
        "tome on small/depth": [1.0] * 3,
        "tome on large/depth": [2.0] * 3,
    }


@pytest.mark.slow
def test_a_family_that_runs_models_runs_each(model: nn.Module, data: TensorDataset) -> None:
    subjects = {name: subject(model, data, "topk:keep_rate=0.5", limit=4) for name in ("a", "b")}
    found = results_of(None, ["router"], subjects)["router"]
    alone = results_of(None, ["router"], {"a": subjects["a"]})["router"]
    (table,), (single,) = found.tables, alone.tables
    rows = [[(f"{name} on {model}", *rest) for name, *rest in single.rows] for model in ("a", "b")]
    np.testing.assert_equal([tuple(row) for row in table.rows], [*rows[0], *rows[1]])  # for which nan is nan
    assert {key for key in found.arrays if "/" in key} == {
        f"topk:keep_rate=0.5 on {name}/{kind}" for name in ("a", "b") for kind in ("blocks", "scores", "depth")
    }
