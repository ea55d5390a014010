"""Router: the scores by which patches are kept, and their pictures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from torch import nn
from torch.utils.data import TensorDataset

import vitrim
from made_subjects import PATCHES, class_row, reduced, subject
from made_tables import rows
from tiny import configs
from vitrim.analysis.families.router import concordance, router
from vitrim.measure.reducer_calls import ReducerCalls


@pytest.mark.parametrize("seed", range(5))
def test_concordance_is_kendalls_tau_without_ties(seed: int) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, 20))
    assert concordance(a, b) == pytest.approx((1 + kendalltau(a, b).statistic) / 2)
    a[3], b[5] = np.nan, np.nan
    known = np.isfinite(a) & np.isfinite(b)
    assert concordance(a, b) == pytest.approx((1 + kendalltau(a[known], b[known]).statistic) / 2)
    assert np.isnan(concordance([1, np.nan], [1, 2]))


SAMPLES = ("ats", "zero_tprune")
"""They draw by their scores, or drop what is alike afterwards."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", configs(), ids=lambda config: config.describe())
@torch.no_grad()
def test_patches_that_stay_rank_above_those_that_go(
    model: nn.Module, data: TensorDataset, config: vitrim.MethodConfig
) -> None:
    """Over the registry: whatever a reducer says that it ranks by is what decides."""
    reduction = reduced(model, config)
    calls = ReducerCalls(reduction, scores=True)
    images = data.tensors[0][:4]
    torch.manual_seed(1)
    before = reduction.model(images)
    decisions = [call for call in calls.take() if call.scores is not None]
    for decision in decisions:
        scores, stays = decision.on_grid()
        for one, kept in zip(scores, stays, strict=True):
            gone = np.isfinite(one) & ~kept
            if kept.any() and gone.any() and config.name not in SAMPLES:
                assert one[kept].min() >= one[gone].max() - 1e-9
    torch.manual_seed(1)
    assert torch.equal(before, reduced_like(model, config, reduction)(images))  # looking changes nothing


def reduced_like(model: nn.Module, config: vitrim.MethodConfig, other: vitrim.Reduction) -> nn.Module:
    """The same reduction, not watched."""
    found = reduced(model, config).model
    found.load_state_dict(other.model.state_dict())
    return found


def test_scores_over_the_image(model: nn.Module, data: TensorDataset) -> None:
    result = router(subject(model, data, "topk:keep_rate=0.5", "cropr:r=4", "tome:r=4"))
    assert result.notes == ["tome:r=4 is left out of router: it does not rank patches"]
    arrays = result.arrays
    assert arrays["topk:keep_rate=0.5/scores"].shape == (8, 3, PATCHES)
    known = np.isfinite(arrays["topk:keep_rate=0.5/scores"]).sum(-1)
    assert known.tolist() == [[36, 18, 9]] * 8
    depth = arrays["topk:keep_rate=0.5/depth"]
    assert [int((depth == block).sum(1)[0]) for block in (1, 2, 3, 4)] == [18, 9, 5, 4]
    with torch.no_grad():  # block 1 is the first to prune: it sees the tokens of the dense model
        images = data.tensors[0][subject(model, data).places(32)][:8]
        expected = class_row(model, model.blocks[0](model._pos_embed(model.patch_embed(images))))[:, 1:]
    assert np.allclose(arrays["topk:keep_rate=0.5/scores"][:, 0], expected.numpy(), atol=1e-6)
    found = [row for row in rows(result, "router") if row["method"] == "topk:keep_rate=0.5"]
    assert [(row["block"], row["scored"], row["kept"]) for row in found] == [(1, 36, 18), (2, 18, 9), (3, 9, 4)]
    assert found[0]["score_kept"] > found[0]["score"] > found[0]["score_removed"]
    assert found[2]["persistence"] is None
