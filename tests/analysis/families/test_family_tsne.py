"""t-SNE: pruned tokens before the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from made_subjects import reduced, subject
from made_tables import rows
from vitrim.analysis.families import results_of
from vitrim.analysis.families.tsne import _PrunedTokens, own_forms, silhouettes, tsne
from vitrim.core.registry import parse_method
from vitrim.measure.contestants import Contestant, ModelOutput
from vitrim.measure.records import Batch
from vitrim.measure.reducer_calls import ReducerCalls


@pytest.mark.slow  # scikit-learn's t-SNE takes seconds; its points are checked above
def test_pruned_tokens_before_the_head(model: nn.Module, data: TensorDataset) -> None:
    torch.manual_seed(0)
    result = tsne(subject(model, data, "cropr:r=4", "tome:r=4", limit=40))
    assert result.notes == ["cropr:r=4 has not learned its routers: it prunes at random"] or result.tables == []
    twice = TensorDataset(*(torch.cat([one, one]) for one in data.tensors))
    result = tsne(subject(model, twice, "cropr:r=4"))
    found = rows(result, "tsne")
    assert [(row["fusion"], row["block"]) for row in found] == [
        (fusion, block) for fusion in ("last_layer", "concat") for block in ("all", 1, 2)
    ]
    assert [row["points"] for row in found] == [160, 80, 80] * 2
    points, blocks = (result.arrays[f"cropr:r=4/concat/{name}"] for name in ("points", "blocks"))
    assert points.shape == (160, 2)
    assert found[3]["silhouette_map"] == pytest.approx(silhouettes(points, blocks)[0], abs=1e-5)
    several = tsne(subject(model, twice, "cropr:r=4", "cropr:r=3"))
    assert len(several.tables) == 1
    assert [row["method"] for row in rows(several, "tsne")] == ["cropr:r=4"] * 6 + ["cropr:r=3"] * 6
    assert tsne(subject(model, data, "tome:r=4")).notes[0].startswith("tsne skipped: it needs a method whose pruned")
    assert any("more than 90 points" in note for note in tsne(subject(model, data, "cropr:r=4", limit=9)).notes)


def test_a_trained_model_is_shown_with_the_fusion_that_it_learned(
    model: nn.Module, data: TensorDataset, tmp_path: Path
) -> None:
    """Side by side, as in Cropr's Figure 4; what learned nothing has the method's own."""
    method = parse_method("cropr:r=4")
    assert list(own_forms(subject(model, data, "cropr:r=4"), method)) == ["last_layer"]
    for fusion in ("concat", "last_layer"):
        reduced(model, f"cropr:r=4,fusion={fusion}").save(tmp_path / fusion)
        forms = own_forms(subject(model, data, "cropr:r=4", learned=tmp_path / fusion), method)
        assert {name: form.describe() for name, form in forms.items()} == {
            fusion: method.rejoining()[fusion].describe()
        }


@pytest.mark.slow  # scikit-learn's t-SNE takes seconds; which model is shown in which form is seen above
def test_several_models_side_by_side(model: nn.Module, data: TensorDataset, tmp_path: Path) -> None:
    twice = TensorDataset(*(torch.cat([one, one]) for one in data.tensors))
    subjects = {}
    for fusion in ("last_layer", "concat"):
        reduced(model, f"cropr:r=4,fusion={fusion}").save(tmp_path / fusion)
        subjects[fusion] = subject(model, twice, "cropr:r=4", learned=tmp_path / fusion, beside=True)
    found = results_of(None, ["tsne"], subjects)["tsne"]
    assert [(row["method"], row["fusion"], row["block"]) for row in rows(found, "tsne")] == [
        (f"cropr:r=4 on {fusion}", fusion, block) for fusion in ("last_layer", "concat") for block in ("all", 1, 2)
    ]


@torch.no_grad()
def test_concatenated_tokens_are_as_they_were_when_pruned(model: nn.Module, data: TensorDataset) -> None:
    own = subject(model, data, limit=8, batch_size=8)
    form = parse_method("cropr:r=4").rejoining()["concat"]
    decisions: list[Any] = []

    class Both(_PrunedTokens):
        def __init__(self, contestant: Contestant) -> None:
            super().__init__(contestant)
            self.other = ReducerCalls(self.reduction, scores=True)

        def see(self, batch: Batch, output: ModelOutput, dense: ModelOutput) -> None:
            decisions.extend(self.other.take())
            super().see(batch, output, dense)

    [pruned] = Both.over(own, [form], own.batches())
    tokens = np.concatenate([tokens for (tokens,) in pruned.by_block().values()])
    expected = []
    for decision in decisions:
        order = decision.scores.argsort(1, descending=True)
        best = order[:, decision.assignment.anchor.shape[1] - 1] + 1  # the first that is not kept
        expected.append(decision.x[torch.arange(8), best])
    assert {block: len(tokens) for block, (tokens,) in pruned.by_block().items()} == {1: 8, 2: 8}
    assert np.allclose(tokens, torch.cat(expected).numpy(), atol=1e-6)


def test_silhouettes_by_hand() -> None:
    points, labels = np.array([[0.0], [2.0], [5.0], [6.0], [20.0]]), [3, 3, 7, 7, 9]
    each = [(5.5 - 2) / 5.5, (3.5 - 2) / 3.5, (4 - 1) / 4, (5 - 1) / 5, 0]
    expected = [np.mean(each), np.mean(each[:2]), np.mean(each[2:4]), 0]
    assert np.allclose(silhouettes(points, labels), expected)
    assert np.isnan(silhouettes(points, [1] * 5)).all()
