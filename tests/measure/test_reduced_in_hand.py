"""Functions that measure take a model that is reduced as it is, beside its dense self."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vitrim

pytestmark = pytest.mark.xdist_group("onnx")  # its libraries, which take seconds to import, in one process
MODEL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}


def model() -> Any:
    torch.manual_seed(0)
    return vitrim.create_model("test_vit", options=MODEL).eval()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0]))]


def test_profile_counts_it_as_under_the_method_as_text() -> None:
    dense, given = model(), model()
    reduction = vitrim.reduce_(given, "tome:r=3")
    expected = [{**row} for row in vitrim.profile(dense, ["tome:r=3", "topk:keep_rate=0.5"]).rows]
    assert [{**row} for row in vitrim.profile(given, "topk:keep_rate=0.5").rows] == expected
    assert [{**row} for row in vitrim.profile(given).rows] == expected[:2]
    assert vitrim.get_reduction(given) is reduction


@pytest.mark.slow
def test_bench_times_it_beside_its_dense_self() -> None:
    given = model()
    reduction = vitrim.reduce_(given, "tome:r=3")
    short: dict[str, Any] = {"batch_size": 2, "budget": vitrim.Budget(1, min_seconds=0)}
    rows = vitrim.bench(given, **short).rows
    assert [row["method"] for row in rows] == ["dense", "tome:r=3"]
    expected = vitrim.bench(model(), "tome:r=3", **short).rows
    assert [row["macs_speedup"] for row in rows] == [row["macs_speedup"] for row in expected]
    names = [row["method"] for row in vitrim.bench(given, ["tome:r=3", "evit"], **short).rows]
    assert names[:2] == ["dense", "tome:r=3"]
    assert len(names) == 3
    assert vitrim.get_reduction(given) is reduction


def test_evaluate_scores_it_with_what_it_has_learned() -> None:
    given = model()
    vitrim.reduce_(given, "dynamicvit:keep_rate=0.5")
    with torch.no_grad():
        own = given(batches()[0][0]).argmax(1)
    rows = vitrim.evaluate(given, None, batches()).rows
    assert [row["method"] for row in rows] == ["dense", rows[1]["method"]]
    assert rows[1]["top1"] == (own == batches()[0][1]).double().mean().item()
    assert vitrim.evaluate(given, None, batches()).facts["untrained"] == []
